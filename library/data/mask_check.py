"""The content of masks: how much of the images counts, and masks that cannot be intended. Each is decoded once."""

import filecmp
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from library.config.places import same_place
from library.config.problems import ConfigError, Message, Problem, Report, counted
from library.config.run_config import RunConfig
from library.data import pixels
from library.data.folders import about_images, some_files
from library.data.images import Image
from library.data.survey import Survey
from library.data.threads import spread

MAX_DECODED_MASKS = 500  # masks to decode; of more, this many at equal distances
MAX_CLASS_VALUE = 16  # smaller values are class numbers, or the noise of a black JPEG
LARGEST_BYTE, LARGEST_WORD = 255, 65535
WHOLE, DECIMAL = "whole", "decimal"
ALIKE = 8  # tolerance for values of one colour after JPEG or an editor
HALF = 128  # an inpainting model paints values from here on


class Content(NamedTuple):
    """The content of a mask, with values from 0 to 255."""

    share: float  # of the area that counts, 0 to 1
    painted: float  # of the area that an inpainting model paints
    largest: int  # value of the channel that counts
    brightest: int  # value of any channel
    is_colored: bool
    is_hidden: bool  # whether it has one colour, and a shape only in its transparency
    wide: str = ""  # WHOLE or DECIMAL: how numbers of more than 8 bits are stored
    largest_stored: float = 0.0  # largest of these numbers
    is_cut: bool = False  # whether several of them exceed white

    @property
    def is_small(self) -> bool:
        # Numbers of more than 8 bits that are meant as 0 to 255, 0 to 1 or classes: as they are, they count as nearly
        # black.
        return 0 < self.largest_stored <= (LARGEST_BYTE if self.wide == WHOLE else 1) and bool(self.wide)


class Mask(NamedTuple):
    """The mask of an image: a file, or the transparency of the image itself."""

    image: str
    path: str
    is_alpha: bool = False


class Masks(NamedTuple):
    """A summary of the masks of a training in words, and their problems."""

    text: Message | None
    problems: list[Problem]
    warnings: list[Problem]


class Mistake(NamedTuple):
    """A mask that cannot be intended: an error, or a warning if it is one image among good ones."""

    applies: Callable[[Content], bool]
    template: str
    instead: str = ""  # the warning; "" where one such mask is an error


BLACK = Mistake(
    lambda mask: mask.brightest == 0 and not mask.is_small,
    "all masks are black, so nothing would be learned: {paths}; paint what should be learned white",
    "black masks, whose images have no effect: {paths}; paint what should be learned white, or take the images out",
)
OF_WIDE_FILES = (
    Mistake(
        lambda mask: mask.is_small and mask.wide == WHOLE and mask.largest_stored > 1,
        "masks of more than 8 bits with values up to 255, which are next to nothing of 65535 and would count as black: "
        "{paths}; save them with 8 bits, or multiply the values by 257",
    ),
    Mistake(
        lambda mask: mask.is_small and mask.wide == WHOLE and mask.largest_stored == 1,
        "masks of more than 8 bits with values of 0 and 1, of which 65535 would be white: {paths}; save them with 8 "
        "bits and values of 0 and 255",
    ),
    Mistake(
        lambda mask: mask.is_small and mask.wide == DECIMAL,
        "masks of decimal numbers up to 1, of which 255 would be white: {paths}; save them with 8 bits and values from "
        "0 to 255",
    ),
    Mistake(
        lambda mask: mask.is_cut,
        "masks of 32 bits with different values above 65535, which would all count as white: {paths}; save them with "
        "8 bits",
    ),
)
OF_FILES = (
    Mistake(
        lambda mask: mask.brightest == 1 and not mask.is_small,
        "masks with values of 0 and 1, of which 1 is nearly black: {paths}; multiply the values by 255",
    ),
    Mistake(
        lambda mask: 1 < mask.brightest < MAX_CLASS_VALUE and not mask.is_small,
        "all masks are nearly black, with values below 16 of 255, so next to nothing would be learned: {paths}; paint "
        "what should be learned white",
        "masks that are nearly black, with values below 16 of 255, so next to nothing of their images is learned: "
        "{paths}; paint what should be learned white, or take the images out",
    ),
    Mistake(
        lambda mask: mask.largest == 0 < mask.brightest,
        "masks in colours without red, the only channel that is read: {paths}; save them in grey",
    ),
    Mistake(
        lambda mask: mask.is_hidden,
        "masks of one colour whose shape is in their transparency, which is not read: {paths}; save them in grey, "
        "without transparency",
    ),
)
OF_TRANSPARENCY = Mistake(
    lambda mask: mask.largest == 0,
    "all images are fully transparent, so nothing would be learned with alpha_mask: {paths}; make what should be "
    "learned opaque",
    "fully transparent images, which have no effect with alpha_mask: {paths}; make what should be learned "
    "opaque, or take the images out",
)
NOTHING_TO_PAINT = Mistake(
    lambda mask: mask.painted == 0 and not mask.is_small,
    "no mask is bright anywhere, so nothing would be painted: {paths}; paint white what the model should paint",
    "masks that are bright nowhere, so nothing is painted: {paths}; paint white what the model should paint, or take "
    "the images out",
)


def check_masks(config: RunConfig, survey: Survey, report: Report | None = None) -> Masks:
    """Inspect the masks of a training. Other checks report masks that cannot be decoded."""
    use = config.control_images
    unique = {(image.path, image.mask_file): image for image in survey.images.items}  # once, even at several sizes
    images = [image for image in unique.values() if not (use.guided or image.has_random_masks)]
    masks = [mask for image in images if (mask := _mask_of(config, image))]
    some_masks = masks[:: -(-len(masks) // MAX_DECODED_MASKS) or 1]  # every n-th; a step of 0 would be an error
    contents = spread(lambda mask: _content(survey, mask), some_masks, report, Message("checking masks"))
    readable = [(mask, content) for mask, content in zip(some_masks, contents, strict=True) if content]
    stops, notes = _find_mistakes(readable, survey, use.inpaints)
    is_opaque = all(mask.is_alpha and content.share == 1 for mask, content in readable)  # as if there were none
    text = None if stops or is_opaque else _summary(len(masks), len(images), readable, use.inpaints)
    return Masks(text, stops, notes)


def _find_mistakes(
    readable: Sequence[tuple[Mask, Content]], survey: Survey, inpaints: bool
) -> tuple[list[Problem], list[Problem]]:
    of_files = [(mask, content) for mask, content in readable if not mask.is_alpha]
    of_alpha = [(mask, content) for mask, content in readable if mask.is_alpha]
    stops: list[Problem] = [*_themselves(of_files, survey)]
    notes: list[Problem] = []
    if stops:
        return stops, notes
    for mistake in (*OF_WIDE_FILES, NOTHING_TO_PAINT if inpaints else BLACK, *OF_FILES):
        _sort(mistake, of_files, stops, notes)
    _sort(NOTHING_TO_PAINT if inpaints else OF_TRANSPARENCY, of_alpha, stops, notes)
    if stops:
        return stops, notes
    if coloured := [mask.path for mask, content in of_files if content.is_colored and content.largest]:
        template = "masks in colour, of which only red counts: {paths}; save them in grey"
        notes.append(about_images(template, paths=some_files(coloured)))
    if of_files and not inpaints and all(content.share == 1 for _, content in of_files):
        notes.append(Problem("masked_loss", "changes nothing: all masks are white everywhere"))
    return stops, notes


def copies(config: RunConfig, survey: Survey) -> Iterator[tuple[bool, Problem]]:
    """Return control and reference images that are copies of the images themselves, and whether that is an error."""
    if config.control_images.guided:
        shown = [(image.path, image.mask_file) for image in survey.images.items if image.mask_file]
        option = "conditioning_data_dir"
        text = (
            ": control images that are the images themselves: {paths}; name the folder of their edges, depth or poses"
        )
    elif not config.control_images.most:
        return  # references have no use, which is said elsewhere
    else:
        with_references = [image for image in survey.images.items if image.controls and not image.controls[0].is_masked]
        shown = [(image.path, control.path) for image in with_references for control in image.controls]
        option = "control_directory"
        text = (
            ": reference images that are the images themselves, so that copying is learned: {paths}; name another "
            "folder, or tell pairs in one folder apart by image_suffix and control_suffix in the dataset_config"
        )
    pairs = [*dict.fromkeys(shown)]
    if same := [image_path for image_path, control_path in pairs if _same_file(survey, image_path, control_path)]:
        everywhere = len(same) == len(pairs) and all(same_place(*pair) for pair in pairs)
        yield everywhere, Problem(option, text, paths=some_files(same), topic="images")


def _mask_of(config: RunConfig, image: Image) -> Mask | None:
    if image.mask_file and (config.data.masked_loss or config.control_images.inpaints):
        return Mask(image.path, image.mask_file)
    return Mask(image.path, image.path, is_alpha=True) if image.subset.alpha_mask else None


def _content(survey: Survey, mask: Mask) -> Content | None:
    folder, name = os.path.split(mask.path)
    listing = survey.files(folder)
    file = listing.images.get(name) or listing.labels.get(name)
    try:
        return _read_mask(mask.path, mask.is_alpha, file.modified, file.num_bytes) if file else None
    except ConfigError:
        return None


@lru_cache(maxsize=1 << 16)
def _read_mask(path: str, is_alpha: bool, modified: int, num_bytes: int) -> Content:
    """Decode a mask. Time and length are part of the cache key."""
    del modified, num_bytes
    colors = pixels.read_pixels(path, alpha=True)
    red, alpha = colors[:, :, 0], colors[:, :, 3]
    counts = alpha if is_alpha else red
    is_flat = not is_alpha and all(int(np.ptp(colors[:, :, at])) < ALIKE for at in range(3))
    is_colored = not is_alpha and bool((colors[:, :, 1:3] != red[:, :, None]).any())
    brightest = int(counts.max() if is_alpha else colors[:, :, :3].max())
    is_hidden = is_flat and int(np.ptp(alpha)) >= ALIKE
    share, painted = float(counts.mean()) / 255, float((counts >= HALF).mean())
    content = Content(share, painted, int(counts.max()), brightest, is_colored, is_hidden)
    values = None if is_alpha else pixels.wide_values(path)
    if values is None:
        return content
    is_cut = len(np.unique(values[values > LARGEST_WORD])) > 1 and values.dtype.kind != "f"
    kind = DECIMAL if values.dtype.kind == "f" else WHOLE
    return content._replace(wide=kind, largest_stored=float(values.max()), is_cut=is_cut)


def _sort(mistake: Mistake, masks: Sequence[tuple[Mask, Content]], stops: list[Problem], notes: list[Problem]) -> None:
    """Add a mistake, if it was made, to the errors or the warnings."""
    wrong = [mask.path for mask, content in masks if mistake.applies(content)]
    if wrong and (len(wrong) == len(masks) or not mistake.instead):
        stops.append(about_images(mistake.template, paths=some_files(wrong)))
    elif wrong:
        notes.append(about_images(mistake.instead, paths=some_files(wrong)))


def _themselves(masks: Sequence[tuple[Mask, Content]], survey: Survey) -> Iterator[Problem]:
    """Return masks that are the images themselves, or copies of them."""
    if same := [mask.image for mask, _ in masks if _same_file(survey, mask.image, mask.path)]:
        yield Problem(
            "conditioning_data_dir",
            ": masks that are the images themselves: {paths}; name the folder of the masks",
            paths=some_files(same),
            topic="images",
        )


def _same_file(survey: Survey, first: str, second: str) -> bool:
    """Return whether two paths lead to one file, or to files with the same content."""
    if same_place(first, second):
        return True
    sizes = []
    for path in (first, second):
        folder, name = os.path.split(path)
        file = survey.files(folder).images.get(name)
        sizes.append(file.num_bytes if file else -1)
    try:
        return sizes[0] == sizes[1] > 0 and filecmp.cmp(first, second, shallow=False)
    except OSError:
        return False


def _summary(number: int, images: int, decoded: Sequence[tuple[Mask, Content]], inpaints: bool) -> Message:
    """Describe how many images have a mask, and how much of their area counts."""
    shares = [content.painted if inpaints else content.share for _, content in decoded]
    facts = {
        "masks": number,
        "images": counted(images, "image"),
        "share": f"{100 * sum(shares) / len(shares):.0f}",
        "looked": len(decoded),
    }
    if inpaints:
        return Message("masks: {masks} of {images}; {share}% of their area is to be painted", **facts)
    if len(decoded) < number:
        return Message(
            "masks: {masks} of {images}; {share}% of the area counts, of {looked} that were looked at", **facts
        )
    return Message("masks: {masks} of {images}; {share}% of their area counts", **facts)
