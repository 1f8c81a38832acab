"""Load weights from a file straight to a GPU: several threads read into pinned memory, the GPU copies and casts.

The file is neither memory-mapped nor read into pageable memory, and dtypes are converted on the GPU only. Reads in
flight are limited to the buffers, so that neither host nor GPU holds a second copy of the model.
"""

import collections
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from library.config.problems import ConfigError
from library.families.base import WeightPlacement
from library.families.shared.weights import FileRange, Source
from library.families.stored_weights import ScaledWeight, wait_as_stored

logger = logging.getLogger(__name__)

READ_BYTES = 2**24  # bytes of one read
READER_THREADS = 8
MAX_GAP = 2**16  # bytes between two tensors that are read together with them
Kind = Callable[[str, torch.dtype, tuple[int, ...]], torch.dtype]  # name, stored dtype, shape -> dtype in the model


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of bytes of one file with parts of tensors in it."""

    path: Path
    offset: int
    length: int
    # Name of a tensor, where its part begins in the piece and in the tensor, and the length of that part.
    parts: tuple[tuple[str, int, int, int], ...]


def widened(dtype: torch.dtype, keeps: Callable[[str], bool] | None = None) -> Kind:
    """Return a Kind: `dtype` for floating point tensors, except float8_e4m3fn matrices whose names `keeps` accepts."""

    def kind(name: str, stored: torch.dtype, shape: tuple[int, ...]) -> torch.dtype:
        is_kept = keeps and stored == torch.float8_e4m3fn and len(shape) >= 2 and keeps(name)
        return stored if is_kept or not stored.is_floating_point else dtype

    return kind


def expect(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    model.load_state_dict({name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, strict=True)


def fill_weights(
    model: nn.Module, sources: Mapping[str, Source], kind: Kind, placement: WeightPlacement | None
) -> nn.Module:
    """Load the weights of a model on the meta device, each in the dtype of `kind`; all must be present.

    Without a placement they stay on the host, and those that keep their dtype are memory-mapped. With one they are
    moved to its device, except those that it names. Matrices in 8 bits that `kind` keeps stay as they are stored, and
    their scales wait at their layers.
    """
    scaled = _read_scaled(model, sources, kind)
    tensors: dict[str, Tensor] = {name: _placed(name, weight.values, placement) for name, weight in scaled.items()}
    others = {name: source for name, source in sources.items() if name not in scaled}
    if placement:
        tensors |= _read_through_device(others, kind, placement)
    for name, source in others.items():
        if name not in tensors:
            tensor = source.read()
            tensors[name] = tensor.to(kind(name, tensor.dtype, tuple(tensor.shape)))
    model.requires_grad_(False)  # which integers cannot have
    model.load_state_dict(tensors, strict=True, assign=True)
    for name, weight in scaled.items():
        wait_as_stored(model, name, replace(weight, values=tensors[name]))
    return model.eval()


def _read_scaled(model: nn.Module, sources: Mapping[str, Source], kind: Kind) -> dict[str, ScaledWeight]:
    """Return the matrices of linear layers that stay as their file stores them, 8 bits with scales."""
    kept = {}
    for name, source in sources.items():
        if source.scaled and type(model.get_submodule(name.rpartition(".")[0])) is nn.Linear:
            shape = tuple(model.get_parameter(name).shape)
            keeps = kind(name, torch.float8_e4m3fn, shape) == torch.float8_e4m3fn
            if keeps and (weight := source.scaled()):
                kept[name] = weight
    return kept


def _placed(name: str, tensor: Tensor, placement: WeightPlacement | None) -> Tensor:
    return tensor.to(placement.device) if placement and name not in placement.host else tensor


def _read_through_device(sources: Mapping[str, Source], kind: Kind, placement: WeightPlacement) -> dict[str, Tensor]:
    """Read tensors through the device: those that stay there, and those that are only cast there."""
    tensors: dict[str, Tensor] = {}
    began, size = time.perf_counter(), 0

    def arrived(name: str, tensor: Tensor) -> None:
        tensor = tensor.to(kind(name, tensor.dtype, tuple(tensor.shape)))
        if name in placement.eight_bits:
            tensor = tensor.to(torch.float8_e4m3fn)
        tensors[name] = tensor.to("cpu") if name in placement.host else tensor

    ranges: dict[str, FileRange] = {}
    for name, source in sources.items():
        place = source.range
        if place and name in placement.host and name not in placement.eight_bits:
            stored = getattr(torch, place.dtype)
            if kind(name, stored, place.shape) == stored:
                continue  # it keeps its dtype and device
        if place:
            ranges[name] = place
            size += place.length
        elif name not in placement.host:
            arrived(name, source.read().to(placement.device))
    read_ranges(ranges, placement.device, arrived)
    logger.info("read %.2f GB straight to %s in %.1f s", size / 1e9, placement.device, time.perf_counter() - began)
    return tensors


def read_ranges(
    ranges: Mapping[str, FileRange],
    device: torch.device,
    arrived: Callable[[str, Tensor], object],
    piece: int = READ_BYTES,
) -> None:
    """Read tensors in the order of their files; `arrived` is called with each when its last copy has been issued.

    Raises ConfigError for a truncated file.
    """
    tensors: dict[str, Tensor] = {}
    missing = {name: place.length for name, place in ranges.items()}
    buffers, under_way = _Buffers(piece, device), collections.deque[tuple[_Piece, Tensor, Future[None]]]()

    def send_oldest() -> None:
        oldest, buffer, reading = under_way.popleft()
        reading.result()
        for name, in_piece, in_tensor, length in oldest.parts:
            if name not in tensors:
                place = ranges[name]
                tensors[name] = torch.empty(place.shape, dtype=getattr(torch, place.dtype), device=device)
            memory = tensors[name].view(-1).view(torch.uint8)
            memory[in_tensor : in_tensor + length].copy_(buffer[in_piece : in_piece + length], non_blocking=True)
            missing[name] -= length
            if not missing[name]:
                arrived(name, tensors.pop(name))
        buffers.give_back(buffer)

    with ThreadPoolExecutor(READER_THREADS, thread_name_prefix="weights") as readers:
        for range_piece in _range_pieces(ranges, piece):
            # Bound the reads in flight, and so the number of buffers.
            if len(under_way) == 2 * READER_THREADS:
                send_oldest()
            buffer = buffers.take()
            under_way.append((range_piece, buffer, readers.submit(_read_piece, range_piece, buffer)))
        while under_way:
            send_oldest()
    for name, place in ranges.items():
        # Empty tensors have no bytes, so no piece contains them.
        if not place.length:
            arrived(name, torch.empty(place.shape, dtype=getattr(torch, place.dtype), device=device))


class _Buffers:
    """Buffers for reads, pinned for copies to a GPU; reused when their copies have finished."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._pinned = size, device.type == "cuda"
        self._free = collections.deque[tuple[Tensor, torch.cuda.Event | None]]()

    def take(self) -> Tensor:
        if not self._free:
            return torch.empty(self._size, dtype=torch.uint8, pin_memory=self._pinned)
        # The GPU may still read from the oldest buffer.
        buffer, copied = self._free.popleft()
        if copied:
            copied.synchronize()
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        copied = torch.cuda.Event() if self._pinned else None
        if copied:
            copied.record()
        self._free.append((buffer, copied))


def _range_pieces(ranges: Mapping[str, FileRange], size: int) -> Iterator[_Piece]:
    """Yield the ranges in the order of their files: close ones together in one piece, large ones in several."""
    path, begin, end, parts = Path(), 0, 0, list[tuple[str, int, int, int]]()
    for name, place in sorted(ranges.items(), key=lambda item: (str(item[1].path), item[1].offset)):
        tensor_offset = 0
        while tensor_offset < place.length:
            file_offset = place.offset + tensor_offset
            if parts and (place.path != path or file_offset - end > MAX_GAP or file_offset - begin >= size):
                yield _Piece(path, begin, end - begin, tuple(parts))
                parts = []
            if not parts:
                path, begin = place.path, file_offset
            length = min(place.length - tensor_offset, begin + size - file_offset)
            parts.append((name, file_offset - begin, tensor_offset, length))
            tensor_offset, end = tensor_offset + length, file_offset + length
    if parts:
        yield _Piece(path, begin, end - begin, tuple(parts))


def _read_piece(piece: _Piece, buffer: Tensor) -> None:
    memory, num_read = buffer.numpy().data[: piece.length], 0
    # Unbuffered, so that bytes go directly into the pinned buffer.
    with piece.path.open("rb", buffering=0) as file:
        file.seek(piece.offset)
        while num_read < piece.length:
            if not (count := file.readinto(memory[num_read:])):
                raise ConfigError("{path} became shorter while it was read: download it again", path=piece.path)
            num_read += count
