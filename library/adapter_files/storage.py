"""Files of the tools: read and written tensor by tensor, never overwriting anything."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, MessageLike, Report, counted, option_name
from library.families.shared import weights
from library.families.shared.raw_header import header_metadata
from library.files import make_space, write_atomic

Metadata = dict[str, str]
TypeChoice = Callable[[str, Tensor], torch.dtype]

NOT_ONE_FILE = "{path} is a folder: choose one of its files"
# Values of `dtype`, by the names of save_precision.
DTYPES = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
CODES = {code: getattr(torch, name) for code, name in weights.STORED_TYPES.items()}
# dtype -> order in a file, and the dtype's code.
ORDER = {dtype: (place, code) for place, (code, dtype) in enumerate(CODES.items())}


def silent(what: MessageLike, done: int, total: int) -> None:
    """Report nothing."""


def storage_dtype(name: str | None) -> torch.dtype | None:
    """Return a precision's dtype; None means as stored. Raises ConfigError for others."""
    if name is None or name in DTYPES:
        return DTYPES[name] if name else None
    raise ConfigError(
        "{name} is {dtype}: use one of {dtypes}, or leave it out to keep what is stored",
        name=option_name("dtype"),
        dtype=repr(name),
        dtypes=", ".join(DTYPES),
    )


def check_readable(path: str | Path) -> Path:
    """Return the path of a readable file. Raises ConfigError for a missing one, or one that may contain code."""
    path = Path(path)
    if path.suffix.lower() in weights.PICKLED:
        raise ConfigError("{path} may hold code and is not opened: convert it to .safetensors first", path=path)
    if not path.exists():
        raise ConfigError("{path}: no such file", path=path)
    return path


def open_stored(path: str | Path) -> weights.Weights:
    """Open a checkpoint (a file, a shard of several, a folder) whose tensors are read on demand."""
    stored_entries(path)
    try:
        return weights.open_weights(path)
    except SafetensorError as e:
        raise ConfigError("{path} is a damaged safetensors file: {error}", path=path, error=e) from e


def stored_entries(path: str | Path) -> dict[str, JsonObject]:
    """Return the headers of all files of a checkpoint: dtype and shape by name. Raises ConfigError for other files."""
    out: dict[str, JsonObject] = {}
    for file in weights.files(check_readable(path)):
        try:
            entries = weights.header_entries(check_readable(file))
            out |= {name: {"dtype": entry["dtype"], "shape": list(entry["shape"])} for name, entry in entries.items()}
        except (AttributeError, IndexError, KeyError, TypeError) as e:  # a JSON header with other content
            raise ConfigError("{file} is a damaged safetensors file: get it again", file=file) from e
    return out


def metadata_of(path: str | Path) -> Metadata:
    """Return a file's metadata; empty for a folder of several files."""
    path = check_readable(path)
    if path.is_dir():
        return {}
    stored_entries(path)
    return {str(key): str(value) for key, value in header_metadata(path).items()}


def open_adapter(path: str | Path) -> tuple[weights.Weights, Metadata]:
    """Open the file of an adapter, and return its metadata. Raises ConfigError for a folder of several, of which one
    would be taken unseen."""
    path = check_readable(path)
    if path.is_dir() and len([*path.glob("*.safetensors")]) > 1 and not any(path.glob("*.index*.json")):
        raise ConfigError(NOT_ONE_FILE, path=path)
    return open_stored(path), metadata_of(path)


def header_bytes(table: Mapping[str, object], metadata: Mapping[str, str]) -> bytes:
    """Return the start of a .safetensors file: the header's length and the header, padded to a multiple of 8."""
    table = {"__metadata__": dict(metadata), **table} if metadata else dict(table)
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def fresh(out: str | Path, *sources: str | Path) -> Path:
    """Return the path of a new .safetensors file. Raises ConfigError for another extension or an existing file."""
    out = Path(out)
    if out.suffix.lower() != ".safetensors":
        raise ConfigError("{out}: the result is a .safetensors file; give it a name that ends so", out=out)
    if any(Path(source).exists() and out.exists() and out.samefile(source) for source in sources):
        raise ConfigError("{out} is one of the files to read: choose another name for the result", out=out)
    if out.exists():
        raise ConfigError("{out} exists already and is not overwritten: choose another name", out=out)
    return out


@dataclass(frozen=True)
class Planned:
    """A tensor of a planned file, and how to make it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.float()).all())


def keeps_numbers(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Return whether a dtype can hold a tensor's finite values."""
    if not dtype.is_floating_point or dtype == tensor.dtype or not tensor.numel():
        return True
    if tensor.is_floating_point() and torch.finfo(dtype).max >= torch.finfo(tensor.dtype).max:
        return True
    values = tensor.detach()
    ends = torch.stack((values.float() if values.dtype.itemsize == 1 else values).aminmax()).cpu()
    # float8_e4m3fn has no infinity: too large numbers silently become its largest one.
    cut = dtype == torch.float8_e4m3fn and float(ends.float().abs().max()) > torch.finfo(dtype).max
    return (is_finite(ends.to(dtype)) and not cut) or not is_finite(ends)


def cast_checked(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in its stored dtype. Raises ConfigError if that cannot hold its values."""
    if not keeps_numbers(dtype, tensor):
        raise ConfigError(
            "{dtype} cannot hold the numbers of {name}: use bf16 or float",
            dtype=str(dtype).removeprefix("torch."),
            name=name,
        )
    return tensor.detach().to("cpu", dtype).contiguous()


def exact(number: Tensor, dtype: torch.dtype) -> Tensor:
    # bfloat16 would turn an alpha of 261 into 260, and so change the strength.
    cast_to = number.detach().to("cpu", dtype)
    return cast_to if torch.equal(cast_to.double(), number.detach().cpu().double()) else number.detach().cpu().float()


class FilePlan:
    """A safetensors file before a byte of it is written.

    The bytes are those of the safetensors package, but each tensor is cast and brought to the host only when its turn
    comes, so that saving a model needs no second copy of it in memory.
    """

    def __init__(self, tensors: Mapping[str, Planned]) -> None:
        self.tensors = dict(sorted(tensors.items(), key=lambda item: (ORDER[item[1].dtype], item[0])))

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], dtype_of: TypeChoice | None = None) -> "FilePlan":
        """Plan a file of tensors in memory; `dtype_of(name, tensor)` returns the stored dtype of each."""

        def planned(name: str, tensor: Tensor) -> Planned:
            return Planned(dtype_of(name, tensor) if dtype_of else tensor.dtype, tuple(tensor.shape), lambda: tensor)

        return cls({name: planned(name, tensor) for name, tensor in tensors.items()})

    @property
    def size(self) -> int:
        return sum(planned.size for planned in self.tensors.values())  # bytes of all tensors

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """Return the start of the file."""
        table, at = {}, 0
        for name, planned in self.tensors.items():
            offsets = [at, at + planned.size]
            table[name] = {"dtype": ORDER[planned.dtype][1], "shape": list(planned.shape), "data_offsets": offsets}
            at = offsets[1]
        return header_bytes(table, metadata)

    def data(self, report: Report = silent) -> Iterator[bytes | memoryview]:
        """Yield the tensors' bytes, each made on demand. Raises ConfigError if a dtype is too narrow for the values."""
        for i, (name, planned) in enumerate(self.tensors.items()):
            report(Message("writing"), i, len(self.tensors))
            tensor = planned.make().detach()  # evaluates a lazy tensor only once
            stored = cast_checked(name, tensor, planned.dtype).reshape(planned.shape)
            yield stored.reshape(-1).view(torch.uint8).numpy().data
        report(Message("writing"), len(self.tensors), len(self.tensors))

    def hashes(self, metadata: Mapping[str, str]) -> Metadata:
        """Return the keys by which other tools identify a LoRA: SHA-256 of the tensors' bytes; and, for tools of 2022,
        8 digits of that of bytes 0x100000 to 0x110000 of a file with this metadata.
        """
        full, legacy, at = hashlib.sha256(), hashlib.sha256(), 0
        for i, chunk in enumerate(itertools.chain([self.header(metadata)], self.data())):
            full.update(chunk if i else b"")
            legacy.update(chunk[max(0, 0x100000 - at) : max(0, 0x110000 - at)])
            at += len(chunk)
        return {"sshs_model_hash": full.hexdigest(), "sshs_legacy_hash": legacy.hexdigest()[:8]}

    def write(self, path: Path, metadata: Mapping[str, str], report: Report = silent) -> None:
        """Write the file at `path` and read its header back. Raises OSError if it differs."""
        with path.open("wb") as file:
            for chunk in itertools.chain([self.header(metadata)], self.data(report)):
                file.write(chunk)
        try:
            with safe_open(path, framework="pt") as written:
                names = set(written.keys())
        except SafetensorError as e:
            raise OSError(f"the file that was just written cannot be read back: {e}") from e
        if names != self.tensors.keys():
            raise OSError(
                f"the file that was just written has {counted(len(names), 'tensor')} instead of {len(self.tensors)}"
            )

    def write_new(self, out: Path, metadata: Mapping[str, str], report: Report = silent) -> Path:
        """Write the file at `out`, which must be new; a failure leaves nothing behind."""
        make_space(Path(out), self.size)
        return write_atomic(fresh(out), lambda temporary: self.write(temporary, metadata, report))
