"""Find the images of one subset: its files, then their sizes and captions, then their buckets."""

import io
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from library.config.dataset import SubsetConfig
from library.config.outside_text import NO_TEXT
from library.config.places import same_place
from library.config.problems import ConfigError, Message, Problem, counted
from library.data import captions, folder_problems, metadata
from library.data.buckets import Buckets, Size
from library.data.caption_files import about_missing, caption_file, read_caption
from library.data.controls import NUMBERED, controls_of, mask_of
from library.data.folders import MAX_MESSAGES_PER_KIND, about_images, cap_problems, some, some_files
from library.data.images import Image
from library.data.pixels import header_size
from library.data.survey import FoundImage, Survey
from library.data.threads import spread


def find_images(survey: Survey, subset: SubsetConfig) -> list[FoundImage]:
    """List the images of a subset, from its folder or its metadata file. Sizes and captions may be open still."""
    if subset.metadata_file:
        return _from_metadata(survey, subset)
    folder = Path(subset.image_dir or "")
    listing = survey.files(folder)
    if not folder.is_dir():
        survey.problems.append(about_images("image folder {folder} does not exist", folder=folder))
    elif not listing.images:
        survey.problems.append(folder_problems.why_empty(folder, listing, survey.files))
    survey.warnings += folder_problems.about_labels(listing, survey.takes_masks)
    deeper = [name for name in listing.folders if survey.files(folder / name).images]
    if deeper and listing.images:
        survey.warnings.append(
            about_images(
                "images in {deeper} inside {folder} are not used: sub-folders are not read",
                deeper=some(deeper),
                folder=folder,
            )
        )
    if listing.undecodable:
        template = "{folder}: {files} are in formats that are not read here, and not used; convert them to PNG or WebP"
        survey.warnings.append(about_images(template, folder=folder, files=some(listing.undecodable)))
    names = [name for name in listing.images if _is_trained(subset, name)]
    if listing.images and not names:
        survey.problems.append(
            about_images(
                "image folder {folder}: none of {count} is one to train on with image_suffix = '{suffix}' and "
                "control_suffix = '{other}'; correct these in the dataset_config, or rename the images",
                folder=folder,
                count=counted(len(listing.images), "image"),
                suffix=subset.image_suffix or "",
                other=subset.control_suffix or "",
            )
        )
    files = [caption_file(listing, name, subset.caption_extension) for name in names]
    missing = about_missing(subset, listing, names, files)
    survey.other_captions += [missing.whole_folder] if missing.whole_folder else []
    survey.warnings += missing.problems
    return [
        FoundImage(listing.path(name), listing.known_size(name), None, file)
        for name, file in zip(names, files, strict=True)
    ]


def _is_trained(subset: SubsetConfig, name: str) -> bool:
    """Return whether to train on an image of a folder, if suffixes distinguish images from reference images."""
    stem, inside = os.path.splitext(name)[0], subset.image_dir or ""
    if not stem.endswith(subset.image_suffix or ""):
        return False
    shares_folder = any(same_place(folder, inside) for folder in subset.control_directories)
    numbered = NUMBERED.fullmatch(stem)
    stems = (stem, numbered[1]) if numbered else (stem,)
    return not (
        subset.control_suffix
        and shares_folder
        and any(candidate.endswith(subset.control_suffix) for candidate in stems)
    )


def _from_metadata(survey: Survey, subset: SubsetConfig) -> list[FoundImage]:
    try:
        entries = metadata.read_metadata_file(subset.metadata_file or "", subset.image_dir, subset.caption_separator)
    except ConfigError as e:
        survey.problems += cap_problems([_about_list(survey, problem) for problem in e.problems])
        return []
    candidates, absent = [], []
    for entry in entries:
        folder, name = os.path.split(entry.path)
        listing = survey.files(folder)
        # sd-scripts' merge_captions_to_metadata.py writes names without ending.
        if (written := listing.find(name) or listing.image_named(name)) and written != name:
            name, entry = written, entry._replace(path=listing.path(written))
        size = entry.size or listing.known_size(name)
        # An image that is gone can still be trained from its cached latents.
        if name not in listing.images and (os.path.splitext(name)[0], False) not in listing.sizes:
            absent.append(entry.path)
            continue
        words = captions.with_tags(entry.caption, entry.tags, subset)
        _count_unread(survey, subset, entry.path, words)
        candidates.append(FoundImage(entry.path, size, words, "", entry.controls))
    if absent:
        template = "{metadata_file} lists images that are not there: {absent}"
        problem = Problem("", template, metadata_file=subset.metadata_file, absent=some(absent))
        survey.problems.append(_about_list(survey, problem))
    elif twice := sorted(
        path for path, times in Counter(candidate.path for candidate in candidates).items() if times > 1
    ):
        survey.warnings.append(
            about_images(
                "{metadata_file} lists {count} more than once, and each is trained as often: {names}",
                metadata_file=subset.metadata_file,
                count=counted(len(twice), "image"),
                names=some(twice),
            )
        )
    elif not candidates:
        problem = Problem("", "{metadata_file} lists no images", metadata_file=subset.metadata_file)
        survey.problems.append(_about_list(survey, problem))
    return sorted(candidates, key=lambda candidate: candidate.path)


def _about_list(survey: Survey, problem: Problem) -> Problem:
    # An option that names the file lets a form show the problem beside its field.
    if problem.option:
        return problem.replaced(topic="images")
    return problem.replaced(option=survey.list_option, template=f": {problem.template}", topic="images")


def read_sizes(
    survey: Survey, subset: SubsetConfig, candidates: list[FoundImage]
) -> list[tuple[FoundImage, Size, str]]:
    """Read image headers and caption files that are not known yet."""
    remembers = subset.cache_info and not subset.metadata_file  # which has captions and sizes itself
    remembered = metadata.RememberedFacts(Path(subset.image_dir or "") if remembers else None)
    phase = Message(
        "reading image sizes" if any(candidate.size is None for candidate in candidates) else "reading captions"
    )
    facts = spread(partial(_facts, survey, subset, remembered), candidates, survey.report, phase)
    good, broken, bad_words = [], [], []
    for candidate, (size, words) in zip(candidates, facts, strict=True):
        if isinstance(words, Exception):
            bad_words += _caption_problems(candidate.caption_file, words)
        elif min(size) < 1:  # what an unreadable header gives
            broken.append(candidate.path)
        else:
            good.append((candidate, size, words))
    survey.problems += cap_problems(bad_words)
    if broken:
        survey.problems.append(
            about_images(
                "{count} cannot be read as images: {broken}",
                count=counted(len(broken), "file"),
                broken=some_files(broken, max_names=MAX_MESSAGES_PER_KIND),
            )
        )
    if empty := [candidate.caption_file for candidate, _, words in good if candidate.caption_file and not words]:
        survey.warnings.append(
            about_images(
                "{count} without words: {empty}", count=counted(len(empty), "caption file"), empty=some_files(empty)
            )
        )
    if remembers and survey.keep and good and not broken:
        _remember(survey, Path(subset.image_dir or ""), good)
    return good


def _caption_problems(caption_file: str, error: Exception) -> list[Problem]:
    """Return why a caption file cannot be read."""
    if isinstance(error, ConfigError):
        return [problem.replaced(topic="images") for problem in error.problems]
    if isinstance(error, UnicodeError):
        return [about_images(NO_TEXT, path=caption_file)]
    why = error.strerror or error if isinstance(error, OSError) else error
    return [about_images("{path} cannot be read: {why}", path=caption_file, why=why)]


def _remember(survey: Survey, folder: Path, images: Sequence[tuple[FoundImage, Size, str]]) -> None:
    """Write sizes and captions into the folder's cache_info."""
    entries = {
        candidate.path: metadata.Remembered(
            survey.how.size(candidate.path, size),
            words,
            os.path.basename(candidate.caption_file),
            survey.unread.get(candidate.caption_file, 0),
        )
        for candidate, size, words in images
    }
    metadata.write_cache(folder, entries)


def _facts(
    survey: Survey, subset: SubsetConfig, remembered: metadata.RememberedFacts, candidate: FoundImage
) -> tuple[Size, str | Exception]:
    folder, name = os.path.split(candidate.path)
    file = survey.files(folder).images.get(name)
    # Names of caches and metadata files may state the stored size or the upright one.
    is_turned = file is not None and survey.how.turns(candidate.path)
    size = None if is_turned else candidate.size or (remembered.size(candidate.path, file.changed) if file else None)
    if size is None:
        size = header_size(candidate.path, file.modified, file.num_bytes) if file else (0, 0)
        size = survey.how.size(candidate.path, size)
    if candidate.caption is not None:
        return size, candidate.caption
    if (words := remembered.caption(candidate.path, candidate.caption_file, subset.enable_wildcard)) is not None:
        _count_unread(survey, subset, candidate.caption_file, words, remembered.unread(candidate.path))
        return size, words
    if not candidate.caption_file:
        return size, subset.class_tokens or ""
    try:
        text = io.StringIO(read_caption(candidate.caption_file), newline=None).read()  # all line ends become "\n"
    except (OSError, UnicodeError, ConfigError) as e:
        return size, e
    if subset.enable_wildcard:
        return size, captions.caption_lines(text)
    _count_unread(survey, subset, candidate.caption_file, text)
    return size, captions.first_line(text)


def _count_unread(survey: Survey, subset: SubsetConfig, name: str, text: str, unread_before: int = 0) -> None:
    if unread := 0 if subset.enable_wildcard else captions.caption_lines(text).count("\n") + unread_before:
        survey.unread[name] = unread


def bucketed_image(survey: Survey, rules: Buckets, where: tuple[int, Any], candidate: FoundImage) -> Image | None:
    """Put an image into its bucket; None, and a problem, for one that is too thin. `where`: the data set's position and
    the subset."""
    position, subset = where
    size, words = candidate.size or (0, 0), candidate.caption or ""
    fit = rules.fit(size)
    if fit is None:
        survey.problems.append(
            about_images(
                "{path} is {size}x{size2}, too thin for bucket_reso_steps = {step}: remove or enlarge it",
                path=candidate.path,
                size=size[0],
                size2=size[1],
                step=rules.step,
            )
        )
        return None
    # An inpainting model is shown what transparency hides: that is what it learns to paint.
    is_painted = survey.control_use.inpaints and subset.alpha_mask
    how = replace(survey.how, ground="") if is_painted else survey.how
    image = Image(
        candidate.path, size, words, subset.num_repeats, subset, position, fit, candidate.caption_file, how=how
    )
    image.mask_file = mask_of(survey, subset, image)
    image.controls = controls_of(survey, subset, image, candidate.controls, survey.control_use)
    return image
