"""Options that have no effect with the images that a config names, or not the one they are set for."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from library.config.dataset import DATASET_KEYS, SUBSET_KEYS, DatasetConfig, SubsetConfig, decided
from library.config.dataset_rules import PRESERVES_BASE
from library.config.ineffective import ineffective_options, remark
from library.config.problems import Message, Problem, counted, option_name, together
from library.config.run_config import RunConfig
from library.config.sections.captions import USUAL_VARIANTS
from library.data import augment
from library.data.captions import TRIGGER, with_affixes
from library.data.folders import about_images, some, some_files
from library.data.images import ImageSet
from library.data.pixels import has_transparency
from library.data.survey import Survey

NOT_SPLIT = "shuffle_caption and caption_tag_dropout_rate are off"
NO_REFERENCES = "control_directory is not set"
# As the rules in library/config/ineffective.py, which look at the run's own options: names, whether they act, why not.
IDLE_IN_FILE: tuple[tuple[str, Callable[[DatasetConfig, SubsetConfig], Any], str], ...] = (
    ("keep_tokens", lambda d, s: s.splits_tags, NOT_SPLIT),
    (
        "caption_separator",
        lambda d, s: s.splits_tags or s.secondary_separator or s.keep_tokens_separator or s.metadata_file,
        NOT_SPLIT,
    ),
    ("token_warmup_min", lambda d, s: s.token_warmup_step, "token_warmup_step is 0"),
    (
        "min_bucket_reso max_bucket_reso bucket_reso_steps bucket_no_upscale",
        lambda d, s: d.enable_bucket,
        "enable_bucket is off",
    ),
    ("validation_seed", lambda d, s: d.validation_split, "validation_split is 0"),
    ("control_resolution no_resize_control", lambda d, s: s.control_directories or s.metadata_file, NO_REFERENCES),
)
DEFAULT_BY_KEY = {name: option.default for name, option in {**DATASET_KEYS, **SUBSET_KEYS}.items()}


def overridden(config: RunConfig, survey: Survey) -> Iterator[Problem]:
    """Yield options that a dataset or metadata file overrides, and validation shares of less than one image."""
    if names := decided(config) if config.data.dataset_config else []:
        why = Message("{file} sets it for all images", file=Path(config.data.dataset_config or "").name)
        if len(names) == 1:
            yield Problem(names[0], "has no effect: {why}", why=why)
        else:
            template, also = "{names} have no effect: {why}", " ".join(names)
            yield Problem("", template, also=also, names=together(map(option_name, names)), why=why, topic="images")
    images = survey.images
    if repeated := [folder for dataset in images.datasets for folder in dataset.repeated]:
        yield about_images(
            "{places} given again in one [[datasets]] table, where only the first subset of a folder counts: put the "
            "others under a [[datasets]] of their own",
            places=some(repeated),
        )
    listed = [subset for dataset in images.datasets for subset in dataset.subsets if subset.metadata_file]
    for name in ("class_tokens", "cache_info") if config.data.dataset_config else ():
        if any(getattr(subset, name) for subset in listed):
            yield Problem(name, "has no effect beside metadata_file, which has captions and sizes")
    if config.data.dataset_config:
        yield from _idle_in_file(config, images)
    yield from _held_nothing(images)


def _idle_in_file(config: RunConfig, images: ImageSet) -> Iterator[Problem]:
    """Yield values of a dataset file without effect, because every subset that has them lacks what they belong to."""
    pairs = [(dataset, subset) for dataset in images.datasets for subset in dataset.subsets]
    covered = ineffective_options(config)  # remarks on the run's own options
    for names, applies, reason in IDLE_IN_FILE:
        for name in names.split():
            own = [(s if hasattr(s, name) else d, applies(d, s)) for d, s in pairs]
            having = [used for holder, used in own if getattr(holder, name) != DEFAULT_BY_KEY[name]]
            if having and not any(having) and name not in covered:
                yield remark(name, reason)
    unread = {name for _, subset in pairs for name in subset.custom_attributes or {}} - {PRESERVES_BASE}
    if unread:
        template = ": {names} without effect, as only {known} is read"
        yield Problem("custom_attributes", template, names=together(sorted(unread)), known=PRESERVES_BASE)


def _held_nothing(images: ImageSet) -> Iterator[Problem]:
    """Yield data sets that hold no image out although they have a share for it."""
    held = {image.dataset for image in images.validation.items} if images.validation else set()
    count = Counter(image.dataset for image in images.items if not image.is_reg)
    for position, dataset in enumerate(images.datasets):
        share = dataset.validation_split
        if not share or position in held or not count[position]:
            continue
        consequence = Message("nothing is validated")
        if len(images.datasets) > 1:
            consequence = Message("data set {number} holds none out", number=position + 1)
        below_one_image = "= {share} of {count} is less than one image; {so}"
        only_copies = (
            "= {share} of {count} holds none out, since one is kept for training and copies stay together; {so}"
        )
        template = below_one_image if round(share * count[position]) < 1 else only_copies
        yield Problem(
            "validation_split", template, share=share, count=counted(count[position], "image"), so=consequence
        )


def _about_masks(config: RunConfig, survey: Survey) -> Iterator[Problem]:
    """Yield options that need masks if there are none."""
    masked = any(subset.conditioning_data_dir or subset.alpha_mask for subset in _subsets(survey))
    if config.data.masked_loss and not masked and not any(image.mask_file for image in survey.images.items):
        yield Problem("masked_loss", "has no effect: no subset has conditioning_data_dir, and alpha_mask is off")
    with_alpha_mask = [image.path for image in survey.images.items if image.subset.alpha_mask]
    # An inpainting model repaints all of an image without transparency.
    if with_alpha_mask and not config.control_images.inpaints and not any(map(has_transparency, with_alpha_mask)):
        yield Problem("alpha_mask", "has no effect: none of the images has a transparent area, or an alpha channel")


def without_effect(config: RunConfig, survey: Survey) -> Iterator[Problem]:
    """Yield options that have no effect with this data."""
    for about in (_about_wildcards, _about_masks, _about_background, _about_faces, _about_base_model, _about_trigger):
        yield from about(config, survey)
    sizes = [dataset.batch_size for dataset in survey.images.datasets]
    if num_small := sum(len(members) < sizes[key[0]] for key, members in survey.images.buckets().items()):
        yield about_images(
            "{buckets} with fewer images than the batch size; their batches are smaller",
            buckets=counted(num_small, "bucket"),
        )


def _subsets(survey: Survey) -> list[SubsetConfig]:
    return [subset for dataset in survey.images.datasets for subset in dataset.subsets]


def _about_wildcards(config: RunConfig, survey: Survey) -> Iterator[Problem]:
    once = config.cache.text and config.cache.cached_caption_variants == 1
    if once and any(subset.enable_wildcard for subset in _subsets(survey)):
        yield Problem(
            "enable_wildcard",
            "draws one variant of each caption for the whole training: captions are encoded once; set "
            "cached_caption_variants for more",
            fix={"cached_caption_variants": USUAL_VARIANTS},
            also="cache_text_encoder_outputs cache_text_encoder_outputs_to_disk",
        )


def _about_background(config: RunConfig, survey: Survey) -> Iterator[Problem]:
    read = [*survey.images.items, *(control for image in survey.images.items for control in image.controls)]
    if config.data.transparent_background and not any(i.how.ground and has_transparency(i.path) for i in read):
        yield Problem(
            "transparent_background",
            "has no effect: none of the images has a transparent area, or an alpha channel",
        )


def _about_faces(config: RunConfig, survey: Survey) -> Iterator[Problem]:
    if not any(subset.face_crop_aug_range for subset in _subsets(survey)):
        return
    if config.cache.latents:
        yield Problem("face_crop_aug_range", "has no effect with cache_latents")
    elif not any(augment.face_of(image.path) is not None for image in survey.images.items):
        yield Problem("face_crop_aug_range", "has no effect: no file name ends in _<x>_<y>_<width>_<height> of a face")


def _about_base_model(config: RunConfig, survey: Survey) -> Iterator[Problem]:
    """Yield settings of data sets about the base model beside the adapters."""
    if any(dataset.network_multiplier != 1 for dataset in survey.images.datasets):
        yield about_images(
            "network_multiplier in the dataset_config has no effect: adapters are trained at their full strength"
        )
    if any(subset.preserves_base for subset in _subsets(survey)) and not config.can_be_left_out:
        why = ": diff_output_preservation has no effect: only a LoRA or LLLite can be left out to ask the base model"
        yield Problem("custom_attributes", why)


def _about_trigger(config: RunConfig, survey: Survey) -> Iterator[Problem]:
    images = [image for image in survey.images.items if not image.is_reg]
    phrase = config.metadata.metadata_trigger_phrase
    texts = [with_affixes(image.caption, image.subset) for image in images]
    if phrase and images and not any(phrase.lower() in words.lower() for words in texts):
        yield Problem(
            "metadata_trigger_phrase",
            ": '{phrase}' is in none of the captions, so it will not trigger what is trained",
            phrase=phrase,
        )
    if unfilled := [image.path for image, words in zip(images, texts, strict=True) if TRIGGER in words]:
        yield Problem(
            "metadata_trigger_phrase",
            "is not set, but the captions of {count} contain [trigger], which is learned literally; set it to the "
            "word that replaces [trigger]: {paths}",
            count=counted(len(unfilled), "image"),
            paths=some_files(unfilled),
        )
