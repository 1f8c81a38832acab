"""Find the images that a config names: files, sizes, captions, buckets. No image is decoded, no torch is needed."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from library.config.dataset import DatasetConfig, drafted
from library.config.places import real_place
from library.config.problems import Problem, Report, counted, raise_if_any
from library.config.run_config import RunConfig
from library.data import folder_problems, folders, held_out
from library.data.controls import find_missing_controls, find_unused_controls
from library.data.folders import about_images, some
from library.data.images import Image, ImageSet, balance, bucket_rules
from library.data.pixels import decoding
from library.data.subset_images import bucketed_image, find_images, read_sizes
from library.data.survey import Survey

PLACEHOLDER = (1024, 1024)  # for a resolution that is not set


def scan(config: RunConfig, report: Report | None = None) -> ImageSet:
    """Find the images that a config names, with captions, sizes and buckets. The order is deterministic.

    Raises ConfigError with every problem, one per line.
    """
    survey = survey_data(config, report)
    raise_if_any(survey.problems)
    return survey.images


def survey_data(config: RunConfig, report: Report | None = None, keep: bool = True) -> Survey:
    """Scan all data that a config names, and collect problems instead of stopping at the first.

    With `keep` false nothing is written, whatever cache_info says.
    """
    use = config.control_images
    masks = use.inpaints or (config.data.masked_loss and not use.guided)
    survey = Survey(ImageSet([], ()), report, keep, control_use=use, takes_masks=masks, how=decoding(config))
    survey.list_option = "metadata_file" if config.data.dataset_config else "in_json"
    drafts, survey.problems = drafted(config)
    datasets = _with_subsets(survey, [draft for draft in drafts if draft.subsets or not config.data.dataset_config])
    learned: list[list[Image]] = []  # by data set
    regular: list[list[Image]] = []
    for position, dataset in enumerate(datasets):
        if dataset.resolution is None and all(problem.option != "resolution" for problem in survey.problems):
            survey.problems.append(Problem("resolution", "is not set: {usual} is usual", usual=config.usual_size))
        images = _images_of(survey, position, _with_valid_sizes(dataset))
        learned.append([image for image in images if not image.is_reg])
        regular.append([image for image in images if image.is_reg])
    resumed = held_out.resumed_split(config)
    split = held_out.hold_out(datasets, learned, regular, config.steps.seed or 0, resumed)
    survey.copies, survey.warnings = split.copies, [*survey.warnings, *held_out.split_warnings(split, resumed)]
    train, validation = _image_sets(survey, datasets, split)
    survey.problems += [*find_missing_controls(survey), *_learned_as_regular(config, datasets)]
    if not train.items and not survey.problems:
        survey.problems.append(_why_none(config, datasets, validation))
    survey.images = train
    survey.problems = [*dict.fromkeys(survey.problems)]  # an image at several sizes repeats its problems
    survey.warnings = [*dict.fromkeys([*survey.warnings, *find_unused_controls(survey)])]
    train.validation = validation if validation.items else None
    train.warnings, train.unused = (*survey.other_captions, *survey.warnings), tuple(survey.unused)
    return survey


def _image_sets(
    survey: Survey, datasets: tuple[DatasetConfig, ...], split: held_out.Split
) -> tuple[ImageSet, ImageSet]:
    """Return the images to train on, and those held out, once each and without augmentation."""
    train, validation = ImageSet([], datasets, held_out=split.marks), ImageSet([], datasets, is_validation=True)
    for dataset, learned, held, regular in zip(datasets, split.learned, split.held_out, split.regular, strict=True):
        train.items += learned + _balance_regularisation(survey, regular, learned)
        plain_subsets = {id(subset): held_out.plain_options(subset) for subset in dataset.subsets}
        validation.items += (replace(image, repeats=1, subset=plain_subsets[id(image.subset)]) for image in held)
    return train, validation


def _why_none(config: RunConfig, datasets: tuple[DatasetConfig, ...], validation: ImageSet) -> Problem:
    """Return why there is nothing to train on although folders contain images."""
    if not validation.items:
        subsets = [subset for dataset in datasets for subset in dataset.subsets]
        if subsets and not any(subset.num_repeats for subset in subsets):
            template = "is 0 for all images, so none is left to train on; write 1 or more"
            return Problem("num_repeats", template, topic="images")
        if subsets and all(subset.is_reg for subset in subsets if subset.num_repeats):
            template = "makes all images regularisation images, so none is left to train on; remove it from some"
            return Problem("is_reg", template, topic="images")
        return about_images("there are no images to train on")
    return Problem(
        "validation_split",
        "holds out every image ({count}), so none is left to train on; write a share below 1, such as 0.1",
        count=counted(len(validation.items), "image"),
        topic="images",
        fix={} if config.data.dataset_config else {"validation_split": 0.1},
    )


def _learned_as_regular(config: RunConfig, datasets: tuple[DatasetConfig, ...]) -> Iterator[Problem]:
    """Yield folders whose images are both training and regularisation images."""
    subsets = [subset for dataset in datasets for subset in dataset.subsets if subset.image_dir and subset.num_repeats]
    learned = {real_place(subset.image_dir or "") for subset in subsets if not subset.is_reg}
    regular = dict.fromkeys(s.image_dir for s in subsets if s.is_reg and real_place(s.image_dir or "") in learned)
    if regular:
        yield Problem(
            "is_reg" if config.data.dataset_config else "reg_data_dir",
            ": {folders} cannot be training images and regularisation images at once; name another folder for one of "
            "them, or leave the regularisation images out",
            folders=some([*regular]),
            topic="images",
        )


def _with_valid_sizes(dataset: DatasetConfig) -> DatasetConfig:
    dataset = dataset if dataset.resolution else replace(dataset, resolution=PLACEHOLDER, enable_bucket=False)
    return replace(dataset, enable_bucket=False) if any(bucket_rules(dataset).problems()) else dataset


# ---- one data set


def _with_subsets(survey: Survey, drafts: list[DatasetConfig]) -> tuple[DatasetConfig, ...]:
    """Return data sets with their folders. Without a dataset file all have the same folders, each at its own size."""
    first = [with_folders(survey, dataset) for dataset in drafts[:1]]
    return (*first, *(replace(draft, subsets=draft.subsets or first[0].subsets) for draft in drafts[1:]))


def with_folders(survey: Survey, dataset: DatasetConfig) -> DatasetConfig:
    """Return a data set with its subsets: without a dataset file, each folder named <repeats>_<words>, or else the
    folder itself."""
    if dataset.subsets:
        return dataset
    if not dataset.train_data_dir:
        survey.problems.append(Problem("train_data_dir", "is not set: choose the folder of your images"))
    subsets = []
    # `balance` repeats regularisation images until they are as many as the others, so that each has one repeat here.
    for option, repeats in (("train_data_dir", dataset.template.num_repeats), ("reg_data_dir", 1)):
        if not (parent := getattr(dataset, option)):
            continue
        if problems := list(folder_problems.problems_of_parent(option, parent)):
            survey.problems += problems
            continue
        survey.warnings += folder_problems.warnings_of_parent(option, Path(parent), repeats)
        if option == "train_data_dir" and repeats > 1 and not folders.has_flat_images(Path(parent)):
            survey.warnings.append(
                Problem("dataset_repeats", "has no effect: the folders of images say their repeats in their names")
            )
        subsets += [
            replace(
                dataset.template,
                image_dir=os.fspath(concept.folder),
                num_repeats=concept.repeats,
                class_tokens=concept.words or None,
                is_reg=option == "reg_data_dir",
            )
            for concept in folders.folders_to_train(Path(parent), repeats)
        ]
    return replace(dataset, subsets=tuple(subsets))


def _images_of(survey: Survey, position: int, dataset: DatasetConfig) -> list[Image]:
    rules = bucket_rules(dataset)
    images: list[Image] = []
    for subset in dataset.subsets:
        if subset.num_repeats < 1:
            unused = subset.metadata_file or subset.image_dir
            survey.warnings.append(about_images("{folder} has 0 repeats and is not used", folder=unused))
            continue
        if id(subset) not in survey.facts:  # else it is trained at several sizes, and known
            survey.facts[id(subset)] = read_sizes(survey, subset, find_images(survey, subset))
        images += (
            image
            for candidate, size, words in survey.facts[id(subset)]
            if (
                image := bucketed_image(survey, rules, (position, subset), candidate._replace(size=size, caption=words))
            )
        )
    return images


def _balance_regularisation(survey: Survey, regular: list[Image], learned: list[Image]) -> list[Image]:
    """Return the regularisation images to use with these images."""
    used = balance(regular, sum(image.repeats for image in learned))
    if unused := [image.path for image in regular[len(used) :]]:
        survey.unused += unused
        survey.warnings.append(
            about_images(
                "{count} not used: there are more than needed", count=counted(len(unused), "regularisation image")
            )
        )
    return used
