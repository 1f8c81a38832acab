"""What is wrong with the data, all of it at once, before anything heavy is loaded. No torch."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image as Pillow

from library.data import augment, finding
from library.data.finding import MOST, Survey
from library.data.folders import number, some
from library.data.images import Image, ImageSet, bucket_rules
from library.data.pixels import check_file, is_turned
from library.data.threads import Report, spread


class Check(NamedTuple):
    """What stops a training, and what its user should know, one sentence each."""

    problems: list[str]
    warnings: list[str]
    images: ImageSet | None = None  # what was found, however much is wrong with it


def problems(config: Any, grid: int, report: Report | None = None) -> Iterator[str]:
    """Say what has to be fixed in the data before a training can start; bucket sides are multiples of `grid` pixels."""
    yield from check(config, grid, report).problems


def warnings(config: Any, grid: int, report: Report | None = None) -> Iterator[str]:
    """Say what in the data is perhaps not meant: captions that are not found, images that are not used, and so on."""
    yield from check(config, grid, report).warnings


def check(config: Any, grid: int, report: Report | None = None) -> Check:
    """Look at all data once: folders, headers and ends of images, captions, buckets, options that exclude another."""
    found = finding.survey(config, report)
    images = [*found.images.items, *(found.images.validation.items if found.images.validation else ())]
    stops, notes = list(found.problems), list(found.warnings)
    to_disk = config.cache.cache_latents_to_disk
    stops += _damaged(found, images, to_disk, report)
    for dataset in found.images.datasets:
        if dataset.resolution:
            stops += [problem for problem in bucket_rules(dataset).problems(grid) if problem not in stops]
    if to_disk:
        stops += _sharing_a_cache(images)
    others = found.other_captions
    if (bare := list(_without_captions(images))) and others:  # one cause, one sentence: the one that says what to set
        bare, others = [f"no image has a caption: {others[0]}"], others[1:]
    notes = [*bare, *others, *notes, *_about_captions(config, found), *_about_images(images)]
    notes += _about_options(config, found)
    return Check(stops, notes, found.images)


def _damaged(found: Survey, images: list[Image], to_disk: bool, report: Report | None) -> Iterator[str]:
    """Images that a decoder would give up on; with fresh latents beside them, they are not opened any more."""
    doubtful, gone = [], []
    for path in sorted({image.path for image in images}):
        folder, name = os.path.split(path)
        here = found.files(folder)
        if name not in here.images:
            gone.append(path)
        elif not to_disk or here.known_size(name) is None:
            doubtful.append(path)
    if gone and not to_disk:
        yield f"{number(len(gone), 'image')} gone, only latents are left; set cache_latents_to_disk: {some(gone)}"
    reasons = spread(check_file, doubtful, report, "checking images")
    bad = [f"{path} ({reason})" for path, reason in zip(doubtful, reasons, strict=True) if reason]
    if bad:
        yield f"{number(len(bad), 'image')} cannot be decoded; replace or remove: {some(bad, MOST)}"


def _sharing_a_cache(images: list[Image]) -> Iterator[str]:
    """photo.png and photo.jpg of one size would have one file of latents."""
    known: dict[tuple, str] = {}
    pairs = {}
    for image in images:
        other = known.setdefault((os.path.splitext(image.path)[0], image.size), image.path)
        if other != image.path:
            pairs[other, image.path] = f"{other} and {Path(image.path).name}"
    if pairs:
        yield f"these would share one cache file; rename one of each: {some(list(pairs.values()))}"


def _without_captions(images: list[Image]) -> Iterator[str]:
    """That not one image has a caption of its own: a training on the words of folders is possible, but seldom meant."""
    learned = [image for image in images if not image.is_reg]
    bare = [i for i in learned if not i.caption.strip() or (not i.caption_file and i.caption == i.subset.class_tokens)]
    if not learned or len(bare) < len(learned):
        return
    endings = " or ".join(sorted({image.subset.caption_extension for image in learned}))
    words = sorted({image.subset.class_tokens or "" for image in learned})
    named = some([f"'{name}'" for name in words if name])
    instead = f"each is trained with the words of its folder, {named}" if named else "all are trained without words"
    instead += ", and the others without words" if named and "" in words else ""
    yield (
        f"no image has a caption: none of {number(len(learned), 'image')} has a {endings} file with words beside it, "
        f"so {instead}; write captions in the Data set tab, or with: kohya caption"
    )


def _about_captions(config: Any, found: Survey) -> Iterator[str]:
    """Captions with more lines than are read: in their own files, or in a metadata file."""
    if not found.unread:
        return
    counts = {name: found.unread[name] for name in sorted(found.unread)}
    own, lines = {image.caption_file for image in found.images.items}, sum(counts.values())
    which = some([f"{name}: {count:,}" for name, count in counts.items()])
    one = "write each caption in one line"
    advice = one if config.cache.text else f"set enable_wildcard to use one of the lines at random, or {one}"
    if own.issuperset(counts):
        yield (
            f"{number(len(counts), 'caption file')} of several lines, of which only the first is trained on and "
            f"{number(lines, 'line')} not ({which}); {advice}"
        )
    else:
        yield (
            f"{number(len(counts), 'caption')} of several lines, of which only the first is trained on and "
            f"{number(lines, 'line')} not ({which}); {advice}"
        )


def _about_images(images: list[Image]) -> Iterator[str]:
    if turned := sorted({image.path for image in images if is_turned(image.path, image.size)}):
        yield (
            f"{number(len(turned), 'photo')} with an EXIF rotation, which training ignores; "
            f"save them rotated: {some(turned)}"
        )
    small = sorted({i.path for i in images if i.fit.resized[0] > i.size[0] * 1.5 or i.fit.resized[1] > i.size[1] * 1.5})
    if small:
        yield f"{number(len(small), 'image')} enlarged to more than 1.5 times the size, which blurs: {some(small)}"
    huge = sorted({i.path for i in images if i.size[0] * i.size[1] > (Pillow.MAX_IMAGE_PIXELS or 2**30)})
    if huge:
        yield f"{number(len(huge), 'image')} very large and slow to read; scale them down: {some(huge)}"


def _about_options(config: Any, found: Survey) -> Iterator[str]:
    """Options that do nothing with this data."""
    images = [image for image in found.images.items if not image.is_reg]
    subsets = [subset for dataset in found.images.datasets for subset in dataset.subsets]
    if config.cache.text and not (config.adapters and not config.network.network_train_unet_only):
        for name in ("caption_prefix", "caption_suffix", "enable_wildcard", "secondary_separator"):
            if any(getattr(subset, name) for subset in subsets):
                yield f"{name} has no effect with cache_text_encoder_outputs: captions are encoded as they are written"
    masked = any(subset.conditioning_data_dir or subset.alpha_mask for subset in subsets)
    if config.data.masked_loss and not masked:
        yield "masked_loss has no effect: no subset has conditioning_data_dir, and alpha_mask is off"
    if any(subset.face_crop_aug_range for subset in subsets):
        faces = sum(augment.face_of(image.path) is not None for image in found.images.items)
        if config.cache.latents:
            yield "face_crop_aug_range has no effect with cache_latents"
        elif not faces:
            yield "face_crop_aug_range has no effect: no file name ends in _<x>_<y>_<width>_<height> of a face"
    if any(dataset.network_multiplier != 1 for dataset in found.images.datasets):
        yield "network_multiplier in the dataset config has no effect: adapters are trained at their full strength"
    phrase = getattr(config.metadata, "metadata_trigger_phrase", None)
    if phrase and images and not any(phrase.lower() in image.caption.lower() for image in images):
        yield f"metadata_trigger_phrase: '{phrase}' is in none of the captions, so it will not trigger what is trained"
    few = _small_buckets(found)
    if few:
        yield f"{number(few, 'bucket')} with fewer images than the batch size; their batches are smaller"


def _small_buckets(found: Survey) -> int:
    sizes = [dataset.batch_size for dataset in found.images.datasets]
    return sum(len(members) < sizes[key[0]] for key, members in found.images.buckets().items())
