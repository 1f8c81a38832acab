"""Files that belong to an image: its mask, its control image, and its reference images."""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from library.config.dataset import SubsetConfig
from library.config.problems import Problem, counted
from library.config.run_config import ControlUse
from library.data.buckets import BucketFit, Buckets, Size
from library.data.folders import MASK_LABEL, Listing, about_images, real_place, some
from library.data.images import ControlImage, Image
from library.data.pixels import header_size

if TYPE_CHECKING:
    from library.data.survey import Survey

SIDE_MULTIPLE = (
    16  # sides of reference images are multiples of this many pixels: one token of all models that take them
)
UNLIMITED = (1 << 16, 1 << 16)
NUMBERED = re.compile(r"(.+)_(\d+)")


def mask_of(result: "Survey", subset: SubsetConfig, image: Image) -> str:
    """Return the mask or control image of an image, "" without one: the file of the same name, except for its suffix,
    in conditioning_data_dir or in its sub-folder named like the image's folder; without that option OneTrainer's mask
    beside the image.
    """
    folder, file = os.path.split(image.path)
    stem, guided = os.path.splitext(file)[0], result.control_use.guided
    if not subset.conditioning_data_dir:
        here = result.files(folder)
        name = next((label for label in here.labels if label.startswith(f"{stem}{MASK_LABEL}.")), "")
        if not name or not result.takes_masks:
            return ""
    else:
        here = _like_the_images(result, subset.conditioning_data_dir, image)
        name = here.image_named(stem)
        if not name:
            result.unpaired.setdefault((subset.conditioning_data_dir, here.folder), []).append(image.path)
            return ""
        result.beside.setdefault(here.folder, set()).add(name)
    if 0 in (size := stored_image_size(result, here.path(name))):
        result.problems.append(about_images("{path} cannot be read as an image", path=here.path(name)))
    elif size != image.size:
        wanted = f"{image.size[0]}x{image.size[1]}"
        result.problems.append(
            about_images(
                "the control image {path} is {width}x{height}, but its image is {wanted}"
                if guided
                else "the mask {path} is {width}x{height}, but its image is {wanted}",
                path=here.path(name),
                width=size[0],
                height=size[1],
                wanted=wanted,
            )
        )
    return here.path(name)


def without_pictures(result: "Survey") -> Iterator[Problem]:
    """Return problems of images without mask or control image, one per folder that should hold them."""
    for place, images in result.unreferenced.items():
        template = (
            ": {path} names no reference image of {count}: {images}; write them there as control_path, name their "
            "folder in control_directory, or take these images out"
            if os.path.isfile(place)
            else ": {path} has no reference image of {count}: {images}; add files of the same names, or take these "
            "images out"
        )
        yield Problem("control_directory", template, path=place, **_few(images))
    if result.unmasked:
        yield about_images(
            "there is no mask of what is to be painted for {count}: {images}; name conditioning_data_dir in the "
            "dataset_config, set alpha_mask, or let random_masks draw some",
            **_few(result.unmasked),
        )
    for (named, folder), images in result.unpaired.items():
        facts: dict[str, Any] = {"path": folder, **_few(images)}
        if not os.path.isdir(named):
            yield Problem(
                "conditioning_data_dir",
                ": {path} does not exist: name the folder of masks or control images",
                path=named,
                topic="images",
            )
        elif result.control_use.guided:
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


def without_images(result: "Survey") -> Iterator[Problem]:
    """Masks, control and reference images that belong to no image."""
    own = {real_place(folder) for folder in {os.path.dirname(one.path) for one in result.images.items}}
    for folder, used in sorted(result.beside.items()):
        spare = [name for name in result.files(folder).images if name not in used]
        if spare and real_place(folder) not in own:
            yield about_images(
                "images in {folder} that belong to no training image, and are not used: {names}",
                folder=folder,
                names=some(spare),
            )


def _few(images: list[str]) -> dict[str, Any]:
    each = [*dict.fromkeys(images)]  # an image may be trained at several sizes
    return {"count": counted(len(each), "image"), "images": some(each), "topic": "images"}


def controls_of(
    result: "Survey", subset: SubsetConfig, image: Image, named: tuple[str, ...], use: ControlUse
) -> tuple[ControlImage, ...]:
    """Return the control and reference images of an image for a model with this `use`; `named`: from a metadata file.

    Regularisation images may have none.
    """
    if use.inpaints:
        mask = image.mask_file or (image.path if subset.alpha_mask else "")
        if not mask and use.random_masks:
            control_image = ControlImage(image.path, image.size, image.fit, how=image.how)
            return tuple(replace(control_image, drawn=number) for number in range(use.random_masks))
        if not mask:
            result.unmasked.append(image.path)
        return (ControlImage(image.path, image.size, image.fit, mask, how=image.how),)
    if not use.most:
        if named:
            result.problems.append(
                about_images(
                    "{path} has a control_path in its metadata file, but this model takes no reference images",
                    path=image.path,
                )
            )
        return ()
    paths = named or _reference_files(result, subset, image)
    least = max(use.least, bool(subset.control_directories))  # with a folder set, every image needs one
    lost = not named and not all(os.path.isdir(folder) for folder in subset.more_control_directories)
    few = len(paths) < least and not (subset.is_reg and not paths)
    place = next(iter(subset.control_directories), subset.metadata_file)
    if few and not lost and place and os.path.exists(place):
        result.unreferenced.setdefault(place, []).append(image.path)
    elif lost or few or len(paths) > use.most:
        result.problems.append(_wrong_number(subset, image, len(paths), use))
    made = []
    for path in paths:
        size = stored_image_size(result, path)
        fit = control_fit(subset, size, image.fit.bucket) if min(size) > 0 else None
        if fit is None:
            wrong = "the reference image {path} does not exist"
            if os.path.lexists(path):
                wrong = "the reference image {path} cannot be read, or is too small: replace it"
            result.problems.append(about_images(wrong, path=path))
        else:
            made.append(ControlImage(path, size, fit, how=result.how))
    return tuple(made)


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


def _reference_files(result: "Survey", subset: SubsetConfig, image: Image) -> tuple[str, ...]:
    return tuple(path for folder in subset.control_directories for path in _named_like(result, subset, folder, image))


def _named_like(result: "Survey", subset: SubsetConfig, folder: str, image: Image) -> Iterator[str]:
    """Return files named like an image: <name>.png, then <name>_0.png, <name>_1.png. A numbered file named like another
    image of the folder belongs to that one.
    """
    here = _like_the_images(result, folder, image)
    stem = os.path.splitext(os.path.basename(image.path))[0]
    if subset.control_suffix:
        stem = stem.removesuffix(subset.image_suffix or "") + subset.control_suffix
    known = result.control_names.get(here.folder)
    if known is None:
        known = result.control_names[here.folder] = {}
        for name in here.images:
            own = os.path.splitext(name)[0]
            known.setdefault(own, []).append((0, name))
            if parts := NUMBERED.fullmatch(own):
                known.setdefault(f"{parts[1]}_", []).append((int(parts[2]), name))
    # If suffixes distinguish them, references may lie among the images.
    others = set() if subset.control_suffix else result.files(os.path.dirname(image.path)).stems
    numbered = sorted(one for one in known.get(f"{stem}_", ()) if os.path.splitext(one[1])[0] not in others)
    names = [name for _, name in [*known.get(stem, [])[:1], *numbered]]
    result.beside.setdefault(here.folder, set()).update(names)
    yield from map(here.path, names)


def _like_the_images(result: "Survey", directory: str, image: Image) -> Listing:
    """The files of a folder of reference images, or of its sub-folder that is named like the image's folder."""
    here, name = result.files(directory), os.path.basename(os.path.dirname(image.path))
    return result.files(os.path.join(directory, name)) if name in here.folders else here


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


def stored_image_size(result: "Survey", path: str) -> Size:
    """Return the decoded width and height of an image file, from its header; (0, 0) if it is missing or no image."""
    folder, name = os.path.split(path)
    here = result.files(folder)
    file = here.images.get(name) or here.labels.get(name)
    return result.how.size(path, header_size(path, file.modified, file.num_bytes)) if file else (0, 0)
