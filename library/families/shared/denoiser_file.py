"""Load a transformer from a file of any layout: map its tensors, or equal row slices of them, to the network."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from library.config.json_types import JsonMapping
from library.config.problems import ConfigError, Problem
from library.families.base import WeightPlacement
from library.families.facts import Shapes
from library.families.shared import empty_weights, tensor_names, transfer, weights
from library.families.shared.expected_tensors import require
from library.families.shared.part_files import complete
from library.families.shared.weights import FileRange, Source, Weights
from library.families.stored_weights import ScaledWeight

logger = logging.getLogger(__name__)

Rows = tuple[str, int, int]  # tensor of a file, index of a row slice, number of equal slices
Names = Mapping[str, Rows]  # by the network's own keys
Extra = Mapping[str, tuple[tuple[int, ...], Source]]  # shape and tensor from another file, by the network's own keys
NO_EXTRAS: Extra = MappingProxyType({})


@dataclass(frozen=True)
class DenoiserFile:
    """A family's definition of its transformer's files."""

    what: str  # the description by `recognise`
    title: str  # of the model
    build: Callable[[Shapes], nn.Module]  # shapes by the network's own keys; KeyError names the first that is missing
    in_blocks: Callable[[str], bool]  # whether a tensor may stay in 8 bits
    names: Callable[[Mapping[str, str]], Names] = lambda plain: {name: (name, 0, 1) for name in plain}
    # The network's own key and a shape in a file -> its shape in the network, with as many elements.
    view: Callable[[str, tuple[int, ...]], tuple[int, ...]] = lambda name, shape: shape

    def rows(self, keys: Mapping[str, object]) -> Names:
        """Return where a file with these keys has each tensor of the network."""
        plain = tensor_names.without_prefix(keys)
        return {
            network_name: (plain[name], piece, pieces)
            for network_name, (name, piece, pieces) in self.names(plain).items()
        }

    def shapes(self, stored: Shapes) -> dict[str, tuple[int, ...]]:
        """Convert shapes by the keys of a file to shapes by the network's own keys."""
        network_shapes = {}
        for network_name, (name, _, pieces) in self.rows(stored).items():
            shape = tuple(stored[name])
            network_shapes[network_name] = self.view(network_name, (shape[0] // pieces, *shape[1:]) if shape else ())
        return network_shapes

    def plain_shapes(self, entries: Mapping[str, JsonMapping]) -> dict[str, tuple[int, ...]]:
        return self.shapes(weights.shapes_of(entries))

    def open(
        self, path: Path, dtype: torch.dtype, keep_8_bits: bool, mmap: bool = True, beside: Extra = NO_EXTRAS
    ) -> tuple[nn.Module, Callable[[WeightPlacement | None], object]]:
        """Return the network without its weights, and the function that reads them in `dtype`. Tensors in `beside`
        replace those of the file.

        With `keep_8_bits` the blocks' matrices that have 8 bits in the file stay so; all others are cast.
        Raises ConfigError if tensors are missing or have a wrong shape.
        """
        file = weights.open_weights(path, mmap)
        names = self.rows(file.shapes())
        shapes = self.shapes(file.shapes()) | {name: shape for name, (shape, _) in beside.items()}
        with complete(path, self.what):
            with empty_weights.empty_weights():
                model = self.build(shapes)
            expected = model.state_dict()
            require(expected, shapes)
            transfer.expect(model, {name: shapes[name] for name in expected})
        sources = {
            name: beside[name][1] if name in beside else viewed(row_slice(file, *names[name]), shapes[name])
            for name in expected
        }
        if unread := len(names.keys() - expected):
            logger.warning("%s: %d tensors are not part of %s and were skipped", path, unread, self.title)
        kind = transfer.widened(dtype, self.in_blocks if keep_8_bits else None)
        return model, functools.partial(transfer.fill_weights, model, sources, kind)


def find_denoiser_problems(
    path: Path, option: str, opening: Callable[[Path, torch.dtype, bool], object]
) -> Iterator[Problem]:
    """Yield problems of a transformer's header: tensors that are missing or have a wrong shape."""
    try:
        # Time and size are part of the cache's key, so that a replaced file is checked again.
        _try_opening(
            opening, path, tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in weights.files(path))
        )
    except ConfigError as e:
        yield from (Problem(option, ": {problem}", problem=problem) for problem in e.problems)


@functools.lru_cache(maxsize=64)  # forms, and the stages of a start, check the same files repeatedly
def _try_opening(opening: Callable[[Path, torch.dtype, bool], object], path: Path, _versions: object) -> None:
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # skipped tensors are logged when the file is read
    try:
        with weights.shapes_only():
            opening(path, torch.float32, False)
    finally:
        logging.disable(level)


def row_slice(file: Weights, name: str, piece: int, pieces: int) -> Source:
    """Return one of the equal row slices of a tensor in a file. Rows are contiguous, so it is a byte range as well."""
    whole = file.source(name)
    if pieces == 1:
        return whole

    def read() -> Tensor:
        return whole.read().chunk(pieces)[piece].clone()  # a view would keep the other slices in memory

    def read_scaled() -> ScaledWeight | None:
        weight = whole.scaled() if whole.scaled else None
        return weight.row_slice(piece, pieces) if weight else None

    if whole.range is None:
        return Source(None, read, read_scaled if whole.scaled else None)
    file_range, (rows, *columns) = whole.range, whole.range.shape
    length = file_range.length // pieces
    shape = (rows // pieces, *columns)
    return Source(FileRange(file_range.path, file_range.offset + piece * length, length, file_range.dtype, shape), read)


def viewed(source: Source, shape: tuple[int, ...]) -> Source:
    """Return a tensor of a file in another shape with as many elements, which has the same bytes."""
    if source.range is None:
        return Source(None, lambda: source.read().view(shape), source.scaled)
    if source.range.shape == shape:
        return source
    return Source(replace(source.range, shape=shape), lambda: source.read().view(shape))
