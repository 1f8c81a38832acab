"""Checkpoints for the tools: the tensor that a LoRA module changes, and tensors one at a time."""

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from library import families
from library.adapter_files import storage
from library.adapter_files.names import Module, lora_names_of
from library.adapter_files.storage import Planned
from library.config.problems import ConfigError
from library.families import recognition
from library.families.shared import scaled_weights, tensor_names, weights
from library.families.shared.lora_names import WeightSlice


class ModelFile:
    """A checkpoint or denoiser that a LoRA can be merged into, including fp8, in any layout of its family."""

    def __init__(self, path: str | Path) -> None:
        """Reads headers only. Raises ConfigError for other files."""
        self.path, self.entries = Path(path), storage.stored_entries(path)
        shapes = {name.replace(tensor_names.COMPILE_PREFIX, ""): tuple(e["shape"]) for name, e in self.entries.items()}
        self.codes = {name.replace(tensor_names.COMPILE_PREFIX, ""): e["dtype"] for name, e in self.entries.items()}
        self.family, self.description = self._family(shapes)
        self.names = lora_names_of(self.family)
        if problem := scaled_weights.stored_oddly(self.path, self.entries):
            raise ConfigError(problem)
        self.made_of = self.names.tensors_of(str(self.path), shapes)
        self.shapes = {
            name: (sum(shapes[part][0] for part in parts), *shapes[parts[0]][1:])
            if len(parts) != 1
            else shapes[parts[0]]
            for name, parts in self.made_of.items()
        }

    def _family(self, shapes: dict[str, tuple[int, ...]]) -> tuple[str, str]:
        facts, description = recognition.family_and_description(shapes)
        if facts and description in lora_names_of(facts.name).mergeable:
            return facts.name, description
        expected = ", or ".join(family.base_model for family in families.all_families())
        raise ConfigError("{path} is {found}: give {wanted}", path=self.path, found=description, wanted=expected)

    @functools.cached_property
    def _file(self) -> weights.Weights:
        return storage.open_stored(self.path)

    def tensor(self, key: str) -> Tensor:
        rows = [self._file[name] for name in self.made_of[key]]
        return rows[0] if self.made_of[key] == (key,) else self.names.joined(key, rows)

    def dtype(self, key: str) -> torch.dtype:
        """Return a tensor's stored dtype. Raises ConfigError if it is unknown."""
        code = self.codes[self.made_of[key][0]]
        if code not in storage.CODES:
            raise ConfigError(
                "{path} holds numbers of the type {dtype}, which is not handled", path=self.path, dtype=code
            )
        return storage.CODES[code]

    def planned(self, key: str, dtype: torch.dtype | None) -> Planned:
        """Plan to write a tensor of this file, cast to a dtype; integers keep theirs."""
        stored_dtype = self.dtype(key)
        return Planned(
            dtype if dtype and stored_dtype.is_floating_point else stored_dtype,
            self.shapes[key],
            lambda: self.tensor(key),
        )

    def place(self, module: Module) -> WeightSlice | None:
        place = self.names.slice_of(module.part, module.path, self.shapes)
        return place if place and place.key in self.shapes else None

    def size(self, module: Module) -> tuple[int, ...] | None:
        """Return the shape of a module's weight, or None if this file lacks it."""
        place = self.place(module)
        if place is None:
            return None
        rows, *columns = self.shapes[place.key]
        return rows // place.parts, *columns

    def bias_place(self, module: Module) -> WeightSlice | None:
        """Locate a module's bias; None if it has none."""
        place = self.names.slice_of(module.part, module.path, self.shapes)
        if place is None:
            return None
        key = f"{place.key.removesuffix('weight')}bias"
        return WeightSlice(key, place.part, place.parts) if key in self.shapes else None

    def modules(self, convolutions: bool) -> Iterator[Module]:
        # As sd-scripts' LoRA: attention and MLP, with `convolutions` also residual blocks.
        yield from (Module(part, path) for part, path in self.names.layers(self.shapes, convolutions))


def delta_shape(shape: tuple[int, ...], change: Tensor) -> bool:
    return tuple(change.shape) == (shape[0], torch.Size(shape[1:]).numel())  # the change is [out, in * k * k]
