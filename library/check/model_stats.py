"""What a model is made of, counted in the headers of its files: parameters and blocks. No torch, no weights."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.config.schema import ConfigError
from library.families.shared import weights

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Block:
    """A block of the denoiser, or a convolution between blocks."""

    kind: str  # "double", "single", "transformer", "conv"
    matrices: int  # parameters of its matrices
    width: int  # numbers per token in its stream
    scale: int  # sides of its pictures are so many times smaller than the latents'
    sides: int  # rows and columns of its matrices together, each of which an adapter of rank 1 has a number for


@dataclass(frozen=True, slots=True)
class Anatomy:
    """A whole model. `counted` says whether the numbers are the files' own, or those of the published model."""

    blocks: tuple[Block, ...]
    outside: int  # parameters of the denoiser that are in no block
    encoders: int  # parameters of all text encoders
    vae: int
    counted: bool

    @property
    def denoiser(self) -> int:
        """All its parameters."""
        return self.outside + sum(block.matrices for block in self.blocks)


# Of the published checkpoints, for models that are not on this disk: double, single / transformers by width, convs.
FLUX = Anatomy(
    (*[Block("double", 339_831_296, 3072, 2, 141_312)] * 19, *[Block("single", 141_591_808, 3072, 2, 55_296)] * 38),
    64_124_992, 4_885_000_000, 83_800_000, counted=False,
)  # fmt: skip
SDXL = Anatomy(
    (*[Block("transformer", 10_005_120, 640, 2, 22_016)] * 10,
     *[Block("transformer", 34_755_840, 1280, 4, 39_936)] * 60,
     *[Block("conv", 1_173_993, 320, 1, 0)] * 11, *[Block("conv", 4_608_000, 640, 2, 0)] * 12,
     *[Block("conv", 15_897_600, 1280, 4, 0)] * 16),
    62_243_844, 818_000_000, 83_700_000, counted=False,
)  # fmt: skip


def of(config: Any) -> Anatomy:
    """The anatomy of the model that a config names; that of the published one where its files cannot be read."""
    try:
        return (_flux if config.family == "flux" else _sdxl)(config)
    except (ConfigError, OSError, ValueError, StopIteration, KeyError, IndexError):
        return FLUX if config.family == "flux" else SDXL


def shapes_of(name: str | None) -> dict[str, tuple[int, ...]]:
    """Shapes by tensor name of a checkpoint in one or several files. ConfigError when it is not on this disk."""
    found: dict[str, tuple[int, ...]] = {}
    for file in weights.files(Path(name or "")):
        found |= weights.header(file)
    return found


def _flux(config: Any) -> Anatomy:
    shapes = shapes_of(config.model.pretrained_model_name_or_path)
    width = shapes["img_in.weight"][0]
    blocks = tuple(
        Block(kind, _numbers(inside), width, 2, _sides(inside))
        for kind, mark in (("double", "double_blocks"), ("single", "single_blocks"))
        for inside in _numbered(shapes, rf"^{mark}\.(\d+)\.")
    )
    encoders = sum(_size(getattr(config.model, name), default) for name, default in
                   (("clip_l", 123_000_000), ("t5xxl", 4_762_000_000)))  # fmt: skip
    return Anatomy(blocks, _numbers(shapes) - sum(b.matrices for b in blocks), encoders,
                   _size(config.model.ae, FLUX.vae), counted=True)  # fmt: skip


def _sdxl(config: Any) -> Anatomy:
    shapes = shapes_of(config.model.pretrained_model_name_or_path)
    unet = {n.removeprefix("model.diffusion_model."): s for n, s in shapes.items() if n.startswith("model.diff")}
    blocks = [*_transformers(unet), *_convolutions(unet)]
    outside = _numbers(unet) - sum(block.matrices for block in blocks)
    parts = {part: _numbers({n: s for n, s in shapes.items() if n.startswith(part)})
             for part in ("conditioner.", "first_stage_model.")}  # fmt: skip
    return Anatomy(tuple(blocks), max(outside, 0), parts["conditioner."] or SDXL.encoders,
                   parts["first_stage_model."] or SDXL.vae, counted=True)  # fmt: skip


def _transformers(unet: Shapes) -> Iterator[Block]:
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in unet.items():
        if found := re.match(r"(.+\.transformer_blocks\.\d+)\.", name):
            groups.setdefault(found[1], {})[name] = shape
    for place, inside in groups.items():
        width = inside[f"{place}.attn1.to_q.weight"][0]
        yield Block("transformer", _numbers(inside), width, _scale(place, unet), _sides(inside))


def _convolutions(unet: Shapes) -> Iterator[Block]:
    for name, shape in unet.items():
        if len(shape) == 4 and shape[-1] == 3 and ".transformer_blocks." not in name:
            yield Block("conv", _numbers({name: shape}), shape[0], _scale(name, unet), 0)


def _scale(name: str, unet: Shapes) -> int:
    """How much smaller than the latents the picture is in a block of the U-Net, from the number in its name."""
    downs = sorted(int(m[1]) for n in unet if (m := re.match(r"input_blocks\.(\d+)\.0\.op\.weight", n)))
    if found := re.match(r"input_blocks\.(\d+)\.", name):
        return 2 ** sum(int(found[1]) >= at for at in downs)
    if name.startswith("middle_block"):
        return 2 ** len(downs)
    if found := re.match(r"output_blocks\.(\d+)\.", name):
        levels = len(downs) + 1
        each = (1 + max(int(m[1]) for n in unet if (m := re.match(r"output_blocks\.(\d+)\.", n)))) // levels
        return 2 ** max(levels - 1 - int(found[1]) // max(each, 1), 0)
    return 1


def _numbered(shapes: Shapes, pattern: str) -> list[dict[str, tuple[int, ...]]]:
    groups: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if found := re.match(pattern, name):
            groups.setdefault(int(found[1]), {})[name] = shape
    return [groups[number] for number in sorted(groups)]


def _numbers(shapes: Shapes) -> int:
    total = 0
    for shape in shapes.values():
        count = 1
        for side in shape:
            count *= side
        total += count
    return total


def _sides(shapes: Shapes) -> int:
    return sum(sum(shape) for shape in shapes.values() if len(shape) == 2)


def _size(name: str | None, default: int) -> int:
    try:
        return _numbers(shapes_of(name))
    except (ConfigError, OSError, ValueError):
        return default
