"""The share of an epoch of each folder of a training, and the number of steps, as the trainer counts them."""

from collections.abc import Callable

from library.config.json_types import JsonObject
from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.curation import sources
from library.curation.collection import MAX_IMAGES_PER_EPOCH
from library.data import finding
from library.data.images import summarise_images
from library.data.length import training_length


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
