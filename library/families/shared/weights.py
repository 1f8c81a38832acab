"""Read checkpoints in the formats in use: headers, and tensors one at a time."""

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from library.config import environment
from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import LIST, load_json
from library.config.problems import ConfigError
from library.config.values import quoted
from library.families.shared import file_identity, scaled_weights
from library.families.shared.expected_tensors import require
from library.families.shared.raw_header import read_raw_header
from library.families.shared.scaled_weights import FORMAT, SCALED, SCALES
from library.families.shared.tensor_names import COMPILE_PREFIX

if TYPE_CHECKING:
    from library.families.stored_weights import ScaledWeight

PICKLED = (".ckpt", ".pt", ".pth", ".bin")
BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
}
# In the order in which the safetensors package writes them.
STORED_TYPES = {
    "I64": "int64",
    "F64": "float64",
    "F32": "float32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I16": "int16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_shapes_only: ContextVar[bool] = ContextVar("_shapes_only", default=False)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Within the context, read checkpoints without their data: their tensors are on the meta device."""
    token = _shapes_only.set(True)
    try:
        yield
    finally:
        _shapes_only.reset(token)


def header(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Return shapes by tensor name, without `_orig_mod.`, from the header of a .safetensors file. Needs no torch.

    Raises ConfigError if the file is missing, is not a safetensors file or is truncated.
    """
    return {name.replace(COMPILE_PREFIX, ""): tuple(entry["shape"]) for name, entry in header_entries(path).items()}


def shapes_of(entries: Mapping[str, JsonMapping]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(entry["shape"]) for name, entry in entries.items()}


def header_entries(path: str | Path) -> dict[str, JsonObject]:
    """Return the header of a .safetensors file: dtype, shape and data_offsets by tensor name. Raises ConfigError as
    `header` does.
    """
    path = Path(path)
    table, data = read_raw_header(path)
    table.pop("__metadata__", None)
    end, size = data + _data_length(path, table), path.stat().st_size
    if end > size:
        raise ConfigError(
            "{path} was cut short: it has {size} of {end} bytes, download it again",
            path=path,
            size=f"{size:,}",
            end=f"{end:,}",
        )
    return table


def _data_length(path: Path, table: JsonMapping) -> int:
    """Return the number of bytes after a header. Raises ConfigError unless all ranges are disjoint and have the right
    size.
    """
    places = []
    for name, entry in table.items():
        dtype, shape, first, last = "", (), 0, 0
        try:
            dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
            counts = [*shape, first, last]
            sound = isinstance(dtype, str) and all(type(n) is int and 0 <= n < 2**63 for n in counts) and first <= last
        except (TypeError, KeyError, ValueError):
            sound = False
        if not sound or dtype in BITS and math.prod(shape) * BITS[dtype] != (last - first) * 8:
            raise ConfigError(
                "{path} is a damaged safetensors file: the header's entry {name} is wrong",
                path=path,
                name=quoted(name[:80]),
            )
        places.append((first, last))
    places.sort()
    if any(earlier[1] > later[0] for earlier, later in itertools.pairwise(places)):
        raise ConfigError("{path} is a damaged safetensors file: tensors lie over each other", path=path)
    return places[-1][1] if places else 0


@dataclass(frozen=True, slots=True)
class FileRange:
    """The bytes of a tensor in a file, with its dtype (torch's name) and shape."""

    path: Path
    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor for a model: its byte range in a file, if it equals that, and a function that reads it on the host."""

    range: FileRange | None
    read: Callable[[], Any]
    scaled: Callable[[], "ScaledWeight | None"] | None = None  # reads it as it is stored, if that is 8 bits with scales


class TensorFile:
    """An open safetensors file: the header is read at once, tensors on demand.

    Tensors are memory-mapped, unless `mmap` is off. Raises ConfigError.
    """

    def __init__(self, path: Path, mmap: bool) -> None:
        self.path, self.entries = path, header_entries(path)  # first, for its clear errors
        self._file = path.open("rb")
        self._data = 8 + int.from_bytes(self._file.read(8), "little")
        try:
            self._mapped = safe_open(path, framework="pt") if mmap else None
        except SafetensorError as e:
            if environment.lacks_memory(e):
                raise MemoryError(str(e)) from e
            template = "{path} is a damaged safetensors file ({why}): download it again"
            raise ConfigError(template, path=path, why=e) from e

    @functools.cached_property
    def formats(self) -> dict[str, JsonObject]:
        """Formats of 8-bit weights by layer, as the header's metadata has them."""
        return scaled_weights.formats_in_header(self.path)

    def __getitem__(self, name: str) -> Any:
        if self._mapped:
            return self._mapped.get_tensor(name)
        import torch

        place = self.range(name)
        if place is None:
            raise ConfigError(
                "{path} holds numbers of a type that is not known here: {name}", path=self.path, name=name
            )
        tensor = torch.empty(place.shape, dtype=getattr(torch, place.dtype))
        if place.length:
            self._file.seek(place.offset)
            self._file.readinto(tensor.view(-1).view(torch.uint8).numpy().data)
        return tensor

    def range(self, name: str) -> FileRange | None:
        """Return the range of a tensor; None for unsupported dtypes."""
        entry = self.entries[name]
        first, last = entry["data_offsets"]
        if entry["dtype"] not in STORED_TYPES:
            return None
        return FileRange(
            self.path, self._data + first, last - first, STORED_TYPES[entry["dtype"]], tuple(entry["shape"])
        )


class Weights(Mapping):
    """The tensors of one or several files by name, read on demand: a 24 GB file does not take memory at once.

    8-bit weights with scales are dequantized to float32.
    """

    def __init__(self, paths: list[Path], mmap: bool = True):
        self.paths = paths
        self._where: dict[str, tuple[TensorFile | dict[str, Any], str]] = {}
        for path in paths:
            source = _open_file(path, mmap)
            names = source.entries if isinstance(source, TensorFile) else source
            self._where |= {name.replace(COMPILE_PREFIX, ""): (source, name) for name in names}
        # Scales of 8-bit weights by the weight's name; they are not listed as tensors.
        marks = {name: self._where.pop(name) for name in list(self._where) if name.rpartition(".")[2] in SCALED}
        self._scales = {
            f"{layer}.weight": place
            for name, place in marks.items()
            for layer, _, mark in [name.rpartition(".")]
            if mark in SCALES
        }
        self._formats = {name.rpartition(".")[0]: place for name, place in marks.items() if name.endswith(f".{FORMAT}")}

    def __getitem__(self, name: str):
        source, stored = self._where[name]
        tensor, scale = source[stored], self._scales.get(name)
        if scale is None or tensor.element_size() > 1:
            return tensor
        from library.families import stored_weights

        return stored_weights.restore(tensor, scale[0][scale[1]], self._group(name, tensor))

    def scaled(self, name: str) -> "ScaledWeight | None":
        """Return an 8-bit weight as it is stored, with a factor for each row; None for other weights, and where factors
        belong to blocks of a row.
        """
        from library.families.stored_weights import ScaledWeight, factor_of_each_row

        source, stored = self._where[name]
        tensor, scale = source[stored], self._scales.get(name)
        if scale is None or str(tensor.dtype) not in ("torch.int8", "torch.float8_e4m3fn"):
            return None
        factors = factor_of_each_row(tensor, scale[0][scale[1]])
        return None if factors is None else ScaledWeight(tensor, factors, self._group(name, tensor))

    def _group(self, name: str, tensor: Any) -> int:
        """Return how many values of a row are rotated together, 0 for none."""
        if str(tensor.dtype) != "torch.int8" or tensor.is_meta:
            return 0
        return scaled_weights.rotated_group(self._format(name), tensor.shape[-1], self.paths[0])

    def _format(self, name: str) -> JsonMapping:
        """Return the format of an 8-bit weight, {} for none."""
        source, stored = self._where[name]
        formats = source.formats if isinstance(source, TensorFile) else {}
        if format := scaled_weights.format_in_header(formats, stored.rpartition(".")[0]):
            return format
        place = self._formats.get(name.rpartition(".")[0])
        text = bytes(place[0][place[1]].tolist()) if place else b""
        return scaled_weights.parse_format(text, self.paths[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def source(self, name: str) -> Source:
        """Return a tensor that is not read yet, to load a model."""
        file, stored = self._where[name]
        place = file.range(stored) if isinstance(file, TensorFile) and name not in self._scales else None
        scaled = functools.partial(self.scaled, name) if name in self._scales else None
        return Source(place, functools.partial(self.__getitem__, name), scaled)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shapes by name, without reading the tensors."""
        return {
            name: tuple(source.entries[stored]["shape"] if isinstance(source, TensorFile) else source[stored].shape)
            for name, (source, stored) in self._where.items()
        }


def _open_file(path: Path, mmap: bool) -> TensorFile | dict[str, Any]:
    """Return a lazy reader of a safetensors file, or a dict of tensors for formats without lazy reading."""
    if not _shapes_only.get():
        file_identity.note_files(path)
    if path.suffix.lower() in PICKLED:
        return _unpickled(path)
    if _shapes_only.get():
        return {name: _without_numbers(entry) for name, entry in header_entries(path).items()}
    return TensorFile(path, mmap)


def _without_numbers(entry: JsonMapping) -> Any:
    import torch

    return torch.empty(entry["shape"], dtype=getattr(torch, STORED_TYPES.get(entry["dtype"], "float32")), device="meta")


def _unpickled(path: Path) -> JsonObject:
    """Return the tensors of a .ckpt or .bin file, without executing code in it."""
    import torch

    try:
        content = torch.load(path, map_location="meta" if _shapes_only.get() else "cpu", weights_only=True)
    except Exception as e:  # exceptions for other files have no common class
        if environment.lacks_memory(e):
            raise
        raise ConfigError(
            "{path} holds more than tensors or is damaged, and is not opened: convert it to .safetensors", path=path
        ) from e
    content = content.get("state_dict", content) if isinstance(content, dict) else {}
    return {name: tensor for name, tensor in content.items() if isinstance(tensor, torch.Tensor)}


def open_weights(path: str | Path, mmap: bool = True) -> Weights:
    """Open a checkpoint: a file, a sharded file (any of its shards or its index), or a folder that contains one.

    In a folder with several precisions the unmarked one, usually float32, is taken.
    """
    return Weights(files(Path(path)), mmap)


def files(path: Path, variant: str | None = None) -> list[Path]:
    """Return the files that make up one checkpoint. In a folder `variant` ("fp16") is preferred, if given."""
    if path.is_dir():
        return files(_main(path, variant))
    if path.name.endswith(".index.json"):
        return [_present(path.parent / shard) for shard in _shards(path)]
    shard = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})(\.\w+)", path.name)
    if shard:
        stem, count, suffix = shard.groups()
        return [_present(path.parent / f"{stem}-{i:05d}-of-{count}{suffix}") for i in range(1, int(count) + 1)]
    return [_present(path)]


def _shards(index: Path) -> list[str]:
    """Return the names of the files in an index. Raises ConfigError if it has none, or names outside of its folder."""
    shards: set[str] = set()
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        shards = set(load_json(_present(index), LIST)["weight_map"].values())
    if not shards or not all(isinstance(name, str) and is_plain(name) for name in shards):
        raise ConfigError("{path} names no files of weights: download it again", path=index)
    return sorted(shards)


def is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and not set(name) & set("/\\:\0")


def _present(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError("{path}: no such file", path=path)
    return path


USUAL_NAMES = ("diffusion_pytorch_model.", "model.", "diffusion_pytorch_model-", "model-")  # of diffusers, transformers


def _main(folder: Path, variant: str | None) -> Path:
    """Return the file with the weights in a diffusers or transformers sub-folder. Raises ConfigError without one."""
    for mark in [f".{variant}", ""] if variant else ["", ".fp16"]:
        for pattern in (f"*.safetensors.index{mark}.json", f"*{mark}.safetensors.index.json", f"*{mark}.safetensors"):
            matches = [p for p in folder.glob(pattern) if mark or not re.search(r"\.fp16|non_ema", p.name)]
            if matches:
                return min(matches, key=lambda path: (not path.name.startswith(USUAL_NAMES), path.name))
    for name in ("diffusion_pytorch_model.bin", "pytorch_model.bin"):
        if (folder / name).is_file():
            return folder / name
    raise ConfigError("{folder}: no .safetensors weights in this folder", folder=folder)


def assign(model: Any, tensors: JsonMapping) -> Any:
    """Assign tensors to a model on the meta device, without a copy. All must be present; others are ignored."""
    expected = model.state_dict()
    require(expected, tensors)
    model.load_state_dict({name: tensors[name] for name in expected}, strict=True, assign=True)
    return model.eval().requires_grad_(False)


def cast_floating(tensor: Any, dtype: Any) -> Any:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
