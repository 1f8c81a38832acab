"""A safetensors file, written tensor by tensor.

The bytes are those of the safetensors package, but each tensor is cast and brought to the host only when its turn
comes, so that saving a model needs no second copy of it in memory.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from library.config.schema import ConfigError

# In the order in which the package lays them out: wide types first, so that all are aligned.
KINDS = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ORDER = {dtype: place for place, dtype in enumerate(KINDS)}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor's place in the file."""

    name: str
    tensor: Tensor
    dtype: torch.dtype
    begin: int

    @property
    def end(self) -> int:
        """One past its last byte, counted from the end of the header."""
        return self.begin + self.tensor.numel() * self.dtype.itemsize


class TensorLayout:
    """What a file will hold, before a byte of it is written."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype_of: Callable[[str, Tensor], torch.dtype]) -> None:
        """`dtype_of(name, tensor)` says in which type each is stored."""
        kinds = {name: dtype_of(name, tensor) for name, tensor in tensors.items()}
        self.entries: list[TensorEntry] = []
        for name in sorted(tensors, key=lambda n: (ORDER[kinds[n]], n)):
            self.entries.append(TensorEntry(name, tensors[name], kinds[name], self.data_size))

    @property
    def data_size(self) -> int:
        """Bytes of all tensors."""
        return self.entries[-1].end if self.entries else 0

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """The file's first bytes: the header's length and the header, padded to a multiple of 8."""
        table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        for e in self.entries:
            offsets = [e.begin, e.end]
            table[e.name] = {"dtype": KINDS[e.dtype], "shape": list(e.tensor.shape), "data_offsets": offsets}
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def data(self) -> Iterator[bytes | memoryview]:
        """The tensors' bytes, one after the other. Raises ConfigError where a type is too narrow for the numbers."""
        for e in self.entries:
            stored = e.tensor.detach().to("cpu", e.dtype).contiguous()
            if stored.is_floating_point() and not is_finite(stored) and is_finite(e.tensor):
                raise ConfigError(
                    f"save_precision: {KINDS[e.dtype].lower()} cannot hold the numbers of {e.name}; use bf16 or float"
                )
            yield stored.reshape(-1).view(torch.uint8).numpy().data

    def hashes(self, metadata: Mapping[str, str]) -> tuple[str, str]:
        """sshs_model_hash and sshs_legacy_hash.

        SHA-256 of the tensors' bytes; and, for tools of 2022, the first 8 digits of that of the bytes 0x100000 to
        0x110000 of a file with this metadata.
        """
        whole, legacy, place = hashlib.sha256(), hashlib.sha256(), 0
        for i, chunk in enumerate(self._all(metadata)):
            if i:
                whole.update(chunk)
            legacy.update(chunk[max(0, 0x100000 - place) : max(0, 0x110000 - place)])
            place += len(chunk)
        return whole.hexdigest(), legacy.hexdigest()[:8]

    def _all(self, metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
        yield self.header(metadata)
        yield from self.data()

    def write(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Write the file at `path` and check it."""
        with open(path, "wb") as f:
            for chunk in self._all(metadata):
                f.write(chunk)
        self.check(path)

    def check(self, path: Path) -> None:
        """Read the header back. Raises OSError when the file is not what was meant to be written."""
        try:
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
        except SafetensorError as e:
            raise OSError(f"the file that was just written cannot be read back: {e}") from e
        if names != {e.name for e in self.entries}:
            raise OSError(f"the file that was just written has {len(names)} tensors instead of {len(self.entries)}")


def holds(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Whether numbers of a tensor stay numbers in a type; what is infinite or NaN already does not matter."""
    if not dtype.is_floating_point or dtype == tensor.dtype or not tensor.numel():
        return True
    ends = torch.stack(tensor.detach().aminmax()).cpu()
    return is_finite(ends.to(dtype)) or not is_finite(ends)


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers only, neither infinity nor NaN."""
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.float()).all())
