"""Load a transformer with double-stream and single-stream blocks from a file of either layout."""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from library.families.base import WeightPlacement
from library.families.facts import Shapes
from library.families.shared import empty_weights, tensor_names, transfer, weights
from library.families.shared.double_stream_keys import join_tensors
from library.families.shared.expected_tensors import require
from library.families.shared.part_files import Entries, complete
from library.families.shared.weights import Source

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DoubleStreamFile:
    """A family's definition of its transformer's files."""

    what: Callable[[Shapes], str]  # the description of a file with these shapes
    is_diffusers: Callable[[Iterable[str]], bool]  # whether plain keys are those of diffusers, and not BFL's
    sources: Callable[[Iterable[str]], Mapping[str, tuple[str, ...]]]  # diffusers keys -> {BFL key: its diffusers keys}
    build: Callable[[Shapes], Any]  # shapes by BFL key; KeyError names the first that is missing

    def bfl_shapes(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """Return shapes by BFL key, from plain keys of either layout. Raises KeyError naming a missing tensor."""
        if not self.is_diffusers(shapes):
            return {name: tuple(shape) for name, shape in shapes.items()}
        return {
            name: (sum(shapes[part][0] for part in made_of), *shapes[made_of[0]][1:])
            for name, made_of in self.sources(shapes).items()
        }

    def plain_shapes(self, entries: Entries) -> dict[str, tuple[int, ...]]:
        """Return shapes by BFL key, from the entries of a file. Raises KeyError naming a missing tensor."""
        names = tensor_names.without_prefix(entries)
        return self.bfl_shapes({plain: tuple(entries[name]["shape"]) for plain, name in names.items()})

    def open(
        self, path: Path, dtype: torch.dtype, keep_8_bits: bool, mmap: bool = True
    ) -> tuple[Any, Callable[[WeightPlacement | None], nn.Module]]:
        """Return the network without its weights, and the function that reads them in `dtype`.

        With `keep_8_bits` the blocks' matrices that have 8 bits in the file stay so; all others are cast. Raises
        ConfigError if tensors are missing or have a wrong shape.
        """
        file = weights.open_weights(path, mmap)
        names, stored = tensor_names.without_prefix(file), file.shapes()
        with complete(path, self.what(stored)):
            converts = self.is_diffusers(names)
            made_of = self.sources(names) if converts else {name: (name,) for name in names}
            shapes = self.bfl_shapes({plain: stored[name] for plain, name in names.items()})
            with empty_weights.empty_weights():
                model = self.build(shapes)
            require(model.state_dict(), shapes)
            transfer.expect(model, {name: shapes[name] for name in model.state_dict()})
            sources = {}
            for name in model.state_dict():
                rows = [names[part] for part in made_of[name]]
                read = functools.partial(lambda name, rows: join_tensors(name, [file[row] for row in rows]), name, rows)
                sources[name] = Source(None, read) if converts else file.source(rows[0])
        if unread := len(made_of) - len(sources):
            logger.warning("%s: %d tensors are not part of the transformer and were skipped", path, unread)
        kind = transfer.widened(dtype, (lambda name: "blocks." in name) if keep_8_bits else None)
        return model, functools.partial(transfer.fill_weights, model, sources, kind)
