"""Thumbnails of images, made on demand and cached in the user's cache folder."""

import contextlib
import hashlib
import io
import os
import threading
import time
from pathlib import Path

from PIL import Image

from library.config.outside_files import check_regular
from library.config.problems import ConfigError, require_choice
from library.data import orientation
from library.data.pixels import extensions, unreadable_image
from library.files import cache_folder, write_atomic

SIDES = (320, 1280)  # available sizes in pixels
PIXELS = 80_000_000  # largest image that is opened; a file of a few kilobytes may claim billions
LIMIT = 600 * 2**20  # bytes of all cached thumbnails
DAY = 86400.0

_at_once = threading.Semaphore(2)  # whole images in memory
_pruned = [0.0]


def thumbnail_folder() -> Path:
    return cache_folder() / "thumbnails"


def thumb(path: str | Path, side: int = SIDES[0], upright: bool = False) -> bytes:
    """Return an image as WebP, scaled down so that no side exceeds `side`, as stored, or `upright` by its EXIF
    orientation.

    Raises ConfigError if there is no such image, it cannot be decoded, or has too many pixels.
    """
    require_choice("side", side, SIDES)
    try:
        status = os.stat(path)
    except OSError:
        raise ConfigError("{path} does not exist", path=path) from None
    turn = orientation.orientation(path) if upright else orientation.UPRIGHT
    turned = f"|{turn}" if turn != orientation.UPRIGHT else ""
    key = f"{os.path.abspath(path)}|{status.st_mtime_ns}|{status.st_size}|{side}{turned}".encode(
        "utf-8", "surrogateescape"
    )
    name = hashlib.blake2b(key, digest_size=16).hexdigest()
    cached_file = thumbnail_folder() / name[:2] / f"{name}.webp"
    try:
        return cached_file.read_bytes()
    except OSError:
        pass
    thumbnail = _thumbnail(path, side, upright)
    with contextlib.suppress(ConfigError, OSError):  # a full or read-only disk: it is not cached
        write_atomic(cached_file, thumbnail)
    if time.time() - _pruned[0] > DAY:
        _pruned[0] = time.time()
        threading.Thread(target=prune_thumbnails, name="thumbnails", daemon=True).start()
    return thumbnail


def open_image(path: str | Path) -> Image.Image:
    """Open an image after checks of its header and size. Raises ConfigError when they fail."""
    extensions()  # registers the decoders of AVIF and JPEG XL
    try:
        check_regular(path)
        image = Image.open(path)
    except Exception as error:  # decoders' exceptions have no common class
        raise unreadable_image(path, error) from error
    if image.width * image.height > PIXELS:
        image.close()
        raise ConfigError(
            "{path} has {width} x {height} pixels, too many to be shown",
            path=path,
            width=image.width,
            height=image.height,
        )
    return image


def prune_thumbnails(limit: int = LIMIT) -> int:
    """Remove the oldest thumbnails until the rest fits into `limit` bytes. Returns the bytes that are left."""
    files = []
    for path in thumbnail_folder().glob("*/*.webp"):
        try:
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
        except OSError:
            continue
    total_bytes = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total_bytes <= limit:
            break
        with contextlib.suppress(OSError):  # on Windows one that is being read stays
            path.unlink(missing_ok=True)
            total_bytes -= size
    return total_bytes


def _thumbnail(path: str | Path, side: int, upright: bool) -> bytes:
    with _at_once, open_image(path) as image:
        try:
            image.draft("RGB", (side, side))  # JPEG is decoded at down to an eighth of its size where that is enough
            oriented = orientation.upright(image) if upright else image
            thumbnail = oriented.convert(
                "RGBA" if "A" in oriented.getbands() or "transparency" in oriented.info else "RGB"
            )
            thumbnail.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=2.0)
        except Exception as error:
            raise unreadable_image(path, error) from error
    out = io.BytesIO()
    thumbnail.save(out, "WEBP", quality=82, method=2)
    return out.getvalue()
