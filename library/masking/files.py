"""Mask files: grey PNGs as large as their images, white for full loss weight, in a folder beside them. They are stored
as their images are, with the same EXIF orientation, so that they fit with and without `exif_rotation`.

Each change can be undone (library.curation.trash): a replaced mask is kept.
"""

import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from library.captioning.writing import Written, listings, rgb
from library.config.problems import ConfigError, Message, Report, option_name, require_choice
from library.curation import thumbs, trash
from library.data import folders, pixels
from library.data.orientation import UPRIGHT, orientation, orientation_of, tag, turned_back
from library.data.orientation import upright as turned_upright
from library.masking.segmenter import SegmentationModel

SKIP, REPLACE = EXISTING = ("skip", "replace")
FOLDER, ALPHA = INTO = ("folder", "alpha")
CLEAR = (".png", ".webp")  # formats that can be transparent, and are written losslessly
MAX_IMAGE_PIXELS = thumbs.PIXELS  # pixels of an image that gets a mask
RED = (220, 30, 60)  # of the overlay, where the loss weight is low


@dataclass(frozen=True)
class MaskOptions:
    """How a segmentation becomes a mask."""

    existing: str = SKIP  # how images that have a mask are treated
    outside: int = 0  # loss weight outside of the segment, in percent
    invert: bool = False  # mask the segment instead of the rest
    into: str = FOLDER  # a folder of masks, or the transparency of the images

    def __post_init__(self) -> None:
        require_choice(option_name("existing"), self.existing, EXISTING)
        require_choice(option_name("into"), self.into, INTO)
        if not 0 <= self.outside <= 100:
            raise ConfigError(
                "{name} is {value}: it is a percentage, from 0 to 100", name=option_name("outside"), value=self.outside
            )

    def grey(self, segmentation: np.ndarray) -> Image.Image:
        """Convert a segmentation [H,W] in 0..1 to a mask."""
        learned = 1 - segmentation if self.invert else segmentation
        floor = self.outside / 100
        return Image.fromarray(np.rint((floor + (1 - floor) * learned) * 255).astype(np.uint8))


def usual_folder(images: Path) -> Path:
    """Return the default folder of masks: FOLDER-masks beside the images."""
    # For a folder named <repeats>_<words> it is inside its parent's, since beside it, it would count as another folder
    # of images.
    if folders.concept(images):
        return _folder_beside(images.parent) / images.name
    return _folder_beside(images)


def _folder_beside(images: Path) -> Path:
    images = images if images.name not in ("", "..") else images.resolve()
    return images.with_name(f"{images.name}-masks") if images.name else images / "masks"  # of the root of a drive


def mask_file(
    image: Path, images: Path, masks: Path, listings_by_folder: dict[Path, folders.Listing] | None = None
) -> Path:
    """Return the mask of an image below `images`: the file that the trainer would read, or the path of a new PNG.

    `listings_by_folder` caches listings across the images of a folder.
    """
    place = masks / image.relative_to(images)
    default_file = place.with_name(f"{place.stem}.png")
    if default_file.is_file() or not place.parent.is_dir():
        return default_file
    listings_by_folder = {} if listings_by_folder is None else listings_by_folder
    if place.parent not in listings_by_folder:
        listings_by_folder[place.parent] = folders.looked_into(place.parent)
    name = listings_by_folder[place.parent].image_named(place.stem)
    return place.with_name(name) if name else default_file


def make_masks(
    images: Path, masks: Path, segmenter: SegmentationModel, options: MaskOptions, report: Report
) -> Written:
    """Make masks for the images of a folder and its sub-folders. After an interruption the written files are kept, and
    can be undone as one change of the folder of masks, or of the images where they become transparent.

    Raises ConfigError when there are no images."""
    todo, skipped = _list_masks_to_write(images, masks, options)
    done = Written(skipped=skipped)
    report(Message("making masks"), 0, len(todo))
    root = images if options.into == ALPHA else masks
    with trash.Change(root, f"Masks by {segmenter.name}", keep=True) as change:
        for start in range(0, len(todo), segmenter.batch_size):
            batch = todo[start : start + segmenter.batch_size]
            read = [(image, file, picture) for image, file in batch if (picture := rgb(image, done.unreadable))]
            pictures = [picture for *_, picture in read]
            greys = [options.grey(segmentation) for segmentation in segmenter(pictures)] if pictures else []
            if options.into == ALPHA:
                change.put({image: transparent(image, grey) for (image, *_), grey in zip(read, greys, strict=True)})
            else:
                change.put({file: png(grey, image) for (image, file, _), grey in zip(read, greys, strict=True)})
            done.written += len(greys)
            report(Message("making masks"), start + len(batch), len(todo))
    return done


def make_of_alpha(images: Path, masks: Path, options: MaskOptions, report: Report) -> Written:
    """Make masks from the transparency of images; opaque images get none."""
    todo, skipped = _list_masks_to_write(images, masks, options)
    done = Written(skipped=skipped)
    with trash.Change(masks, "Masks of transparency", keep=True) as change:
        for at, (image, file) in enumerate(todo, 1):
            alpha = _alpha_mask(image, done.unreadable)
            if alpha is not None:
                change.put({file: png(options.grey(np.asarray(alpha, np.float32) / 255), image)})
                done.written += 1
            report(Message("making masks"), at, len(todo))
    return done


def replace_mask(
    masks: Path, file: Path, content: bytes, size: tuple[int, int], image: Path | None = None, upright: bool = False
) -> None:
    """Write a mask that was painted in the page: a PNG with the proportions of the displayed image, which is converted
    to grey and scaled to the image's `size`. `upright`: the image is displayed with its EXIF orientation.

    Raises ConfigError for any other content.
    """
    if size[0] * size[1] > MAX_IMAGE_PIXELS or not all(size):
        raise ConfigError("{name} has too many pixels for a mask", name=file.stem)
    with io.BytesIO(content) as data:
        try:
            with Image.open(data, formats=["PNG"]) as painted:
                if painted.width * painted.height > MAX_IMAGE_PIXELS or max(painted.size) > 4096:
                    raise ConfigError("this mask has too many pixels: load the page again")
                # Cross-multiplied aspect ratios; the page rounds the sides of what it displays by up to a pixel.
                if abs(painted.width * size[1] - painted.height * size[0]) > max(*size, *painted.size):
                    raise ConfigError("this mask does not have the shape of its image: open the folder again")
                grey = painted.convert("L").resize(size, Image.Resampling.BILINEAR)
        except ConfigError:
            raise
        except Exception as error:  # decoders' exceptions have no common class
            raise ConfigError("this mask was not painted in the page: load the page again") from error
    with trash.lock(masks.resolve()), trash.Change(masks, f"Mask of {file.stem}") as change:
        target = file.with_suffix(".png")
        if file != target and file.is_file():
            change.remove([file])  # a mask in another format, which the trainer would still read
        change.put({target: png(grey, image, upright)})


def transparent(path: Path, grey: Image.Image) -> bytes:
    """Return an image with a mask as its alpha channel: the same colours, losslessly in its own format."""
    out = io.BytesIO()
    with thumbs.open_image(path) as image:
        rgba = image.convert("RGBA")  # keeps the colours of transparent pixels
        turn = orientation_of(image)
        rgba.putalpha(turned_back(grey, turn))
        metadata: dict[str, Any] = {"icc_profile": image.info["icc_profile"]} if "icc_profile" in image.info else {}
        metadata |= {"exif": tag(turn)} if turn != UPRIGHT else {}
        format_options = {"lossless": True, "exact": True} if path.suffix.lower() == ".webp" else {}
        rgba.save(out, path.suffix[1:], **format_options, **metadata)
    return out.getvalue()


def png(grey: Image.Image, image: Path | None = None, upright: bool = True) -> bytes:
    """Return a mask as the bytes of a PNG, stored as its image is; `upright`: it is for the image turned upright."""
    out, turn = io.BytesIO(), orientation(image) if image else UPRIGHT
    stored = turned_back(grey, turn) if upright else grey
    stored.save(out, "PNG", **({"exif": tag(turn)} if turn != UPRIGHT else {}))
    return out.getvalue()


def _alpha_mask(path: Path, unreadable: list[str]) -> Image.Image | None:
    try:
        with thumbs.open_image(path) as image:
            has_alpha = "A" in image.getbands() or "transparency" in image.info
            return turned_upright(image).convert("RGBA").getchannel("A") if has_alpha else None
    except Exception:  # as for captions
        unreadable.append(path.name)
        return None


def _is_transparent(path: Path) -> bool:
    try:
        with thumbs.open_image(path) as image:
            return "A" in image.getbands() or "transparency" in image.info
    except ConfigError:
        return False  # it is reported when it is read


def _list_masks_to_write(images: Path, masks: Path, options: MaskOptions) -> tuple[list[tuple[Path, Path]], int]:
    """Return the pairs of an image and its mask to write, and how many images are skipped.

    Raises ConfigError when there are no images, or when two would have the same mask."""
    if not images.is_dir():
        raise ConfigError("{folder} is not a folder", folder=images)
    image_files = [Path(listing.path(name)) for listing in listings(images, 1) for name in listing.images]
    if not image_files:
        raise ConfigError("there are no images in {folder}, nor in the folders inside it", folder=images)
    if options.into == ALPHA:
        if unsuitable := [image for image in image_files if image.suffix.lower() not in CLEAR]:
            raise ConfigError(
                "{path} cannot be transparent, only PNG and WebP can: write masks into a folder instead",
                path=unsuitable[0],
            )
        todo = [(image, image) for image in image_files if options.existing == REPLACE or not _is_transparent(image)]
        return todo, len(image_files) - len(todo)
    listings_by_folder: dict[Path, folders.Listing] = {}
    mask_files = {image: mask_file(image, images, masks, listings_by_folder) for image in image_files}
    shared_files = [file for file, times in Counter(mask_files.values()).items() if times > 1]
    if shared_files:
        raise ConfigError(
            "two images have the mask {path}, as their names differ only in what follows the dot: rename one",
            path=shared_files[0],
        )
    todo = [(image, file) for image, file in mask_files.items() if options.existing == REPLACE or not file.is_file()]
    return todo, len(mask_files) - len(todo)


def mask_overlay(file: Path, side: int, upright: bool = False) -> bytes:
    """Return a mask as a WebP overlay for its image: red where the loss weight is low; empty without a mask. `upright`:
    turned by its EXIF orientation.

    Raises ConfigError for a file that is not an image.
    """
    mask = Image.new("L", (1, 1), 255)
    if file.is_file():
        with thumbs.open_image(file) as image:
            try:
                mask = pixels.mask_channel(turned_upright(image) if upright else image)
            except Exception as error:  # decoders' exceptions have no common class
                raise pixels.unreadable_image(file, error) from error
        mask.thumbnail((side, side), Image.Resampling.BILINEAR)
    overlay = Image.new("RGBA", mask.size, RED)
    overlay.putalpha(Image.eval(mask, lambda value: 255 - value))
    out = io.BytesIO()
    overlay.save(out, "WEBP", lossless=True, exact=True, method=0)
    return out.getvalue()


def count_masked_images(images: Path, masks: Path) -> int:
    """Count the images of a folder and its sub-folders that have a mask."""
    if not masks.is_dir():
        return 0
    image_files = (Path(listing.path(name)) for listing in listings(images, 1) for name in listing.images)
    listings_by_folder: dict[Path, folders.Listing] = {}
    return sum(mask_file(image, images, masks, listings_by_folder).is_file() for image in image_files)
