"""All problems of the data at once, before anything heavy is loaded. No torch."""

import os
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from PIL import Image as Pillow

from library.config.problems import SURROGATES, Message, Problem, Report, counted, either
from library.config.run_config import RunConfig
from library.config.sections import EmbeddingRun
from library.config.sections.captions import NO_CAPTIONS, UNREAD_CAPTIONS
from library.config.values import name_length
from library.data import finding, mask_check
from library.data.caption_files import BARE_FOLDER
from library.data.controls import stored_image_size
from library.data.folders import MAX_MESSAGES_PER_KIND, about_images, capped_by_kind, some, some_files
from library.data.idle_options import overridden, without_effect
from library.data.images import Image, ImageSet, bucket_rules
from library.data.orientation import orientation
from library.data.pixels import check_file, has_transparency, hides_colours
from library.data.survey import Survey
from library.data.threads import spread
from library.data.uniform import remark_uniform
from library.files import LONGEST_NAME

MAX_WHOLE_IMAGES = 500  # images that are read as a whole while somebody fills in a form
MUCH_CUT = 0.2  # share of width or height
MAX_DECODED_IMAGES = 100  # images that are decoded to see whether they hide colours
OPAQUE = (".jpg", ".jpeg", ".bmp")  # formats without transparency
CACHE_ENDING = len("_1024x1024_kind.npz")  # least length that the name of a cache adds to the image's


class Check(NamedTuple):
    """Problems that stop a training, and warnings."""

    problems: list[Problem]
    warnings: list[Problem]
    images: ImageSet | None = None  # the images that were found, even if there are problems
    masks: Message | None = None  # how many images have one, and how much of their area counts


def check_data(config: RunConfig, grid: int, report: Report | None = None, quick: bool = False) -> Check:
    """Check all data once: folders, images, captions, buckets, options that exclude each other.

    The sides of buckets must be multiples of `grid` pixels. With `quick`, as while somebody fills in a form, only
    headers and ends of the images of large data sets are read.
    """
    survey = finding.survey_data(config, report)
    images = [*survey.images.items, *(survey.images.validation.items if survey.images.validation else ())]
    stops, notes = [*capped_by_kind(survey.problems)], list(survey.warnings)
    to_disk = config.cache.cache_latents_to_disk
    stops += _find_damaged(survey, images, config, report, quick)
    for dataset in survey.images.datasets:
        if dataset.resolution:
            reported = {option for stop in stops for option in stop.options}  # such as by the rules of a dataset file
            stops += [problem for problem in bucket_rules(dataset).problems(grid) if problem.option not in reported]
    stops += _without_the_word(config, images)
    copied = list(mask_check.copies(config, survey))
    masks = mask_check.check_masks(config, survey, report)
    stops += [*(problem for is_error, problem in copied if is_error), *masks.problems]
    if to_disk:
        stops += [*_sharing_a_cache(images), *_too_long_for_a_cache(images), *_closed_to_caches(survey, images)]
    other_captions = survey.other_captions
    bare = [] if config.caption_change.sentences else list(_without_captions(images))
    if bare and other_captions:  # one cause, one message: the one with the option to set
        facts = {"why": other_captions[0], "fix": other_captions[0].fix, "topic": "captions", "code": UNREAD_CAPTIONS}
        bare, other_captions = [Problem("", "no image has a caption: {why}", **facts)], other_captions[1:]
    notes = [note for note in notes if not _says_no_more(note, config, bool(bare))]
    notes = [
        *bare,
        *other_captions,
        *notes,
        *_about_captions(config, survey),
        *_about_images(images),
        *(remark_uniform(images) if not quick or len(images) <= MAX_WHOLE_IMAGES else ()),
        *_not_utf_8(images),
    ]
    notes += [*overridden(config, survey), *without_effect(config, survey)]
    notes += [*(problem for is_error, problem in copied if not is_error), *masks.warnings]
    return Check(stops, notes, survey.images, masks.text)


def _says_no_more(note: Problem, config: RunConfig, is_bare: bool) -> bool:
    """Return whether a remark is about a folder without captions where no image has one, or about repeats where
    nothing counts epochs.
    """
    if note.code == BARE_FOLDER:
        return is_bare
    steps, save, sample = config.steps, config.save, config.sample
    counted_epochs = (steps.max_train_epochs, save.save_every_n_epochs, sample.sample_every_n_epochs)
    return "dataset_repeats" in note.fix and not any(counted_epochs)


def _find_damaged(
    survey: Survey, images: list[Image], config: RunConfig, report: Report | None, quick: bool
) -> Iterator[Problem]:
    """Yield images, masks, control and reference images that cannot be decoded. Those with valid cached latents are
    not opened."""
    gone: list[str] = []
    opened: set[str] = set()
    to_disk = config.cache.cache_latents_to_disk
    for image in images:
        folder, name = os.path.split(image.path)
        listing = survey.files(folder)
        if name not in listing.images:
            gone.append(image.path)
        elif not to_disk or listing.known_size(name, image.how.turns(image.path)) is None:
            other_paths = (
                image.mask_file,
                *(path for control in image.controls for path in (control.path, control.mask)),
            )
            # Those without an image header were reported when they were found.
            opened |= {image.path, *(path for path in other_paths if path and 0 not in stored_image_size(survey, path))}
    doubtful, gone = sorted(opened), sorted({*gone})
    if gone and not to_disk:
        yield about_images(
            "{count} gone, only latents are left; set cache_latents_to_disk: {gone}",
            count=counted(len(gone), "image"),
            gone=some_files(gone),
            fix={"cache_latents_to_disk": True},
        )
    reads_whole = not quick or len(doubtful) <= MAX_WHOLE_IMAGES
    reasons = spread(partial(check_file, whole=reads_whole), doubtful, report, Message("checking images"))
    undecodable = {path: f" ({reason})" for path, reason in zip(doubtful, reasons, strict=True) if reason}
    if undecodable:
        yield about_images(
            "{count} cannot be decoded; replace or remove: {bad}",
            count=counted(len(undecodable), "image"),
            bad=some_files([*undecodable], undecodable, MAX_MESSAGES_PER_KIND),
        )


def _sharing_a_cache(images: list[Image]) -> Iterator[Problem]:
    """Yield images that would share a file of latents, such as photo.png and photo.jpg of one size."""
    first_paths: dict[tuple, str] = {}
    pairs = {}
    for image in images:
        other = first_paths.setdefault((os.path.splitext(image.path)[0], image.size), image.path)
        if other != image.path:
            pairs[other, image.path] = f"{other} and {Path(image.path).name}"
    if pairs:
        yield about_images(
            "these would share one cache file; rename one of each: {pairs}", pairs=some(list(pairs.values()))
        )


def _too_long_for_a_cache(images: list[Image]) -> Iterator[Problem]:
    """Yield images whose names are too long for the names of their caches."""
    stems = {image.path: os.path.splitext(os.path.basename(image.path))[0] for image in images}
    if long := sorted(path for path, stem in stems.items() if name_length(stem) > LONGEST_NAME - CACHE_ENDING):
        yield about_images(
            "{count} with a name too long for a cache file beside it; shorten to {most} bytes: {long}",
            count=counted(len(long), "image"),
            most=LONGEST_NAME - CACHE_ENDING,
            long=some_files(long),
        )


def _not_utf_8(images: list[Image]) -> Iterator[Problem]:
    """Yield images whose names are not UTF-8, so that other programs cannot find them."""
    if odd := sorted({image.path for image in images if SURROGATES.search(image.path)}):
        yield about_images(
            "{count} whose names are not UTF-8: they are trained, but other programs may not find them; rename them: "
            "{names}",
            count=counted(len(odd), "file"),
            names=some_files(odd),
        )


def _closed_to_caches(survey: Survey, images: list[Image]) -> Iterator[Problem]:
    """Yield read-only folders in which latents have to be written."""
    places = ((*os.path.split(image.path), image.how.turns(image.path)) for image in images)
    needed = {folder for folder, name, turned in places if survey.files(folder).known_size(name, turned) is None}
    if closed := sorted(folder for folder in needed if os.path.isdir(folder) and not os.access(folder, os.W_OK)):
        yield Problem(
            "cache_latents_to_disk",
            ": {closed} may not be written to: change its rights, or keep latents in memory with cache_latents",
            closed=some(closed),
            fix={"cache_latents_to_disk": False, "cache_latents": True},
        )


def _without_the_word(config: RunConfig, images: list[Image]) -> Iterator[Problem]:
    """Yield a problem if no caption contains the trained word of an embedding. Tokenizers ignore case."""
    if not isinstance(config, EmbeddingRun) or config.caption_change.sentences or not images:
        return
    word = (config.embedding.token_string or "").lower()
    captions = (f"{image.subset.caption_prefix} {image.caption} {image.subset.caption_suffix}" for image in images)
    if word and not any(word in words.lower() for words in captions):
        yield about_images(
            "{word} is in none of the captions, so nothing would be trained: write it into them, set caption_prefix to "
            "it, or set use_object_template or use_style_template",
            word=repr(config.embedding.token_string),
            topic="captions",
            fix={"caption_prefix": config.embedding.token_string},
        )


def _without_captions(images: list[Image]) -> Iterator[Problem]:
    """Warn if no image has its own caption: training on class tokens of folders is possible, but rarely intended."""
    learned = [image for image in images if not image.is_reg]
    bare = [i for i in learned if not i.caption.strip() or (not i.caption_file and i.caption == i.subset.class_tokens)]
    if not learned or len(bare) < len(learned):
        return
    endings = either(sorted({image.subset.caption_extension for image in learned}))
    words = sorted({image.subset.class_tokens or "" for image in learned})
    named = some([f"'{name}'" for name in words if name])
    instead = Message("all are trained without words")
    if named:
        remainder = Message(", and the others without words") if "" in words else ""
        instead = Message(
            "each is trained with the words of its folder, {words}{others}", words=named, others=remainder
        )
    yield about_images(
        "no image has a caption: none of {count} has a {endings} file with words beside it, "
        "so {instead}; write captions in the Data tab, or with: kohya caption",
        count=counted(len(learned), "image"),
        endings=endings,
        instead=instead,
        topic="captions",
        code=NO_CAPTIONS,
    )


def _about_captions(config: RunConfig, survey: Survey) -> Iterator[Problem]:
    """Warn of captions with unused lines, in their own files or in a metadata file."""
    if not survey.unread:
        return
    counts = {name: survey.unread[name] for name in sorted(survey.unread)}
    caption_files, lines = {image.caption_file for image in survey.images.items}, sum(counts.values())
    examples = some_files([*counts], {name: f": {count:,}" for name, count in counts.items()})
    advice = Message("write each caption in one line")
    if not config.cache.text:
        advice = Message("set enable_wildcard to use one of the lines at random, or write each caption in one line")
    in_files = caption_files.issuperset(counts)
    yield about_images(
        "{captions} of several lines, of which only the first is trained on and {lines} not ({which}); {advice}",
        captions=counted(len(counts), "caption file" if in_files else "caption"),
        lines=counted(lines, "line"),
        which=examples,
        advice=advice,
        topic="captions",
        fix={"enable_wildcard": True} if in_files and not config.cache.text else {},
    )


def _about_images(images: list[Image]) -> Iterator[Problem]:
    yield from _find_turned(images)
    yield from _find_cropped(images)
    yield from _transparent(images)
    small = sorted({i.path for i in images if i.fit.resized[0] > i.size[0] * 1.5 or i.fit.resized[1] > i.size[1] * 1.5})
    if small:
        yield about_images(
            "{count} upscaled more than 1.5 times, which blurs: {small}",
            count=counted(len(small), "image"),
            small=some_files(small),
        )
    huge = sorted({i.path for i in images if i.size[0] * i.size[1] > (Pillow.MAX_IMAGE_PIXELS or 2**30)})
    if huge:
        yield about_images(
            "{count} very large and slow to read; scale them down: {huge}",
            count=counted(len(huge), "image"),
            huge=some_files(huge),
        )


def _find_turned(images: list[Image]) -> Iterator[Problem]:
    """Warn of images, control and reference images that are not trained as viewers show them."""
    stored = {i.path for i in images if not i.how.upright}
    stored |= {control.path for i in images for control in i.controls if not control.how.upright}
    paths = sorted(stored)
    if turned := [path for path, turn in zip(paths, spread(orientation, paths), strict=True) if turn != 1]:
        yield about_images(
            "{count} turned or mirrored by an EXIF orientation, which is ignored; set exif_rotation to train them as "
            "they are seen: {turned}",
            count=counted(len(turned), "image"),
            turned=some_files(turned),
            fix={"exif_rotation": True},
        )


def _find_cropped(images: list[Image]) -> Iterator[Problem]:
    """Warn of images and reference images of which the crop cuts much off."""
    at_random = {i.path for i in images if i.subset.random_crop or i.subset.face_crop_aug_range}
    lost_by_image = {i.path: max(i.fit.cut) for i in images if i.path not in at_random}
    template = (
        "{count} cropped by more than {much}% of their width or height: {names}; crop or pad them yourself, or leave "
        "them out"
    )
    yield from _much_cut(lost_by_image, template)
    advised = {
        False: "{count} shown to the model cropped by more than {much}% of their width or height: {names}; set "
        "no_resize_control or control_resolution in the dataset_config to show all of them",
        True: "{count} shown to the model cropped by more than {much}% of their width or height: {names}; crop or pad "
        "them yourself",
    }
    for has_own_size, template in advised.items():
        own = [i for i in images if has_own_size == bool(i.subset.no_resize_control or i.subset.control_resolution)]
        # Without its mask, an image of FLUX.1 Fill is its own control image.
        references = [c for i in own for c in i.controls if not c.is_masked and c.path != i.path]
        yield from _much_cut({control.path: max(control.fit.cut) for control in references}, template)


def _much_cut(lost_by_path: dict[str, float], template: str) -> Iterator[Problem]:
    lost = {path: share for path, share in lost_by_path.items() if share > MUCH_CUT}
    worst = sorted(lost, key=lambda path: (-lost[path], path))
    names = some_files(worst, {path: f" ({round(100 * share)}%)" for path, share in lost.items()})
    if lost:
        yield about_images(template, count=counted(len(lost), "image"), much=round(100 * MUCH_CUT), names=names)


def _transparent(images: list[Image]) -> Iterator[Problem]:
    """Warn of images with transparent areas whose hidden colours are trained."""
    unmasked = {i.path for i in images if not (i.how.ground or i.subset.alpha_mask or i.mask_file)}
    template = (
        "{count} with transparent areas, where the colours that the file hides are trained; set "
        "transparent_background to a colour, or alpha_mask to leave these areas out: {names}"
    )
    yield from _hidden_colours(unmasked, template)
    controls = {c.path for i in images for c in i.controls if not (c.how.ground or c.is_masked)}
    template = (
        "{count} shown to the model with transparent areas, where it sees the colours that the file hides; set "
        "transparent_background to a colour: {names}"
    )
    yield from _hidden_colours(controls - {i.path for i in images}, template)


def _hides_colours(path: str) -> bool:
    about = os.stat(path)
    return hides_colours(path, about.st_mtime_ns, about.st_size)


def _hidden_colours(paths: Collection[str], template: str) -> Iterator[Problem]:
    """Warn of images with hidden colours in transparent areas; only some of many are looked at."""
    doubtful = sorted(path for path in paths if not path.lower().endswith(OPAQUE))
    clear = [path for path, is_clear in zip(doubtful, spread(has_transparency, doubtful), strict=True) if is_clear]
    looked_at = clear[:: -(-len(clear) // MAX_DECODED_IMAGES) or 1]  # every n-th; a step of 0 would be an error
    hidden = [path for path, hides in zip(looked_at, spread(_hides_colours, looked_at), strict=True) if hides]
    count = counted(len(hidden), "image")
    if len(looked_at) < len(clear):
        count = Message("{count} of {looked_at} that were looked at", count=count, looked_at=len(looked_at))
    if hidden:
        yield about_images(template, count=count, names=some_files(hidden), fix={"transparent_background": "white"})
