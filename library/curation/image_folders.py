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
    """The data set of a training without a dataset file, with its folders, and their problems.

    No image is opened.
    """
    (dataset, *_), problems = drafted(config)
    survey = Survey(ImageSet([], ()), problems=list(problems))
    return finding.with_folders(survey, dataset), survey.problems


def is_flat(folder: str | None) -> bool:
    """Whether the training images are directly in this folder."""
    return Path(folder or "").is_dir() and folders.is_flat(Path(folder or ""))


def count(folder: Path) -> int:
    """The number of images directly in a folder."""
    return len(folders.listing(folder).images)


def named(one: FolderTable) -> list[FolderTable]:
    """An added folder with the options from its name; a parent of folders named <repeats>_<words> becomes these."""
    folder = Path(one.texts.get("image_dir", ""))
    if one.at is not None or one.texts.get("num_repeats") or not folder.is_dir():
        return [one]
    concepts = folders.concepts(folder)
    if not concepts and (own := folders.concept(folder)) and 0 < own.repeats < folders.MANY_REPEATS:
        concepts = [own]
    return [
        FolderTable(
            {**one.texts, "image_dir": str(each.folder), "num_repeats": str(each.repeats)}
            | ({"class_tokens": each.words} if each.words else {})
        )
        for each in concepts
    ] or [one]
