"""Files of cached arrays by name: .npz as sd-scripts writes them, .safetensors as musubi-tuner does.

The provenance of an array is text: an array of its own in .npz, metadata in .safetensors. Names in .safetensors end in
the dtype, which is stripped here.
"""

import io
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from safetensors.torch import load

from library.config.outside_files import check_regular, parse_json, read_regular
from library.config.problems import SURROGATES
from library.files import write_atomic

BROKEN = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    MemoryError,
    OverflowError,
    NotImplementedError,
    zlib.error,
    zipfile.BadZipFile,
    SafetensorError,
)
MAX_CACHE_BYTES = 2**30  # limit of an unpacked cache in bytes, 100 times the latents of an image in 100 sizes
MASK = "alpha_mask"  # prefix of mask names
TYPE = re.compile(r"_(bfloat16|float\d+\w*|u?int\d+|bool)$")


class CacheFile(Protocol):
    """An open file of arrays."""

    names: tuple[str, ...]  # of the arrays
    facts: tuple[str, ...]  # names of the texts

    def array(self, name: str) -> np.ndarray:
        """Return an array; KeyError if it is missing. bfloat16, which numpy lacks, becomes float32."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return an array's shape, () if it is missing. Reads no values, as 100,000 files may have to be checked."""

    def fact(self, name: str) -> str | None:
        """Return a text, or None if it is missing."""


@contextmanager
def open_cache_file(file: str) -> Iterator[CacheFile]:
    """Open a file of either format; raise one of BROKEN if it is damaged."""
    size = check_regular(file).st_size if os.path.exists(file) else 0  # a missing one raises FileNotFoundError below
    if file.endswith(".safetensors"):
        if size > MAX_CACHE_BYTES:
            raise ValueError("it is too large for a cache")
        if SURROGATES.search(file):
            yield _Safetensors(_InMemory(read_regular(file, MAX_CACHE_BYTES)))
            return
        with safe_open(file, "pt") as archive:
            yield _Safetensors(archive)
        return
    # Pickles can execute code, and no cache needs them.
    npz = np.load(file, allow_pickle=False)
    if not isinstance(npz, np.lib.npyio.NpzFile) or npz.zip is None:
        raise ValueError("it is not an .npz archive")
    with npz:
        if sum(entry.file_size for entry in npz.zip.infolist()) > MAX_CACHE_BYTES:
            raise ValueError("what is packed into it is too large for a cache")
        yield _Npz(npz)


def write_cache_file(file: str, arrays: Mapping[str, np.ndarray], facts: Mapping[str, str]) -> None:
    """Write arrays and texts; in .safetensors the dtype is appended to names. In .npz 8-bit masks become float32 in
    0..1, as in sd-scripts.
    """
    # Masks in .npz are deflated, as they are nearly uniform; latents would not shrink. .safetensors has no compression,
    # so masks keep 8 bits there.
    if not file.endswith(".safetensors"):
        converted = {name: as_mask(array) if name.startswith(MASK) else array for name, array in arrays.items()}
        content = {**converted, **{name: np.array(text) for name, text in facts.items()}}
        write_atomic(file, lambda path: _write_npz(path, content))
        return
    typed = {f"{name}_{array.dtype}": np.ascontiguousarray(array) for name, array in arrays.items()}
    write_atomic(file, lambda path: save_file(typed, path, dict(facts)))


def as_mask(array: np.ndarray) -> np.ndarray:
    # 8 bits when decoded and in .safetensors, floats in 0..1 in .npz.
    return array.astype(np.float32) / 255 if array.dtype == np.uint8 else array.astype(np.float32, copy=False)


def _write_npz(path: Path, content: Mapping[str, np.ndarray]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in content.items():
            kind = zipfile.ZIP_DEFLATED if name.startswith(MASK) else zipfile.ZIP_STORED
            packed = io.BytesIO()
            np.lib.format.write_array(packed, array, allow_pickle=False)
            archive.writestr(f"{name}.npy", packed.getbuffer(), kind)


@contextmanager
def _damage_as_value_error() -> Iterator[None]:
    """Turn any other error of a reader into ValueError, as damage and malice have no common class."""
    try:
        yield
    except BROKEN:
        raise
    except Exception as e:
        raise ValueError(f"it is damaged: {type(e).__name__}") from e


class _Npz:
    def __init__(self, npz: Any) -> None:
        self._npz, self.names = npz, tuple(npz.files)
        self.facts = self.names

    @_damage_as_value_error()
    def array(self, name: str) -> np.ndarray:
        return self._npz[name]

    @_damage_as_value_error()
    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.names:
            return ()
        with self._npz.zip.open(name + ".npy") as f:
            version = np.lib.format.read_magic(f)
            read_header = (
                np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            )
            return read_header(f)[0]

    def fact(self, name: str) -> str | None:
        return str(self.array(name)) if name in self.names else None


class _InMemory:
    """The content of a .safetensors file as `safe_open` shows it, which opens no file whose name is not UTF-8."""

    def __init__(self, content: bytes) -> None:
        self._tensors = load(content)
        # The first 8 bytes are the length of the header, which is JSON.
        head = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")], "The header")
        self._texts: dict[str, str] = head.get("__metadata__", {})

    def keys(self) -> list[str]:
        return list(self._tensors)

    def metadata(self) -> dict[str, str]:
        return self._texts

    def get_tensor(self, name: str) -> Any:
        return self._tensors[name]

    def get_slice(self, name: str) -> Any:
        return SimpleNamespace(get_shape=lambda: self._tensors[name].shape)


class _Safetensors:
    def __init__(self, archive: Any) -> None:
        self._archive = archive
        self._full = {TYPE.sub("", name): name for name in archive.keys()}  # noqa: SIM118 - it is no mapping
        self._texts: dict[str, str] = archive.metadata() or {}
        self.names, self.facts = tuple(self._full), tuple(self._texts)

    @_damage_as_value_error()
    def array(self, name: str) -> np.ndarray:
        tensor = self._archive.get_tensor(self._full[name])
        return (tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor).numpy()

    @_damage_as_value_error()
    def shape(self, name: str) -> tuple[int, ...]:
        full = self._full.get(name)
        return tuple(self._archive.get_slice(full).get_shape()) if full else ()

    def fact(self, name: str) -> str | None:
        return self._texts.get(name)
