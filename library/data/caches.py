"""The .npz files beside the images: kohya's names and keys, and how a stale one is told from a good one.

Beside upstream's keys, which say nothing of where they came from, each entry carries `made_from`: a line of JSON that
names the image or caption, the network and the options that it was made with. Upstream ignores it. Files without it,
written by upstream, count as good when their shapes fit and they are younger than what they were made from.
"""

import hashlib
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from library.config.json_types import JsonMapping, JsonObject
from library.config.schema import ConfigError
from library.data import identity
from library.data.buckets import BucketFit, Size, crop_ltrb
from library.files import write_atomic

LATENT = 8  # pixels per latent, for both families
MADE_FROM = "made_from"
EXTRAS = ("latents", "latents_flipped", "alpha_mask")
NAMES = (*EXTRAS, "original_size", "crop_ltrb", MADE_FROM)
SEVERAL = re.compile(r"latents(_\d+x\d+|)")
BROKEN = (OSError, ValueError, KeyError, EOFError, MemoryError, OverflowError, NotImplementedError, zlib.error,
          zipfile.BadZipFile)  # fmt: skip
LARGEST = 2**30  # bytes of a cache when unpacked; the latents of 100 sizes of an image have a hundredth of it


@dataclass(frozen=True, slots=True)
class Wanted:
    """Latents that a training needs: of which image, cut how, and with which extras.

    `tail` is what the keys end in: "_<h>x<w>" in files that hold several sizes, else nothing.
    """

    image: str
    size: Size
    fit: BucketFit
    file: str
    tail: str
    flip: bool = False
    mask: bool = False
    interpolation: str = ""

    @property
    def shape(self) -> Size:
        """Height and width of the latents."""
        return self.fit.bucket[1] // LATENT, self.fit.bucket[0] // LATENT

    @property
    def cut(self) -> JsonObject:
        """What besides the pixels decides over the latents."""
        return {"resized": list(self.fit.resized), "interpolation": self.interpolation}


def latents_file(image: str, size: Size, suffix: str) -> str:
    """`photo.png` of 640x480 -> `photo_0640x0480_sdxl.npz`."""
    return f"{os.path.splitext(image)[0]}_{size[0]:04d}x{size[1]:04d}{suffix}"


def old_latents_file(image: str) -> str:
    """`photo.npz`, the name that older versions of sd-scripts gave, still read where it exists."""
    return os.path.splitext(image)[0] + ".npz"


def text_file(image: str, suffix: str) -> str:
    """`photo.png` -> `photo_te_outputs.npz`."""
    return os.path.splitext(image)[0] + suffix


# ---- latents


def latents_are_good(wanted: Wanted, vae: JsonMapping | None, trust: bool = False) -> bool:
    """Whether the file holds these latents, made from the image as it is now; `trust` asks only for the file.

    `vae` is the network that would make them, see `identity`, or None when it is not known.
    """
    if trust:
        return os.path.exists(wanted.file)
    try:
        with _opened(wanted.file) as npz:
            if not _fits(npz, wanted):
                return False
            stamp = _stamp(npz, wanted.tail)
            if stamp is None:
                return _is_younger(wanted.file, [wanted.image]) and _same_crop(npz, wanted)
    except BROKEN:
        return False
    if {key: stamp.get(key) for key in wanted.cut} != wanted.cut or not identity.same(stamp.get("vae"), vae):
        return False
    return _same_image(wanted.image, stamp.get("image"))


def read_latents(file: str, tail: str) -> dict[str, np.ndarray]:
    """Read latents, and latents_flipped and alpha_mask where they are there, by these names."""
    with _opened(file) as npz:
        others = [name for name in EXTRAS[1:] if name + tail in npz.files]
        return {name: npz[name + tail] for name in (EXTRAS[0], *others)}


def write_latents(wanted: Wanted, arrays: Mapping[str, np.ndarray], stamp: JsonMapping) -> None:
    """Write latents (and latents_flipped, alpha_mask); the sizes with a tail that the file holds already stay."""
    entry = {
        **arrays,
        "original_size": np.array(wanted.size),
        "crop_ltrb": np.array(crop_ltrb(wanted.fit.bucket, wanted.size)),
        MADE_FROM: np.array(json.dumps({**stamp, **wanted.cut})),
    }
    content: JsonObject = _others(wanted) | {key + wanted.tail: np.asarray(value) for key, value in entry.items()}
    write_atomic(wanted.file, lambda path: np.savez(path, **content))


def image_stamp(image: str) -> list[Any]:
    """Length, date and hash of a file: the first two are quick to compare, the third survives copying."""
    about = os.stat(image)
    return [about.st_size, about.st_mtime_ns, _hash(image)]


# ---- text


def text_is_good(
    file: str, lengths: Mapping[str, int | None], sources: Sequence[str], stamp: JsonMapping, trust: bool = False
) -> bool:
    """Whether the file holds these outputs, made as `stamp` says; `sources` are files it must be younger than.

    `lengths` are the arrays by name, and how many tokens they must be long, where they are of tokens.
    """
    if trust:
        return os.path.exists(file)
    options = stamp.get("options", {})
    try:
        with _opened(file) as npz:
            if not all(key in npz.files for key in lengths):
                return False
            if any(length is not None and _shape(npz, key)[:1] != (length,) for key, length in lengths.items()):
                return False
            made = _stamp(npz, "")
            if made is None:
                return _is_younger(file, sources) and _same_options(npz, options)
    except BROKEN:
        return False
    known = made.get("options")
    if not isinstance(known, dict) or any(known.get(name) != value for name, value in options.items()):
        return False
    return made.get("caption") == stamp["caption"] and identity.same(made.get("encoders"), stamp["encoders"])


def read_text(file: str, keys: Iterable[str]) -> dict[str, np.ndarray]:
    """Read the outputs of the text encoders by their names; numbers become float32."""
    with _opened(file) as npz:
        found = {key: npz[key] for key in keys}
    return {key: value.astype(np.float32) if value.dtype.kind == "f" else value for key, value in found.items()}


def write_text(file: str, arrays: Mapping[str, np.ndarray], stamp: JsonMapping) -> None:
    """Write the outputs of the text encoders; the options that they depend on are keys of their own, as upstream's."""
    flags = {key: np.array(value) for key, value in stamp.get("options", {}).items() if isinstance(value, bool)}
    content: JsonObject = {**arrays, **flags, MADE_FROM: np.array(json.dumps(stamp))}
    write_atomic(file, lambda path: np.savez(path, **content))


def text_stamp(caption: str, encoders: JsonMapping | None, options: JsonMapping) -> JsonObject:
    """What outputs of the text encoders depend on."""
    return {
        "caption": hashlib.blake2b(caption.encode(), digest_size=16).hexdigest(),
        "encoders": encoders,
        "options": dict(options),
    }


# ---- inside


@contextmanager
def _opened(file: str) -> Iterator[Any]:
    # Pickles could run code, and no cache needs them.
    npz = np.load(file, allow_pickle=False)
    if not isinstance(npz, np.lib.npyio.NpzFile) or npz.zip is None:
        raise ValueError("it is no .npz archive")
    with npz:
        if sum(entry.file_size for entry in npz.zip.infolist()) > LARGEST:
            raise ValueError("what is packed into it is too large for a cache")
        yield npz


def _fits(npz: Any, wanted: Wanted) -> bool:
    names = ["latents"] + ["latents_flipped"] * wanted.flip
    if any(_shape(npz, name + wanted.tail)[-2:] != wanted.shape for name in names):
        return False
    width, height = wanted.fit.bucket
    return not wanted.mask or _shape(npz, "alpha_mask" + wanted.tail) == (height, width)


def _shape(npz: Any, key: str) -> tuple[int, ...]:
    """Read the shape of an entry and nothing else of it: checking 100,000 files must not read them all."""
    if key not in npz.files:
        return ()
    with npz.zip.open(key + ".npy") as f:
        version = np.lib.format.read_magic(f)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        return read(f)[0]


def _stamp(npz: Any, tail: str) -> JsonObject | None:
    if MADE_FROM + tail not in npz.files:
        return None
    found = json.loads(str(npz[MADE_FROM + tail]))
    return found if isinstance(found, dict) else {}


def _same_crop(npz: Any, wanted: Wanted) -> bool:
    """Whether upstream cut the same image into the same bucket."""
    size, crop = npz["original_size" + wanted.tail], npz["crop_ltrb" + wanted.tail]
    same_size = tuple(int(side) for side in size) == wanted.size
    return same_size and np.allclose(crop, crop_ltrb(wanted.fit.bucket, wanted.size), atol=1.0)


def _same_options(npz: Any, options: JsonMapping) -> bool:
    """Upstream writes switches as keys of their own. Of others it says nothing: only unset ones can be believed."""
    switches = {key: value for key, value in options.items() if isinstance(value, bool)}
    if any(value is not None for key, value in options.items() if key not in switches):
        return False
    return all(bool(npz[key]) == value for key, value in switches.items() if key in npz.files)


def _is_younger(file: str, sources: Sequence[str]) -> bool:
    made = os.stat(file).st_mtime_ns
    return all(os.stat(source).st_mtime_ns <= made for source in sources if os.path.exists(source))


def _same_image(image: str, stamp: Any) -> bool:
    if not os.path.exists(image):  # data sets may consist of latents alone
        return True
    if not isinstance(stamp, list) or len(stamp) != 3:
        return False
    about = os.stat(image)
    if about.st_size != stamp[0]:
        return False
    return about.st_mtime_ns == stamp[1] or _hash(image) == stamp[2]


def _hash(file: str) -> str:
    with open(file, "rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _others(wanted: Wanted) -> dict[str, np.ndarray]:
    """The other sizes that the file holds, as far as they are of the image as it is now."""
    try:
        with _opened(wanted.file) as npz:
            tails = {found[1] for key in npz.files if (found := SEVERAL.fullmatch(key))} - {wanted.tail}
            good = [tail for tail in tails if _still_same_image(npz, wanted, tail)]
            return {key: npz[key] for tail in good for key in npz.files if key in {name + tail for name in NAMES}}
    except BROKEN:
        return {}


def _still_same_image(npz: Any, wanted: Wanted, tail: str) -> bool:
    stamp = _stamp(npz, tail)
    return _is_younger(wanted.file, [wanted.image]) if stamp is None else _same_image(wanted.image, stamp.get("image"))


def unreadable(file: str | Path, error: Exception) -> ConfigError:
    """The sentence for a cache that cannot be read when it is needed."""
    return ConfigError(
        "{file} cannot be read ({error}): delete it and start again, it will be made again", file=file, error=error
    )
