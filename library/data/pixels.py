"""Image files -> arrays of pixels, scaled and cropped: uint8, [height, width] or [height, width, channels]."""

import importlib
import importlib.util
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import imagesize
import numpy as np
from PIL import Image, features

from library.config.outside_files import open_regular
from library.config.problems import ConfigError, Problem, first_line
from library.config.run_config import RunConfig
from library.data.augment import View
from library.data.image_files import opened_image, room_to_decode
from library.data.orientation import MAX_KNOWN, Version, note_orientation, orientation, turned_size, upright

# OpenCV's constants as numbers, so that this table does not load it. Nearest is INTER_NEAREST_EXACT, as in sd-scripts.
BILINEAR, CUBIC, AREA, NEAREST = 1, 2, 3, 6
RESIZE = {"nearest": NEAREST, "bilinear": BILINEAR, "linear": BILINEAR, "bicubic": CUBIC, "cubic": CUBIC, "area": AREA}
PLUGINS = {".avif": "pillow_avif", ".jxl": "pillow_jxl"}
UNREADABLE_IMAGE = "{path} cannot be read as an image ({reason}): replace or remove it"
ALWAYS: tuple[str, ...] = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


@dataclass(frozen=True, slots=True)
class Decoding:
    """How image files are decoded: `upright` applies the EXIF orientation, and `ground` names the colour behind
    transparent areas. Without a ground alpha is dropped, and hidden colours show.
    """

    upright: bool = False
    ground: str = ""

    def size(self, path: str, stored: tuple[int, int]) -> tuple[int, int]:
        return turned_size(stored, orientation(path)) if self.upright else stored

    def turns(self, path: str) -> bool:
        return self.upright and orientation(path) != 1

    def marks(self, path: str) -> list[int | str]:
        """Return how it changes an image, to distinguish differently encoded ones; [] if it changes nothing."""
        turn = orientation(path) if self.upright else 1
        ground = self.ground if self.ground and has_transparency(path) else ""
        return [turn, ground] if turn != 1 or ground else []


AS_STORED = Decoding()
_transparent: dict[Version, bool] = {}


def decoding(config: RunConfig) -> Decoding:
    return Decoding(config.data.exif_rotation, config.data.transparent_background or "")


@lru_cache(maxsize=1)
def extensions() -> frozenset[str]:
    """Return decodable image suffixes in lower case; AVIF and JPEG XL only with an installed decoder."""
    suffixes = set(ALWAYS)
    if features.check("avif"):
        suffixes.add(".avif")
    for suffix, module in PLUGINS.items():
        if suffix not in suffixes and importlib.util.find_spec(module) is not None:
            importlib.import_module(module)  # registers itself with Pillow
            suffixes.add(suffix)
    return frozenset(suffixes)


@lru_cache(maxsize=1 << 18)
def header_size(path: str, modified: int, num_bytes: int) -> tuple[int, int]:
    """Return stored width and height, (0, 0) if unreadable; time and length are part of the cache key."""
    del modified
    if num_bytes == 0:
        return 0, 0
    # AVIF and JPEG XL containers hold several sizes, so only their decoder knows the right one.
    if Path(path).suffix.lower() in ALWAYS:
        size = imagesize.get(path, exif_rotation=False)
        if min(size) > 0:
            return int(size[0]), int(size[1])
    try:
        extensions()
        with opened_image(path) as image:
            return image.size
    except Exception:
        return 0, 0


def check_file(path: str, whole: bool = True) -> str:
    """Return why an image cannot be decoded, or "". Reads its header and its end; with `whole` also checks a PNG's
    checksums and decodes a WebP, which has none. Others are decoded only if their end looks damaged. What it reads on
    the way is kept for `orientation` and `has_transparency`, which then need not open the file.
    """
    try:
        extensions()
        with open_regular(path) as file:
            with Image.open(file) as image:
                _keep_facts(path, file, image)
                if _is_undamaged(file, image, whole):
                    return ""
            file.seek(0)
            with Image.open(file) as image, room_to_decode(image):
                image.load()
    except Exception as e:
        return _decoding_error(e)
    return ""


def has_transparency(path: str) -> bool:
    """Return whether an image has an alpha channel or a transparent colour; False if it is unreadable."""
    try:
        status = os.stat(path)
        remembered = _transparent.get((path, status.st_mtime_ns, status.st_size))
        if remembered is not None:
            return remembered
        extensions()
        with open_regular(path) as file, Image.open(file) as image:
            return _keep_facts(path, file, image)
    except Exception:
        return False


def _keep_facts(path: str, file: BinaryIO, image: Image.Image) -> bool:
    """Keep what an opened image says of itself. Return whether it is transparent anywhere."""
    note_orientation(path, file, image)
    if len(_transparent) >= MAX_KNOWN:
        _transparent.clear()
    status = os.fstat(file.fileno())
    is_transparent = bool(image.has_transparency_data)
    _transparent[path, status.st_mtime_ns, status.st_size] = is_transparent
    return is_transparent


@lru_cache(maxsize=1 << 16)
def hides_colours(path: str, modified: int, num_bytes: int) -> bool:
    """Return whether an image has transparent areas; decodes it. Time and length are part of the cache key."""
    del modified, num_bytes
    try:
        with opened_image(path) as image:
            return bool(image.has_transparency_data) and _alpha_least(image) < 255
    except Exception:
        return False


def missing_folder(path: str | Path) -> ConfigError | None:
    """Return the error for a file whose whole folder has gone during a training; None if the folder is there."""
    if (folder := Path(path).absolute().parent).is_dir():
        return None
    template = "{folder} is missing: it was there when the training started; put it back under this name"
    return ConfigError(template, folder=folder)


def read_pixels(path: str | Path, how: Decoding = AS_STORED, alpha: bool = False) -> np.ndarray:
    """Decode an image to RGB, or RGBA.

    Raises ConfigError, naming the file, if it cannot be decoded.
    """
    extensions()
    try:
        with opened_image(path) as image:
            oriented = upright(image) if how.upright else image
            if how.ground and oriented.has_transparency_data:
                return np.asarray(_over(oriented, how.ground, alpha))
            return np.asarray(_eight_bit(oriented).convert("RGBA" if alpha else "RGB"))
    except FileNotFoundError:
        missing = ConfigError("{path} is missing: it was there when the training started", path=path)
        raise missing_folder(path) or missing from None
    except Exception as e:
        raise unreadable_image(path, e) from e


def unreadable_image(path: str | Path, error: Exception) -> ConfigError:
    return ConfigError(UNREADABLE_IMAGE, path=path, reason=_decoding_error(error))


def read_mask(path: str | Path, how: Decoding = AS_STORED) -> np.ndarray:
    # The red channel, uint8 [H,W]: 255 is full loss weight, 0 none. Transparency is ignored.
    return read_pixels(path, Decoding(how.upright))[:, :, 0]


def mask_channel(image: Image.Image) -> Image.Image:
    return _eight_bit(image).convert("RGB").getchannel(0)


def wide_values(path: str | Path) -> np.ndarray | None:
    """Return the stored values of a 16- or 32-bit grey image, integers or floats [H,W]; None for 8 bits. Raises as
    `read_pixels`.
    """
    extensions()
    try:
        with opened_image(path) as image:
            return np.asarray(image) if image.mode.startswith(("I", "F")) else None
    except Exception as e:
        raise unreadable_image(path, e) from e


def expect_size(path: str, picture: np.ndarray, size: tuple[int, int]) -> None:
    """Raise ConfigError unless an image has the size stated by a metadata file or a cache's name."""
    height, width = picture.shape[:2]
    if (width, height) != size:
        raise ConfigError(
            "{path} is {width}x{height}, but was said to be {wide}x{high}: correct its metadata, "
            "or delete its .npz file if the image was exchanged",
            path=path,
            width=width,
            height=height,
            wide=size[0],
            high=size[1],
        )


def apply_view(picture: np.ndarray, view: View, interpolation: str | None = None) -> np.ndarray:
    """Scale, crop and flip an image to a `view`."""
    if picture.shape[1::-1] != view.resized:
        picture = resize_pixels(picture, view.resized, interpolation)
    width, height = view.size
    picture = picture[view.top : view.top + height, view.left : view.left + width]
    return np.ascontiguousarray(picture[:, ::-1] if view.flip else picture)


def resize_pixels(picture: np.ndarray, size: tuple[int, int], interpolation: str | None = None) -> np.ndarray:
    """Scale to (width, height): by area if no side is enlarged, else Lanczos, unless an interpolation is set."""
    if picture.ndim == 3 and picture.shape[2] == 4:  # scale alpha separately, as Pillow would premultiply the colours
        colours = resize_pixels(np.ascontiguousarray(picture[:, :, :3]), size, interpolation)
        return np.dstack([colours, resize_pixels(np.ascontiguousarray(picture[:, :, 3]), size, interpolation)])
    shrinks = size[0] <= picture.shape[1] and size[1] <= picture.shape[0]
    method = interpolation.lower() if interpolation else "area" if shrinks else "lanczos"
    if method in ("lanczos", "box"):
        resampling = Image.Resampling.LANCZOS if method == "lanczos" else Image.Resampling.BOX
        return np.asarray(Image.fromarray(picture).resize(size, resampling))
    if method not in RESIZE:
        raise ConfigError(
            Problem(
                "resize_interpolation",
                ": {interpolation} is not one of lanczos, box, {resize}",
                interpolation=repr(interpolation),
                resize=", ".join(RESIZE),
            )
        )
    import cv2

    return cv2.resize(picture, size, interpolation=RESIZE[method])


def to_tensor(picture: np.ndarray) -> Any:
    """RGB pixels, uint8 [height, width, 3] -> float32 tensor [3, height, width] in -1..1."""
    import torch

    return torch.from_numpy(picture.copy()).permute(2, 0, 1).float().div_(255).sub_(0.5).div_(0.5).contiguous()


def _eight_bit(image: Image.Image) -> Image.Image:
    """Convert 16-bit grey to 8 bits."""
    # Pillow's own conversion would clip nearly every pixel to white.
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).astype(np.uint32).clip(0, 65535) >> 8).astype(np.uint8))


def _over(image: Image.Image, ground: str, alpha: bool) -> Image.Image:
    """Blend an image over a ground of one colour; with `alpha`, keep its transparency as a fourth channel."""
    colours = image.convert("RGBA")
    blended = Image.alpha_composite(Image.new("RGBA", colours.size, ground), colours)
    if not alpha:
        return blended.convert("RGB")
    blended.putalpha(colours.getchannel("A"))
    return blended


def _alpha_least(image: Image.Image) -> float:
    least, _ = image.convert("RGBA").getchannel("A").getextrema()
    return float(least) if isinstance(least, int | float) else 255.0


def _is_undamaged(file: BinaryIO, image: Image.Image, whole: bool) -> bool:
    """Return whether an opened file is undamaged, by its checksums or its end; False if only decoding can tell.

    A wrong bit in a JPEG or BMP only changes pixels; a PNG or WebP becomes undecodable.
    """
    kind = image.format or ""
    if not _ends_well(file, kind) or (whole and kind == "WEBP"):
        return False
    try:
        if whole and kind == "PNG":
            image.verify()
    except Exception:  # even damage in chunks that decoding skips
        return False
    return True


def _ends_well(file: BinaryIO, kind: str) -> bool:
    """Return whether the file ends as its format requires, so is not truncated."""
    place = file.tell()  # where Pillow continues to read
    file.seek(0)
    head = file.read(12)
    length = file.seek(0, 2)
    file.seek(max(0, length - 64))
    tail = file.read()
    file.seek(place)
    if kind == "PNG":
        return b"IEND" in tail
    if kind in ("JPEG", "MPO"):
        return b"\xff\xd9" in tail
    if kind == "WEBP":
        return length >= int.from_bytes(head[4:8], "little") + 8
    if kind == "BMP":
        return length >= int.from_bytes(head[2:6], "little") > 0
    return False


def _decoding_error(error: Exception) -> str:
    if isinstance(error, Image.DecompressionBombError):
        return "it has too many pixels to be decoded safely"
    return first_line(error).strip(" .")
