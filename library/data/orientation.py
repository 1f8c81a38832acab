"""The EXIF orientation of image files, in any format that Pillow reads it from, and turning images upright."""

import os
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from library.config.outside_files import open_regular
from library.data.image_files import opened_image

Version = tuple[str, int, int]  # of a file: path, time and length
UPRIGHT = 1
TAG = 0x0112
SIDEWAYS = (5, 6, 7, 8)  # these swap width and height
Turn = Image.Transpose
TURNS = {
    2: Turn.FLIP_LEFT_RIGHT,
    3: Turn.ROTATE_180,
    4: Turn.FLIP_TOP_BOTTOM,
    5: Turn.TRANSPOSE,
    6: Turn.ROTATE_270,
    7: Turn.TRANSVERSE,
    8: Turn.ROTATE_90,
}
BACK = {**TURNS, 6: Turn.ROTATE_90, 8: Turn.ROTATE_270}  # the other turns undo themselves
MAX_KNOWN = 1 << 18
_known: dict[Version, int] = {}
# PNG text chunks in which other programs store EXIF and XMP.
PNG_TEXTS = (b"Raw profile type exif", b"Raw profile type APP1", b"Raw profile type xmp", b"XML:com.adobe.xmp")


def orientation_of(image: Image.Image) -> int:
    """Return the orientation of an opened image, from 1 (upright) to 8. Pillow decodes a PNG for this."""
    try:
        turn = image.getexif().get(TAG)
    except Exception:  # damaged EXIF raises all kinds of errors
        return UPRIGHT
    return turn if turn in TURNS else UPRIGHT


def orientation(path: str | Path) -> int:
    """Return the orientation of an image file without decoding it; 1 if it is unreadable."""
    try:
        status = os.stat(path)
    except OSError:
        return UPRIGHT
    version = os.fspath(path), status.st_mtime_ns, status.st_size
    if (turn := _known.get(version)) is None:
        _keep(version, turn := _of_file(os.fspath(path), status.st_size))
    return turn


def note_orientation(path: str, file: BinaryIO, image: Image.Image) -> None:
    """Keep the orientation of a file that is open as an image, for `orientation`; where it must be decoded, do not."""
    turn = UPRIGHT
    if path.lower().endswith(".png"):
        place = file.tell()
        has_exif = _has_exif(file)
        file.seek(place)
        if has_exif:
            return
    elif image.format not in ("PNG", "BMP"):
        turn = orientation_of(image)
    elif not path.lower().endswith(".bmp"):
        return
    status = os.fstat(file.fileno())
    _keep((path, status.st_mtime_ns, status.st_size), turn)


def _keep(version: Version, turn: int) -> None:
    if len(_known) >= MAX_KNOWN:
        _known.clear()
    _known[version] = turn


def _of_file(path: str, num_bytes: int) -> int:
    if num_bytes == 0 or path.lower().endswith(".bmp"):
        return UPRIGHT
    try:
        if path.lower().endswith(".png"):
            with open_regular(path) as f:
                if not _has_exif(f):
                    return UPRIGHT
        with opened_image(path) as image:
            return orientation_of(image)
    except Exception:
        return UPRIGHT


def _has_exif(png: BinaryIO) -> bool:
    """Return whether a chunk of a PNG may hold an orientation."""
    # Most PNGs have none, and then need not be decoded.
    png.seek(8)
    while len(head := png.read(8)) == 8:
        length, kind = int.from_bytes(head[:4]), head[4:]
        if kind == b"eXIf":
            return True
        if kind in (b"tEXt", b"zTXt", b"iTXt"):
            start = png.read(min(length, 32))
            if start.startswith(PNG_TEXTS):
                return True
            length -= len(start)
        png.seek(length + 4, os.SEEK_CUR)
    return False


def turned_size(size: tuple[int, int], turn: int) -> tuple[int, int]:
    return (size[1], size[0]) if turn in SIDEWAYS else size


def upright(image: Image.Image) -> Image.Image:
    """Turn an image upright; without an orientation return it unchanged."""
    image.load()
    turn = orientation_of(image)
    return image.transpose(TURNS[turn]) if turn in TURNS else image


def turned_back(image: Image.Image, turn: int) -> Image.Image:
    return image.transpose(BACK[turn]) if turn in BACK else image


def tag(turn: int) -> Image.Exif:
    """Return EXIF data with only this orientation, to save with an image."""
    exif = Image.Exif()
    exif[TAG] = turn
    return exif
