"""Parameters and blocks of a model, counted in the headers of its files.

Building the networks instead would load diffusers and transformers, which takes seconds.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from library import families
from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.families.base import BlockCost, Family
from library.families.capabilities import HasModulation

if TYPE_CHECKING:
    from torch import nn

Shapes = Mapping[str, tuple[int, ...]]
CONVOLUTION = BlockCost("", activations=6, used=1)


@dataclass(frozen=True, slots=True)
class BlockStats:
    """A repeated block of the denoiser, or a convolution between blocks."""

    kind: str  # its class
    parameters: int
    width: int  # numbers per token in its stream
    downsampling: int  # its feature maps are so many times smaller than the latents, per side
    modulation: int  # parameters of its modulation layers
    fan_in_plus_out: int  # rows and columns of all its matrices: the parameters of adapters of rank 1
    cost: BlockCost

    @property
    def is_convolution(self) -> bool:
        return self.cost is CONVOLUTION


@dataclass(frozen=True, slots=True)
class ModelStats:
    """A whole model. `counted`: the numbers come from its own files, not from the published model."""

    blocks: tuple[BlockStats, ...]
    outside: int  # parameters of the denoiser that are in no block
    encoders: int  # parameters of all text encoders
    vae: int
    counted: bool
    swap_plan: Callable[[int], Mapping[str, int]]  # blocks_to_swap -> blocks of each class
    utilization: Mapping[bool, float]  # of steps, eager (False) and compiled (True): share of the GPU's data sheet rate

    @property
    def denoiser(self) -> int:
        return self.outside + sum(block.parameters for block in self.blocks)


def model_stats(config: RunConfig) -> ModelStats:
    """Return the statistics of a config's model from the headers of its files; parts that are not on this machine count
    as in the published model."""
    family, shapes = families.family_for(config), {}
    with contextlib.suppress(ConfigError, OSError, ValueError, KeyError, IndexError):
        shapes = family.stored_shapes()
    if "denoiser" not in shapes:
        return published(config)
    tensors = count_tensors(family, shapes, counted=True)
    encoders = families.random_module(family.name).make_networks().encoders
    if missing := {"vae", *encoders} - set(shapes):
        published_stats = published(config)
        vae = published_stats.vae if "vae" in missing else tensors.vae
        return replace(tensors, vae=vae, encoders=published_stats.encoders if missing - {"vae"} else tensors.encoders)
    return tensors


def published(config: RunConfig) -> ModelStats:
    """Return the statistics of a config's published model, counted in networks without memory. Takes seconds."""
    family = families.family_for(config)
    networks = _without_memory(family.name, families.sizes_of_model(family.name, config, full=True))
    families.adopt_denoiser(family, networks["denoiser"])
    shapes = {part: {n: tuple(p.shape) for n, p in net.named_parameters()} for part, net in networks.items()}
    return count_tensors(family, shapes, counted=False)


@lru_cache(maxsize=8)
def _without_memory(family: str, sizes: Hashable) -> Mapping[str, "nn.Module"]:
    networks = families.random_module(family).make_networks(sizes)
    return {
        "denoiser": networks.denoiser(),
        "vae": networks.vae(),
        **{name: make() for name, make in networks.encoders.items()},
    }


def count_tensors(family: Family, shapes: Mapping[str, Shapes], counted: bool) -> ModelStats:
    """Count the tensors of a family's networks, given by part ("denoiser", "vae", encoders) and name."""
    kinds = {cost.container: (kind, cost) for kind, cost in family.block_costs.items()}
    inside: dict[str, tuple[str, BlockCost, dict[str, tuple[int, ...]]]] = {}  # by path of a block
    blocks = []
    for name, shape in shapes["denoiser"].items():
        words = name.split(".")
        lists = {".".join(words[:i]): number for i, number in enumerate(words) if number.isdigit()}
        container = max(
            (candidate for candidate in kinds if any(f".{path}".endswith(f".{candidate}") for path in lists)),
            key=len,
            default="",
        )
        if container:
            path = next(path for path in lists if f".{path}".endswith(f".{container}"))
            inside.setdefault(f"{path}.{lists[path]}", (*kinds[container], {}))[2][name] = shape
        elif len(shape) == 4 and shape[-1] == 3:  # a 3x3 convolution between blocks
            scale = _downsampling(family, name)
            blocks.append(BlockStats("Conv2d", math.prod(shape), shape[0], scale, 0, 0, CONVOLUTION))
    for path, (kind, cost, tensors) in inside.items():
        sides = [side for shape in tensors.values() if len(shape) == 2 for side in shape]
        ((width, _),) = Counter(sides).most_common(1)  # most matrices of a block read or write its stream
        scale, modulation = _downsampling(family, path), _count_modulation(family, kind, tensors)
        blocks.append(BlockStats(kind, _count_numbers(tensors), width, scale, modulation, sum(sides), cost))
    return ModelStats(
        tuple(blocks),
        _count_numbers(shapes["denoiser"]) - sum(block.parameters for block in blocks),
        sum(_count_numbers(tensors) for part, tensors in shapes.items() if part not in ("denoiser", "vae")),
        _count_numbers(shapes.get("vae", {})),
        counted,
        family.swap_plan,
        family.utilization,
    )


def _count_modulation(family: Family, kind: str, tensors: Shapes) -> int:
    plan = family.modulation.get(kind) if isinstance(family, HasModulation) else None
    ends = tuple(f".{layer}.weight" for layer in plan.layers) if plan else ()
    return sum(math.prod(shape) for name, shape in tensors.items() if name.endswith(ends))


def _downsampling(family: Family, path: str) -> int:
    level = family.resolution_level(path) if path.count(".") > 1 else 0
    return int(family.patch_size * 2**level)


def _count_numbers(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))
