"""Folders of images: which of them a training uses, with the repeats and words in their names, and their shares of an
epoch, as the trainer counts them.
"""

from collections.abc import Callable
from pathlib import Path

from library.config.dataset import DatasetConfig, drafted
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig
from library.curation import sources
from library.curation.collection import MAX_IMAGES_PER_EPOCH
from library.curation.dataset_file import FolderTable
from library.data import finding, folders
from library.data.images import ImageSet, summarise_images
from library.data.length import training_length
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


def count_by_folder(config: RunConfig, may: Callable[[str], bool], world: int = 1) -> JsonObject:
    """Count the images of a training with `world` processes, by folder and in total.

    A folder is identified by its data set and its source. `may` tells which paths may be read. Raises ConfigError for
    images elsewhere, and for files that cannot be read.
    """
    sources.guard(config, may)
    survey = finding.survey_data(config, keep=False)
    tables = [dataset.table for dataset in survey.images.datasets]  # data sets at several resolutions share a table
    rows: dict[tuple[int, str], JsonObject] = {}
    for position, dataset in enumerate(survey.images.datasets):
        for subset in dataset.subsets:
            row = {"dataset": tables[position], "source": sources.source_of_subset(subset), "images": 0, "seen": 0}
            rows[tables[position], sources.source_of_subset(subset)] = {**row, "captioned": 0, "held": 0}
    learned: set[tuple[str, int]] = set()
    for image in survey.images.items:
        row = rows[tables[image.dataset], sources.source_of_subset(image.subset)]
        row["seen"] += image.repeats
        if (image.path, tables[image.dataset]) in learned:  # counted already, at another resolution
            continue
        learned.add((image.path, tables[image.dataset]))
        row["images"] += 1
        row["captioned"] += bool(image.caption_file or image.subset.metadata_file)
    for image in survey.images.validation.items if survey.images.validation else ():
        if (image.path, tables[image.dataset]) not in learned:
            learned.add((image.path, tables[image.dataset]))
            rows[tables[image.dataset], sources.source_of_subset(image.subset)]["held"] += 1
    images_per_epoch = sum(row["seen"] for row in rows.values())
    if images_per_epoch > MAX_IMAGES_PER_EPOCH:
        raise ConfigError("an epoch would have {seen} images: lower the repeats", seen=f"{images_per_epoch:,}")
    total = summarise_images(survey.images, world)
    # Messages about a single folder are shown by its row.
    flat = {row["source"] for row in rows.values()} == {config.data.train_data_dir}
    warnings = [warning for warning in survey.warnings if not (flat and warning.option == "train_data_dir")]
    length = training_length(config.steps, total["batches_per_epoch"])
    return {
        "rows": [*rows.values()],
        "images": total["images"],
        "learned": total["images"] - total["regularisation"],
        "seen": images_per_epoch,
        "buckets": len(total["buckets"]),
        "steps_per_epoch": length.per_epoch,
        "steps": length.total,
        "epochs": length.epochs,
        "problems": survey.problems,
        "warnings": [*survey.other_captions, *warnings],
    }
