"""Rules among the values of a dataset file's tables, and between them and the run's options."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.config.sections.captions import clashes_with_cache
from library.config.sections.inputs import resolution_rules
from library.config.values import quoted

if TYPE_CHECKING:
    from library.config.dataset import DatasetConfig, SubsetConfig

PRESERVES_BASE = "diff_output_preservation"  # the only custom attribute that anything reads


def wrong(source: str, key: str, template: str, **facts: Any) -> Problem:
    place = f"in {source} " if source.endswith(":") else f"in {source}: "
    return Problem(key, template, place=place, topic="images", **facts)


def dataset_problems(dataset: "DatasetConfig", source: str, config: RunConfig) -> Iterator[Problem]:
    """Yield violations of rules among one data set's values, and between them and the run's options."""
    if not dataset.resolution:
        yield wrong(source, "resolution", "is not set: {usual} is usual", usual=config.usual_size)
    if dataset.enable_bucket:
        yield from _bucket_problems(dataset, source, config)
    yield from _paired_image_problems(dataset, source, config)
    shown = any(subset.control_directories for subset in dataset.subsets) and config.control_images.captioned
    if shown and config.data.dataset_config and not config.cache.text:
        template = "needs cache_text_encoder_outputs, as the text encoder also sees the reference images"
        yield wrong(source, "control_directory", template, also="cache_text_encoder_outputs")
    if len({bool(subset.metadata_file) for subset in dataset.subsets}) > 1:
        yield wrong(
            source,
            "",
            "either all subsets have a metadata_file or none has: split them into two [[datasets]]",
            also="metadata_file",
        )
    for subset in dataset.subsets:
        place = f"{source} subset {subset.metadata_file or subset.image_dir}:"
        if subset.more_control_directories and not subset.control_directory:
            yield wrong(place, "more_control_directories", "needs control_directory: name the first folder there")
        if dataset.enable_bucket and subset.face_crop_aug_range:
            template = "works only without buckets: switch enable_bucket off"
            yield wrong(place, "face_crop_aug_range", template, also="enable_bucket")
        switch = (subset.custom_attributes or {}).get(PRESERVES_BASE)
        if switch is not None and not isinstance(switch, int):  # any text would count as on
            template = ": {name} must be true or false, got {value}"
            yield wrong(place, "custom_attributes", template, name=PRESERVES_BASE, value=quoted(switch))
        yield from _subset_problems(subset, place, config)


def _paired_image_problems(dataset: "DatasetConfig", source: str, config: RunConfig) -> Iterator[Problem]:
    """Yield folders of masks, control or reference images in an option that does not take them."""
    use, subsets = config.control_images, dataset.subsets
    has_references = any(subset.control_directories for subset in subsets)
    if has_references and not use.most:
        template = "is for models with reference images; {title} takes none"
        if use.guided:
            template = "is for reference images: name the folder of control images in conditioning_data_dir"
        elif use.inpaints:
            template = "is for reference images: name the folder of masks in conditioning_data_dir"
        yield wrong(source, "control_directory", template, title=config.title)
    elif use.guided and not all(subset.conditioning_data_dir for subset in subsets):
        yield wrong(source, "conditioning_data_dir", "is not set: name the folder of control images in each subset")
    masked = config.data.masked_loss or use.inpaints or use.guided
    if any(subset.conditioning_data_dir for subset in subsets) and not masked:
        template = "needs masked_loss in the run's options"
        if use.most:
            template = "is for masks: name the folder of reference images in control_directory, or set masked_loss"
        yield wrong(source, "conditioning_data_dir", template)


def _subset_problems(subset: "SubsetConfig", place: str, config: RunConfig) -> Iterator[Problem]:
    """Yield options of a subset that conflict with encoding once, or with reference images."""
    for name, template in clashes_with_cache(config).items() if config.cache.text else ():
        if getattr(subset, name):
            yield wrong(place, name, template)
    clashes = [("cache_latents", name) for name in ("color_aug", "random_crop") if config.cache.latents]
    # These change the image, which would no longer match its reference image.
    moved = ["color_aug", "random_crop", "face_crop_aug_range", *["flip_aug"] * config.control_images.captioned]
    clashes += [("control_directory", name) for name in moved if subset.control_directory]
    for cache, name in clashes:
        if getattr(subset, name):
            yield wrong(place, name, "cannot be used with {cache}: switch one of them off", cache=cache)


def _bucket_problems(dataset: "DatasetConfig", source: str, config: RunConfig) -> Iterator[Problem]:
    if dataset.bucket_reso_steps % config.grid:
        facts = {"grid": config.grid, "title": config.title, "also": "enable_bucket"}
        yield wrong(source, "bucket_reso_steps", "must be a multiple of {grid} for {title}", **facts)
    if dataset.min_bucket_reso > dataset.max_bucket_reso:
        yield wrong(
            source, "min_bucket_reso", "must not be above max_bucket_reso", also="max_bucket_reso enable_bucket"
        )
    if dataset.resolution and not dataset.bucket_no_upscale:
        yield from resolution_rules(dataset.resolution, dataset, f"in {source} ")
