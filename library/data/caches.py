"""Caches beside the images, with the names and keys of kohya or musubi-tuner, and the check whether one is stale.

Each entry also stores its provenance, `made_from`: a line of JSON with the image or caption, the network and the
options that produced it. Other trainers ignore it. Their own files lack it, and are valid if their shapes match and
they are newer than their sources.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import parse_json
from library.config.problems import ConfigError
from library.data import cache_files, identity, stamps
from library.data.buckets import BucketFit, Size, crop_ltrb
from library.data.cache_files import BROKEN, CacheFile
from library.data.folders import UPRIGHT
from library.data.pixels import AS_STORED, Decoding, missing_folder
from library.families.base import LatentCache, TextCache

if TYPE_CHECKING:
    from library.data.images import ControlImage

LATENT = 8  # pixels per latent, for all families
MADE_FROM = "made_from"
KEPT_ARRAYS = re.compile(
    r"(?:latents|alpha_mask|control_\d+|original_size|crop_ltrb|made_from)(?:_flipped)?(_\d+x\d+|)"
)
SEVERAL = re.compile(r"latents(_\d+x\d+|)")
FORMAT = "1.0.1"  # of musubi-tuner's caches
EMPTY_CAPTION = "empty-caption"  # file stem of its outputs
PRESERVED = "preserved"  # and of those of a prompt that is preserved
CAPTION = "caption1"  # metadata of musubi-tuner's text caches: the encoded caption
NO_CACHE = LatentCache("", keyed_by_size=True)


@dataclass(frozen=True, slots=True)
class LatentEntry:
    """Latents that a training needs: their image, its crop, and further arrays such as masks and control latents.

    `tail` is the suffix of the keys: "_<h>x<w>" in files with several sizes, else empty.
    """

    image: str
    size: Size
    fit: BucketFit
    file: str
    tail: str
    flip: bool = False
    mask: bool = False
    interpolation: str = ""
    controls: "tuple[ControlImage, ...]" = ()
    cache: LatentCache = NO_CACHE
    how: Decoding = AS_STORED

    @property
    def shape(self) -> Size:
        return self.fit.bucket[1] // LATENT, self.fit.bucket[0] // LATENT

    @property
    def cut(self) -> JsonObject:
        provenance = {"resized": list(self.fit.resized), "interpolation": self.interpolation}
        return provenance | ({"read": marks} if (marks := self.how.marks(self.image)) else {})

    @property
    def arrays(self) -> dict[str, Size]:
        """Return the sizes (height, width) of all needed arrays by name."""
        width, height = self.fit.bucket
        sizes = {"latents": self.shape} | ({"alpha_mask": (height, width)} if self.mask else {})
        for number, control in enumerate(self.controls):
            sizes[f"control_{number}"] = control.fit.bucket[1] // LATENT, control.fit.bucket[0] // LATENT
        flipped = {f"{name}_flipped": size for name, size in sizes.items() if name != "alpha_mask"} if self.flip else {}
        return sizes | flipped

    def key(self, name: str) -> str:
        """Return the key of an array of `arrays` in the file."""
        if not self.cache.architecture or name == "alpha_mask":
            return name + self.tail
        (height, width), base = self.arrays[name], name.removesuffix("_flipped")
        if base != "latents":
            numbered = len(self.controls) > 1 or self.cache.numbers_controls
            base = f"latents_{base}" if numbered else "latents_control"
        square = self.cache.square
        tail = f"{height // square}x{width // square}" if square > 1 else f"1x{height}x{width}"
        return f"{base}{name[len(name.removesuffix('_flipped')) :]}_{tail}"

    def stored_size(self, name: str) -> Size:
        """Return height and width of an array of `arrays` in the file."""
        height, width = self.arrays[name]
        square = 1 if name == "alpha_mask" else self.cache.square
        return height // square, width // square


def latents_file(image: str, size: Size, suffix: str, how: Decoding = AS_STORED) -> str:
    """`photo.png` of 640x480 -> `photo_0640x0480_sdxl.npz`; if EXIF turns it, `photo_0640x0480_upright_sdxl.npz`."""
    # Latents of the unturned image may exist at the same size.
    turned = UPRIGHT * how.turns(image)
    return f"{os.path.splitext(image)[0]}_{size[0]:04d}x{size[1]:04d}{turned}{suffix}"


def text_file(image: str, suffix: str, number: int | None = None) -> str:
    """`photo.png` -> `photo_te_outputs.npz`; with the number of a variant of the caption `photo_te_outputs_v1.npz`."""
    name, ending = os.path.splitext(suffix)
    return f"{os.path.splitext(image)[0]}{name}{'' if number is None else f'_v{number}'}{ending}"


def empty_text_file(image: str, suffix: str, is_shared: bool) -> str:
    # A shared one serves all images of its folder.
    return text_file(os.path.join(os.path.dirname(image), EMPTY_CAPTION) if is_shared else image, suffix, 0)


def preserved_text_file(image: str, suffix: str, words: str, is_shared: bool) -> str:
    """Return the file of a preserved prompt, numbered by a digest of it: other trainings may preserve others."""
    if not words:
        return empty_text_file(image, suffix, is_shared)
    digest = hashlib.blake2b(words.encode("utf-8", "surrogatepass"), digest_size=6).digest()
    stem = os.path.join(os.path.dirname(image), PRESERVED) if is_shared else image
    return text_file(stem, suffix, int.from_bytes(digest))


# ---- latents


def latents_are_good(entry: LatentEntry, vae: JsonMapping | None, trust: bool = False) -> bool:
    """Return whether the file holds these latents of the current image; with `trust`, whether the file exists.

    `vae` identifies the network that would make them, see `identity`; None if it is unknown.
    """
    if trust:
        return os.path.exists(entry.file)
    try:
        with cache_files.open_cache_file(entry.file) as file:
            if not _has_size(file, entry):
                return False
            stamp = _stamp(file, entry.tail)
            if stamp is None:
                sources = [
                    entry.image,
                    *(path for control in entry.controls for path in (control.path, control.mask) if path),
                ]
                as_stored = not entry.how.marks(entry.image) and not any(map(stamps.reading, entry.controls))
                return as_stored and _is_younger(entry.file, sources) and _same_crop(file, entry)
    except BROKEN:
        return False
    # How a deleted image was decoded cannot be checked.
    names = ["resized", "interpolation"] + ["read"] * os.path.exists(entry.image)
    if any(stamp.get(name) != entry.cut.get(name) for name in names) or not identity.is_same_network(
        stamp.get("vae"), vae
    ):
        return False
    same = stamps.same_image(entry.image, stamp.get("image"))
    return same and stamps.same_controls(entry.controls, stamp.get("controls", []))


def has_size(entry: LatentEntry) -> bool:
    """Return whether the file has latents of this size, whatever they were made from."""
    try:
        with cache_files.open_cache_file(entry.file) as file:
            return _has_size(file, entry)
    except BROKEN:
        return False


def _has_size(file: CacheFile, entry: LatentEntry) -> bool:
    return all(file.shape(entry.key(name))[-2:] == entry.stored_size(name) for name in entry.arrays)


def read_latents(entry: LatentEntry) -> dict[str, np.ndarray]:
    """Read latents [C, h, w] and the other arrays of an entry, by the names of `LatentEntry.arrays`."""
    with cache_files.open_cache_file(entry.file) as file:
        latents = {name: file.array(entry.key(name)) for name in entry.arrays}
    # In musubi-tuner's format latents of some families have a frame dimension; in our earlier files all have it.
    latents = {name: array[:, 0] if array.ndim == 4 else array for name, array in latents.items()}
    square = entry.cache.square
    return {
        name: _spread_squares(array, square) if square > 1 and array.ndim == 3 else array
        for name, array in latents.items()
    }


def write_latents(entry: LatentEntry, arrays: Mapping[str, np.ndarray], stamp: JsonMapping) -> None:
    """Write the arrays by the names of `LatentEntry.arrays`, keeping other sizes that the file already holds."""
    content, facts = _arrays_of_other_sizes(entry)
    cache = entry.cache
    for name, array in arrays.items():
        if array.ndim == 3 and cache.square > 1:
            array = _squares(array, cache.square)
        elif array.ndim == 3 and cache.frames:
            array = array[:, None]
        content[entry.key(name)] = np.asarray(array)
    if entry.controls:
        stamp = {**stamp, "controls": stamps.control_stamps(entry.controls)}
    facts[MADE_FROM + entry.tail] = json.dumps({**stamp, **entry.cut})
    if entry.cache.architecture:
        facts |= {"architecture": entry.cache.architecture, "format_version": FORMAT}
        facts |= {"width": str(entry.size[0]), "height": str(entry.size[1])}
    else:
        content["original_size" + entry.tail] = np.array(entry.size)
        content["crop_ltrb" + entry.tail] = np.array(crop_ltrb(entry.fit.bucket, entry.size))
    cache_files.write_cache_file(entry.file, content, facts)


# ---- text


def text_is_good(  # noqa: PLR0913 - what a cache is compared with
    file: str,
    lengths: Mapping[str, int | None],
    sources: Sequence[str],
    stamp: JsonMapping,
    trust: bool = False,
    names: Mapping[str, str] | None = None,
    references: "Sequence[ControlImage]" = (),
) -> bool:
    """Return whether the file holds outputs with this `stamp` of a caption and of its reference images `references`.

    It must be newer than the files in `sources`. `lengths` are token lengths by array, `names` are keys of arrays in
    the file that differ from their names.
    """
    if trust:
        return os.path.exists(file)
    options = stamp.get("options", {})
    try:
        with cache_files.open_cache_file(file) as cache_file:
            for name, length in lengths.items():
                key = (names or {}).get(name, name)
                if key not in cache_file.names or length not in (None, *cache_file.shape(key)[:1]):
                    return False
            cached_stamp = _stamp(cache_file, "")
            if cached_stamp is None:
                sources = [*sources, *(control.path for control in references)]
                same = _same_options(cache_file, options) and _same_caption(cache_file, stamp["caption"])
                same = same and not any(map(stamps.reading, references))
                return same and _is_younger(file, sources)
    except BROKEN:
        return False
    cached_options = cached_stamp.get("options")
    if not isinstance(cached_options, dict) or any(
        cached_options.get(name) != value for name, value in options.items()
    ):
        return False
    same = all(cached_stamp.get(name) == stamp.get(name) for name in ("caption", "template"))
    return (
        same
        and identity.is_same_network(cached_stamp.get("encoders"), stamp["encoders"])
        and stamps.same_controls(references, cached_stamp.get("controls", []))
    )


def read_text_cache(file: str, keys: Iterable[str], names: Mapping[str, str] | None = None) -> dict[str, np.ndarray]:
    """Read the outputs of the text encoders by name, as float32."""
    with cache_files.open_cache_file(file) as cache_file:
        arrays = {key: cache_file.array((names or {}).get(key, key)) for key in keys}
    return {key: value.astype(np.float32) if value.dtype.kind == "f" else value for key, value in arrays.items()}


def write_text(
    file: str, arrays: Mapping[str, np.ndarray], stamp: JsonMapping, cache: TextCache | None = None, caption: str = ""
) -> None:
    """Write the outputs of the text encoders; options that affect them are separate keys, as upstream."""
    facts = {MADE_FROM: json.dumps(stamp)}
    if cache and cache.architecture:
        facts |= {"architecture": cache.architecture, "format_version": FORMAT, CAPTION: caption}
        content = {cache.names.get(name, name): array for name, array in arrays.items()}
    else:
        flags = {key: np.array(value) for key, value in stamp.get("options", {}).items() if isinstance(value, bool)}
        content = {**arrays, **flags}
    cache_files.write_cache_file(file, content, facts)


def text_stamp(caption: str, encoders: JsonMapping | None, options: JsonMapping, template: str = "") -> JsonObject:
    """Return what outputs of the text encoders depend on besides images; `template` inserts those."""
    return {
        "caption": _caption_hash(caption),
        "encoders": encoders,
        "options": dict(options),
        **({"template": template} if template else {}),
    }


# ---- inside


def _squares(latents: np.ndarray, side: int) -> np.ndarray:
    """Latents [C, h, w] -> [C * side * side, h / side, w / side]; channels are ordered by (channel, row, column)."""
    channels, height, width = latents.shape
    parts = latents.reshape(channels, height // side, side, width // side, side).transpose(0, 2, 4, 1, 3)
    return parts.reshape(-1, height // side, width // side)


def _spread_squares(squares: np.ndarray, side: int) -> np.ndarray:
    """Undo `_squares`."""
    channels, height, width = squares.shape
    parts = squares.reshape(-1, side, side, height, width).transpose(0, 3, 1, 4, 2)
    return parts.reshape(channels // side**2, height * side, width * side)


def _stamp(file: CacheFile, tail: str) -> JsonObject | None:
    text = file.fact(MADE_FROM + tail)
    if text is None:
        return None
    stamp = parse_json(text, MADE_FROM)
    return stamp if isinstance(stamp, dict) else {}


def _same_crop(file: CacheFile, entry: LatentEntry) -> bool:
    """Return whether another trainer cropped the same image to the same bucket; musubi-tuner stores its size."""
    if entry.cache.architecture:
        return (file.fact("width"), file.fact("height")) == tuple(map(str, entry.size))
    size, crop = file.array("original_size" + entry.tail), file.array("crop_ltrb" + entry.tail)
    if (size.shape, crop.shape) != ((2,), (4,)) or not {size.dtype.kind, crop.dtype.kind} <= set("iuf"):
        return False
    return tuple(size) == entry.size and np.allclose(crop, crop_ltrb(entry.fit.bucket, entry.size), atol=1.0)


def _same_options(file: CacheFile, options: JsonMapping) -> bool:
    """Return whether a file's switches match. Upstream stores no other options, which match only if they are unset."""
    switches = {key: value for key, value in options.items() if isinstance(value, bool)}
    if any(value is not None for key, value in options.items() if key not in switches):
        return False
    return all(bool(file.array(key)) == value for key, value in switches.items() if key in file.names)


def _same_caption(file: CacheFile, caption: str) -> bool:
    """Return whether another trainer encoded the caption of this hash, if it stores one; of several lines, the first
    caption.
    """
    stored_caption = (file.fact(CAPTION) or "").strip()
    return file.fact(CAPTION) is None or caption in (
        _caption_hash(stored_caption),
        _caption_hash(stored_caption.partition("\n")[0].strip()),
    )


def _caption_hash(caption: str) -> str:
    return hashlib.blake2b(caption.encode(), digest_size=16).hexdigest()


def _is_younger(file: str, sources: Sequence[str]) -> bool:
    cache_time = os.stat(file).st_mtime_ns
    # A deleted source cannot have changed.
    return all(os.stat(source).st_mtime_ns <= cache_time for source in sources if os.path.exists(source))


def _arrays_of_other_sizes(entry: LatentEntry) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the arrays and texts of other sizes in the file that belong to the current image.

    Arrays are copies: Windows replaces no file of which a part is still mapped.
    """
    try:
        with cache_files.open_cache_file(entry.file) as file:
            if entry.cache.architecture:  # its keys contain the size of a reference image, not of the image itself
                if any(not _still_same_image(file, entry, name[len(MADE_FROM) :]) for name in _made_from(file)):
                    return {}, {}
                texts = {name: file.fact(name) or "" for name in _made_from(file)}
                return {name: file.array(name).copy() for name in file.names}, texts
            tails = {match[1] for key in file.names if (match := SEVERAL.fullmatch(key))} - {entry.tail}
            unchanged = {tail for tail in tails if _still_same_image(file, entry, tail)}
            keys = (key for key in file.names if (match := KEPT_ARRAYS.fullmatch(key)) and match[1] in unchanged)
            return {key: file.array(key).copy() for key in keys}, {}
    except BROKEN:
        return {}, {}


def _made_from(file: CacheFile) -> list[str]:
    return [name for name in file.facts if name.startswith(MADE_FROM)]


def _still_same_image(file: CacheFile, entry: LatentEntry, tail: str) -> bool:
    stamp = _stamp(file, tail)
    if stamp is None:
        return _is_younger(entry.file, [entry.image])
    return stamps.same_image(entry.image, stamp.get("image"))


def unreadable_cache(file: str | Path, error: Exception) -> ConfigError:
    """Return the error for a cache that is unreadable when it is needed."""
    if isinstance(error, FileNotFoundError):
        return missing_folder(file) or ConfigError(
            "{file} is missing: it was there when the training started; start again, it will be made again", file=file
        )
    return ConfigError(
        "{file} cannot be read ({error}): delete it and start again, it will be made again", file=file, error=error
    )
