"""Files that belong to an image: its mask, its control image, and its reference images."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from library.config.dataset import SubsetConfig
from library.config.places import real_place
from library.config.problems import Problem, counted
from library.config.run_config import ControlUse
from library.data.buckets import BucketFit, Buckets, Size
from library.data.folders import MASK_LABEL, Listing, about_images, some, some_files
from library.data.images import ControlImage, Image
from library.data.pixels import header_size

if TYPE_CHECKING:
    from library.data.survey import Survey

# Sides of reference images are multiples of this many pixels: one token of all models that take them.
SIDE_MULTIPLE = 16
DRAWN_MASKS = 8  # for each image without a mask, as a fix: several, as one would always be painted in the same place
UNLIMITED = (1 << 16, 1 << 16)
NUMBERED = re.compile(r"(.+)_(\d+)")


def mask_of(survey: "Survey", subset: SubsetConfig, image: Image) -> str:
    """Return the mask or control image of an image, "" without one: the file of the same name, except for its suffix,
    in conditioning_data_dir or in its sub-folder named like the image's folder; without that option OneTrainer's mask
    beside the image.
    """
    folder, file = os.path.split(image.path)
    stem, guided = os.path.splitext(file)[0], survey.control_use.guided
    if not subset.conditioning_data_dir:
        listing = survey.files(folder)
        name = next((label for label in listing.labels if label.startswith(f"{stem}{MASK_LABEL}.")), "")
        if not name or not survey.takes_masks:
            return ""
    else:
        listing = _like_the_images(survey, subset.conditioning_data_dir, image)
        name = listing.image_named(stem)
        if not name:
            survey.unpaired.setdefault((subset.conditioning_data_dir, listing.folder), []).append(image.path)
            return ""
        survey.beside.setdefault(listing.folder, set()).add(name)
    if 0 in (size := stored_image_size(survey, listing.path(name))):
        survey.problems.append(about_images("{path} cannot be read as an image", path=listing.path(name)))
    elif size != image.size:
        image_size = f"{image.size[0]}x{image.size[1]}"
        survey.problems.append(
            about_images(
                "the control image {path} is {width}x{height}, but its image is {wanted}"
                if guided
                else "the mask {path} is {width}x{height}, but its image is {wanted}",
                path=listing.path(name),
                width=size[0],
                height=size[1],
                wanted=image_size,
            )
        )
    return listing.path(name)


def find_missing_controls(survey: "Survey") -> Iterator[Problem]:
    """Return problems of images without mask or control image, one per folder that should hold them."""
    for place, images in survey.unreferenced.items():
        template = (
            ": {path} names no reference image of {count}: {images}; write them there as control_path, name their "
            "folder in control_directory, or take these images out"
            if os.path.isfile(place)
            else ": {path} has no reference image of {count}: {images}; add files of the same names, or take these "
            "images out"
        )
        yield Problem("control_directory", template, path=place, **_count_and_examples(images))
    if survey.unmasked:
        yield about_images(
            "there is no mask of what is to be painted for {count}: {images}; name their folder as "
            "conditioning_data_dir of the images, set alpha_mask, or let random_masks draw some",
            fix={"random_masks": DRAWN_MASKS},
            **_count_and_examples(survey.unmasked),
        )
    for (option_folder, folder), images in survey.unpaired.items():
        facts: dict[str, Any] = {"path": folder, **_count_and_examples(images)}
        if not os.path.isdir(option_folder):
            yield Problem(
                "conditioning_data_dir",
                ": {path} does not exist: name the folder of masks or control images",
                path=option_folder,
                topic="images",
            )
        elif survey.control_use.guided:
            yield Problem(
                "conditioning_data_dir",
                ": {path} has no control image of {count}: {images}; add files of the same names, or take these images "
                "out",
                **facts,
            )
        else:
            yield Problem(
                "conditioning_data_dir",
                ": {path} has no mask of {count}: {images}; add files of the same names, or take these images out",
                **facts,
            )


def find_unused_controls(survey: "Survey") -> Iterator[Problem]:
    """Yield masks, control and reference images that belong to no image."""
    image_folders = {real_place(folder) for folder in {os.path.dirname(image.path) for image in survey.images.items}}
    for folder, used in sorted(survey.beside.items()):
        spare = [name for name in survey.files(folder).images if name not in used]
        if spare and real_place(folder) not in image_folders:
            yield about_images(
                "images in {folder} that belong to no training image, and are not used: {names}",
                folder=folder,
                names=some(spare),
            )


def _count_and_examples(images: list[str]) -> dict[str, Any]:
    paths = [*dict.fromkeys(images)]  # an image may be trained at several sizes
    return {"count": counted(len(paths), "image"), "images": some_files(paths), "topic": "images"}


def controls_of(
    survey: "Survey", subset: SubsetConfig, image: Image, listed_paths: tuple[str, ...], use: ControlUse
) -> tuple[ControlImage, ...]:
    """Return the control and reference images of an image for a model with this `use`.

    `listed_paths` are those of a metadata file. Regularisation images may have none.
    """
    if use.inpaints:
        return _masks_to_inpaint(survey, subset, image, use)
    if not use.most:
        if listed_paths:
            template = "{path} has a control_path in its metadata file, but this model takes no reference images"
            survey.problems.append(about_images(template, path=image.path))
        return ()
    paths = listed_paths or _reference_files(survey, subset, image)
    _check_number(survey, subset, image, paths, use, are_listed=bool(listed_paths))
    return tuple(control for path in paths if (control := _reference_image(survey, subset, path, image.fit.bucket)))


def _masks_to_inpaint(
    survey: "Survey", subset: SubsetConfig, image: Image, use: ControlUse
) -> tuple[ControlImage, ...]:
    """Return the image with its mask, or once for each mask that is drawn at random."""
    mask = image.mask_file or (image.path if subset.alpha_mask else "")
    control = ControlImage(image.path, image.size, image.fit, mask, how=image.how)
    if mask:
        return (control,)
    if use.random_masks:
        return tuple(replace(control, drawn=number) for number in range(use.random_masks))
    survey.unmasked.append(image.path)
    return (control,)


def _check_number(
    survey: "Survey", subset: SubsetConfig, image: Image, paths: Sequence[str], use: ControlUse, are_listed: bool
) -> None:
    """Note an image that has too few or too many reference images, or a folder of them that is missing."""
    min_count = max(use.least, bool(subset.control_directories))  # with a folder set, every image needs one
    too_few = len(paths) < min_count and not (subset.is_reg and not paths)
    folder_is_missing = not are_listed and not all(os.path.isdir(folder) for folder in subset.more_control_directories)
    source = next(iter(subset.control_directories), subset.metadata_file)
    if too_few and not folder_is_missing and source and os.path.exists(source):
        # `find_missing_controls` makes one problem of them.
        survey.unreferenced.setdefault(source, []).append(image.path)
    elif folder_is_missing or too_few or len(paths) > use.most:
        survey.problems.append(_wrong_number(subset, image, len(paths), use))


def _reference_image(survey: "Survey", subset: SubsetConfig, path: str, bucket: Size) -> ControlImage | None:
    """Return a reference image, or None and note why it cannot be used."""
    size = stored_image_size(survey, path)
    is_readable = min(size) > 0
    if is_readable and (fit := control_fit(subset, size, bucket)):
        return ControlImage(path, size, fit, how=survey.how)
    if is_readable:
        template = (
            "the reference image {path} is {width}x{height}: scaled as the data set says, less than {least} "
            "pixels of its shorter side remain; crop or replace it"
        )
    elif os.path.lexists(path):
        template = "the reference image {path} cannot be read: replace it"
    else:
        template = "the reference image {path} does not exist"
    facts = {"width": size[0], "height": size[1], "least": SIDE_MULTIPLE}
    survey.problems.append(about_images(template, path=path, **facts))
    return None


# References of the bucket's size add no graphs, as each bucket keeps one number of tokens.
# Why: docs/decisions/2026-11-22-reference-images-take-the-targets-size.md
def control_fit(subset: SubsetConfig, size: Size, bucket: Size) -> BucketFit | None:
    """Return how a reference image of `size` is scaled and cropped for an image in `bucket`: to that bucket, unless the
    subset has other options. None if nothing of it would remain.
    """
    area = subset.control_resolution
    if subset.no_resize_control:
        return Buckets(area or UNLIMITED, no_upscale=True, step=SIDE_MULTIPLE).fit(size)
    if area:
        return Buckets(area, smallest=SIDE_MULTIPLE, largest=4 * max(area), step=SIDE_MULTIPLE).fit(size)
    return Buckets(bucket, enabled=False).fit(size)


def _reference_files(survey: "Survey", subset: SubsetConfig, image: Image) -> tuple[str, ...]:
    """Return an image's files of all folders, in their order. A folder may lack one only if those behind it do, too."""
    by_folder = {folder: [*_named_like(survey, subset, folder, image)] for folder in subset.control_directories}
    last = max((number for number, paths in enumerate(by_folder.values()) if paths), default=0)
    for folder, paths in [*by_folder.items()][:last]:
        if not paths and os.path.isdir(folder):  # a later folder's would take its place
            survey.unreferenced.setdefault(folder, []).append(image.path)
    return tuple(path for paths in by_folder.values() for path in paths)


def _named_like(survey: "Survey", subset: SubsetConfig, folder: str, image: Image) -> Iterator[str]:
    """Return files named like an image: <name>.png, then <name>_0.png, <name>_1.png. A numbered file named like another
    image of the folder belongs to that one.
    """
    listing = _like_the_images(survey, folder, image)
    stem = os.path.splitext(os.path.basename(image.path))[0]
    if subset.control_suffix:
        stem = stem.removesuffix(subset.image_suffix or "") + subset.control_suffix
    files_by_stem = survey.control_names.get(listing.folder)
    if files_by_stem is None:
        files_by_stem = survey.control_names[listing.folder] = {}
        for name in listing.images:
            name_stem = os.path.splitext(name)[0]
            files_by_stem.setdefault(name_stem, []).append((0, name))
            if parts := NUMBERED.fullmatch(name_stem):
                files_by_stem.setdefault(f"{parts[1]}_", []).append((int(parts[2]), name))
    # If suffixes distinguish them, references may lie among the images.
    image_stems = set() if subset.control_suffix else survey.files(os.path.dirname(image.path)).stems
    numbered = sorted(
        (number, name)
        for number, name in files_by_stem.get(f"{stem}_", ())
        if os.path.splitext(name)[0] not in image_stems
    )
    names = [name for _, name in [*files_by_stem.get(stem, [])[:1], *numbered]]
    survey.beside.setdefault(listing.folder, set()).update(names)
    yield from map(listing.path, names)


def _like_the_images(survey: "Survey", directory: str, image: Image) -> Listing:
    listing, name = survey.files(directory), os.path.basename(os.path.dirname(image.path))
    return survey.files(os.path.join(directory, name)) if name in listing.folders else listing


def _wrong_number(subset: SubsetConfig, image: Image, number: int, use: ControlUse) -> Problem:
    if number > use.most:
        template = "{path} has {number} reference images, and this model takes {most} at most: remove the others"
        return about_images(template, path=image.path, number=number, most=use.most)
    if gone := next((folder for folder in subset.control_directories if not os.path.isdir(folder)), None):
        return Problem(
            "control_directory",
            ": {path} does not exist: name the folder of reference images",
            path=gone,
            topic="images",
        )
    return Problem(
        "control_directory",
        "is not set for {folder}: name the folder of reference images, which this model is trained with",
        folder=subset.image_dir,
        topic="images",
    )


def stored_image_size(survey: "Survey", path: str) -> Size:
    """Return the decoded width and height of an image file, from its header; (0, 0) if it is missing or no image."""
    folder, name = os.path.split(path)
    listing = survey.files(folder)
    file = listing.images.get(name) or listing.labels.get(name)
    return survey.how.size(path, header_size(path, file.modified, file.num_bytes)) if file else (0, 0)
