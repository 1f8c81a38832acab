"""Remark on images that are probably mistakes: a single colour, or copies of others. Either can be intended."""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence

from library.config.problems import Problem, counted
from library.data.folders import about_images, some_files
from library.data.held_out import digest_image
from library.data.image_files import opened_image
from library.data.images import Image
from library.data.threads import spread

MAX_DECODED_IMAGES = 100  # images that are decoded to look for a single colour
MAX_DECODED_PIXELS = 2**25  # of an image that is decoded
AS_DECODED = ("L", "LA", "RGB", "RGBA")  # modes whose values are compared as they are, as a copy takes as much memory
PIXELS_PER_BYTE = 40  # an image of a single colour has more: 85 in JPEG, hundreds in PNG
HEAD_BYTES = 800  # a file's header and metadata
COLOUR_NOISE = 3  # the smallest difference in brightness that counts; JPEG adds less
MIN_COPIES = 3  # fewer change little
MIN_SHARE_OF_COPIES = 0.1  # of all images


def remark_uniform(images: Sequence[Image]) -> Iterator[Problem]:
    """Yield remarks about training images of a single colour and about many equal ones. Skips regularisation images."""
    sides = {image.path: image.size for image in images if not image.is_reg}
    sizes = {path: size for path in sides if (size := _file_size(path))}
    yield from _find_plain({path: sides[path] for path in sizes}, sizes)
    yield from _find_copies(sizes)


def _file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # only its latents are left
        return 0


def _find_plain(sides: dict[str, tuple[int, int]], sizes: dict[str, int]) -> Iterator[Problem]:
    candidates = [
        path
        for path, (width, height) in sorted(sides.items())
        if (sizes[path] - HEAD_BYTES) * PIXELS_PER_BYTE < width * height <= MAX_DECODED_PIXELS
    ][:MAX_DECODED_IMAGES]
    plain = [path for path, is_plain in zip(candidates, spread(_is_plain, candidates), strict=True) if is_plain]
    if plain:
        yield about_images(
            "{count} of a single colour: {names}; remove them if they are empty by mistake",
            count=counted(len(plain), "image"),
            names=some_files(plain),
        )


def _is_plain(path: str) -> bool:
    try:
        with opened_image(path) as image:
            image.draft("RGB", (64, 64))  # an eighth of a JPEG's size is enough and decodes quickly
            has_key = "transparency" in image.info  # a colour that is transparent
            plain = image if image.mode in AS_DECODED and not has_key else image.convert("RGBA")
            extremes = [plain.getchannel(band).getextrema() for band in plain.getbands()]
    except Exception:  # any error of a decoder; damaged images are reported elsewhere
        return False
    ranges = [high - low for low, high in extremes if isinstance(low, int) and isinstance(high, int)]
    return len(ranges) == len(extremes) and max(ranges) < COLOUR_NOISE


def _find_copies(sizes: dict[str, int]) -> Iterator[Problem]:
    by_size: dict[int, list[str]] = defaultdict(list)
    for path, size in sorted(sizes.items()):
        by_size[size].append(path)
    alike = [path for paths in by_size.values() if len(paths) > 1 for path in paths]
    by_content: dict[tuple[int, str], list[str]] = defaultdict(list)
    for path, digest in zip(alike, spread(digest_image, alike), strict=True):
        by_content[sizes[path], digest].append(path)
    copies = [path for paths in by_content.values() for path in paths[1:]]
    if len(copies) >= max(MIN_COPIES, MIN_SHARE_OF_COPIES * len(sizes)):
        yield about_images(
            "{count} with the same content as others, so these are learned more often than the rest: {names}; remove "
            "the copies if that is not intended",
            count=counted(len(copies), "image"),
            names=some_files(copies),
        )
