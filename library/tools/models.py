"""Checkpoints as the tools see them: which tensor a LoRA's module changes, and tensors one at a time."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from library.config.schema import ConfigError
from library.families import recognition
from library.families.flux import checkpoint as flux_source
from library.families.flux import keys as flux
from library.families.sdxl import keys as sdxl
from library.families.shared import weights
from library.families.shared.weights import renamed
from library.tools import storage
from library.tools.names import Module
from library.tools.storage import Planned

STACKED = {"q_proj": 0, "k_proj": 1, "v_proj": 2}  # in CLIP-G's in_proj_weight
LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2")
TRANSFORMER = re.compile(r"(input_blocks\.\d+|middle_block|output_blocks\.\d+)\.1\.(proj_|transformer_blocks\.)")
BLOCKS = ("input_blocks.", "middle_block.", "output_blocks.")


@dataclass(frozen=True)
class WeightSlice:
    """Where a module's weight is: a tensor, or one of `parts` equal row blocks of it."""

    key: str
    part: int = 0
    parts: int = 1

    def of(self, tensor: Tensor) -> Tensor:
        """The module's own rows of the tensor."""
        return tensor.chunk(self.parts)[self.part] if self.parts > 1 else tensor


class ModelFile:
    """An SDXL single file, or a FLUX.1 transformer (single file, fp8 as well, or diffusers' layout)."""

    def __init__(self, path: str | Path) -> None:
        """Reads headers only. Raises ConfigError when the file is something else."""
        self.path, self.entries = Path(path), storage.entries(path)
        shapes = {name.replace(weights.COMPILED, ""): tuple(e["shape"]) for name, e in self.entries.items()}
        self.codes = {name.replace(weights.COMPILED, ""): e["dtype"] for name, e in self.entries.items()}
        self.family = self._family(shapes)
        self.made_of: dict[str, tuple[str, ...]] = {name: (name,) for name in shapes}
        self.prefix = ""
        if problem := flux_source.stored_oddly(self.path, self.entries):
            raise ConfigError(problem)
        if self.family == "flux":
            self.made_of, self.prefix = _flux_names(self.path, shapes)
        self.shapes = {
            name: (sum(shapes[part][0] for part in parts), *shapes[parts[0]][1:])
            if len(parts) > 1
            else shapes[parts[0]]
            for name, parts in self.made_of.items()
        }

    def _family(self, shapes: dict[str, tuple[int, ...]]) -> str:
        found = recognition.describe(shapes)
        if found.startswith("a FLUX.1 transformer"):
            return "flux"
        if found in ("an SDXL checkpoint", "an SDXL U-Net without text encoders"):
            return "sdxl"
        raise ConfigError(f"{self.path} is {found}: give an SDXL single file, or a FLUX.1 transformer")

    @functools.cached_property
    def _file(self) -> weights.Weights:
        return storage.opened(self.path)

    def tensor(self, key: str) -> Tensor:
        """A tensor as stored, by its name in the single file's layout."""
        rows = [self._file[name] for name in self.made_of[key]]
        converted = self.made_of[key] != (key,) and flux.is_diffusers(self.entries)
        return flux.joined(key, rows) if converted else rows[0]

    def dtype(self, key: str) -> torch.dtype:
        """The type a tensor is stored in. ConfigError for one that is not known."""
        code = self.codes[self.made_of[key][0]]
        if code not in storage.CODES:
            raise ConfigError(f"{self.path} holds numbers of the type {code}, which is not handled")
        return storage.CODES[code]

    def planned(self, key: str, dtype: torch.dtype | None) -> Planned:
        """A tensor of a file to be written, unchanged but for its type; integers keep theirs."""
        own = self.dtype(key)
        return Planned(dtype if dtype and own.is_floating_point else own, self.shapes[key], lambda: self.tensor(key))

    def place(self, module: Module) -> WeightSlice | None:
        """Where a module is, or None when this file has none such."""
        place = self._place(module)
        return place if place and place.key in self.shapes else None

    def _place(self, module: Module) -> WeightSlice | None:
        if self.family == "flux":
            return WeightSlice(f"{self.prefix}{module.path}.weight") if module.part == "denoiser" else None
        if module.part not in ("denoiser", "clip_l", "clip_g"):
            return None
        prefix, path = sdxl.PREFIXES[module.part], module.path
        if module.part == "clip_g":
            layer, _, last = path.rpartition(".self_attn.")
            if layer and last in STACKED:
                layer = layer.replace("text_model.encoder.layers.", "transformer.resblocks.")
                return WeightSlice(f"{prefix}{layer}.attn.in_proj_weight", STACKED[last], 3)
            path = renamed(path, self._clip_g)
        return WeightSlice(f"{prefix}{path}.weight")

    @functools.cached_property
    def _clip_g(self) -> dict[str, str]:
        return sdxl.clip_g_table(self._layers("clip_g", "transformer.resblocks."))

    def _layers(self, part: str, where: str) -> int:
        start = sdxl.PREFIXES[part] + where
        return len({name.removeprefix(start).split(".")[0] for name in self.shapes if name.startswith(start)})

    def size(self, module: Module) -> tuple[int, ...] | None:
        """The shape of a module's weight, or None when this file has none such."""
        place = self.place(module)
        if place is None:
            return None
        rows, *rest = self.shapes[place.key]
        return rows // place.parts, *rest

    def modules(self, convolutions: bool) -> Iterator[Module]:
        """What sd-scripts' LoRA adapts: attention and MLP, and with `convolutions` SDXL's residual blocks as well."""
        start = self.prefix if self.family == "flux" else sdxl.PREFIXES["denoiser"]
        for name, shape in self.shapes.items():
            path = name.removeprefix(start).removesuffix(".weight")
            if len(shape) < 2 or not name.startswith(start) or not name.endswith(".weight"):
                continue
            if self.family == "flux":
                inside = path.startswith(("double_blocks.", "single_blocks."))
            else:
                extra = convolutions and path.startswith(BLOCKS) and path != "input_blocks.0.0"
                inside = bool(TRANSFORMER.match(path)) or extra
            if inside:
                yield Module("denoiser", path)
        if self.family == "sdxl":
            for part, where in (("clip_l", "text_model.encoder.layers."), ("clip_g", "transformer.resblocks.")):
                for i in range(self._layers(part, where)):
                    yield from (Module(part, f"text_model.encoder.layers.{i}.{layer}") for layer in LAYERS)


def _flux_names(path: Path, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, tuple[str, ...]], str]:
    """{name in the single file's layout: what it is made of}, and the prefix of the transformer's names."""
    if not flux.is_diffusers(shapes):
        prefix = flux.PREFIX if any(name.startswith(flux.PREFIX) for name in shapes) else ""
        return {name: (name,) for name in shapes}, prefix
    try:
        return flux.sources(shapes), ""
    except KeyError as e:
        raise ConfigError(f"{path} is not a complete FLUX.1 transformer, {e.args[0]} is missing") from e


def delta_shape(shape: tuple[int, ...], change: Tensor) -> bool:
    """Whether a change [out, in * k * k] fits a weight of this shape."""
    return tuple(change.shape) == (shape[0], torch.Size(shape[1:]).numel())
