"""Folders of images: which of them a training uses, with the repeats and words in their names."""

from pathlib import Path

from library.config.dataset import DatasetConfig, drafted
from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.curation.dataset_file import FolderTable
from library.data import finding, folders
from library.data.images import ImageSet
from library.data.survey import Survey


def found(config: RunConfig) -> tuple[DatasetConfig, list[Problem]]:
    """Return the data set of a training without a dataset file, with its folders, and their problems.

    No image is opened.
    """
    (dataset, *_), problems = drafted(config)
    survey = Survey(ImageSet([], ()), problems=list(problems))
    return finding.with_folders(survey, dataset), survey.problems


def is_flat_folder(folder: str | None) -> bool:
    return Path(folder or "").is_dir() and folders.has_flat_images(Path(folder or ""))


def count_images(folder: Path) -> int:
    return len(folders.list_folder(folder).images)


def read_folder_name(table: FolderTable) -> list[FolderTable]:
    """Return an added folder with the options from its name; a parent of <repeats>_<words> folders becomes these."""
    folder = Path(table.texts.get("image_dir", ""))
    if table.at is not None or table.texts.get("num_repeats") or not folder.is_dir():
        return [table]
    concepts = folders.concepts(folder)
    if not concepts and (concept := folders.concept(folder)) and 0 < concept.repeats < folders.MANY_REPEATS:
        concepts = [concept]
    return [
        FolderTable(
            {**table.texts, "image_dir": str(found_concept.folder), "num_repeats": str(found_concept.repeats)}
            | ({"class_tokens": found_concept.words} if found_concept.words else {})
        )
        for found_concept in concepts
    ] or [table]
