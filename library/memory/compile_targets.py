"""Choose the modules of a denoiser to compile, describe the inputs of each, and count the graphs that this takes."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from library.compiler.subclass import COMPILED, class_inside
from library.config.problems import raise_if_any
from library.config.run_config import RunConfig
from library.families.base import BlockInputs, Family
from library.families.capabilities import HasImageTransformers
from library.memory.channels_last import TokenNorm

# A batch's number of images (left out if equal in all batches), height and width of its latents, then those of
# reference images. The length is odd if it includes the number.
Sizes = Collection[tuple[int, ...]]


def compiles_size_by_size(config: RunConfig, device: torch.device) -> bool:
    """Return whether the whole denoiser is one graph that cannot serve all image sizes, so that each needs its own.

    Inductor for CUDA (torch 2.11) fails with internal errors if sizes vary in a whole model; in blocks they may.
    """
    return device.type == "cuda" and config.compile.compile_scope == "model" and config.compile.dynamic is None


def blocks_by_class(denoiser: nn.Module, block_classes: tuple[str, ...]) -> list[list[nn.Module]]:
    return [[m for m in denoiser.modules() if type(m).__name__ == region] for region in block_classes]


def image_transformers(denoiser: nn.Module, family: Family) -> list[nn.Module]:
    """Return the modules that turn images into tokens, with their norms."""
    classes = family.image_transformers if isinstance(family, HasImageTransformers) else ()
    transformers = (module for module in denoiser.modules() if type(module).__name__ in classes)
    return [module for module in transformers if hasattr(module, "norm")]  # a compiling process has only some of them


def graphs_per_block(denoiser: nn.Module, family: Family, config: RunConfig, device: torch.device, sizes: Sizes) -> int:
    """Return the most graphs that a block needs for batches of these sizes. The denoiser may be on the meta device."""
    blocks = blocks_by_class(denoiser, family.block_classes)
    _, _, inputs = compile_targets(denoiser, blocks, family, config, device, sizes)
    return max((block_inputs.sizes for block_inputs in inputs.values()), default=0)


def compile_targets(  # noqa: PLR0913 - everything that the choice depends on
    denoiser: nn.Module,
    blocks: list[list[nn.Module]],
    family: Family,
    config: RunConfig,
    device: torch.device,
    sizes: Sizes,
) -> tuple[list[list[nn.Module]], dict[nn.Module, str], dict[nn.Module, BlockInputs]]:
    """Return the modules to compile, the backends of those with a separate one, and the inputs of each module."""
    options, static = config.compile, is_static(config, device, sizes)
    if options.compile_scope == "model":
        number = max(_graphs(inputs, options.dynamic, sizes, static) for inputs in family.block_inputs.values())
        return [[denoiser]], {}, {denoiser: BlockInputs((), (), number)}
    blocks, backends = _blocks_to_compile(blocks, family.block_classes, options)
    if not options.compile_blocks:
        blocks = [*blocks, _norms_between(denoiser, family)]
    return blocks, backends, _inputs(denoiser, blocks, family, options.dynamic, sizes, static)


def _norms_between(denoiser: nn.Module, family: Family) -> list[nn.Module]:
    """Return the norms before images become tokens, except those that an adapter changes."""
    norms: list[Any] = [module.norm for module in image_transformers(denoiser, family)]
    usual = (nn.GroupNorm, TokenNorm)
    return [norm for norm in norms if class_inside(type(norm), (COMPILED,)) in usual and "forward" not in vars(norm)]


def is_static(config: RunConfig, device: torch.device, sizes: Sizes) -> bool:
    dynamic, one_size = config.compile.dynamic, len({_sides(size) for size in sizes}) == 1
    return dynamic is False or (dynamic is None and one_size) or compiles_size_by_size(config, device)


def _inputs(  # noqa: PLR0913 - everything that the sizes depend on
    denoiser: nn.Module, blocks: list[list[nn.Module]], family: Family, dynamic: bool | None, sizes: Sizes, static: bool
) -> dict[nn.Module, BlockInputs]:
    """Return the inputs of each block. With static sizes, blocks of equal width on two levels of a U-Net differ."""
    paths, inputs_by_block = {module: path for path, module in denoiser.named_modules()}, {}
    for block in (block for group in blocks for block in group):
        block_inputs = family.block_inputs.get(type(block).__name__)
        if block_inputs and static:
            level = family.resolution_level(paths[block])  # sides are halved that often, rounded up
            halved = {(*_number(size), *(-(-side // 2**level) for side in _sides(size))) for size in sizes}
            inputs_by_block[block] = replace(
                block_inputs, dynamic=(), level=level, sizes=_graphs(block_inputs, dynamic, halved, static)
            )
        elif block_inputs:
            inputs_by_block[block] = replace(block_inputs, sizes=_graphs(block_inputs, dynamic, sizes, static))
    return inputs_by_block


def _graphs(block_inputs: BlockInputs, dynamic: bool | None, sizes: Sizes, static: bool) -> int:
    """Return how many graphs a block needs: one for each number of images, times the sizes if these are static as well.

    A size is a height and a width, or their product if the block reads the image as a row of tokens. With dynamic =
    True even the number of images may vary, except for 1, for which PyTorch always compiles a separate graph.
    """
    if static:
        in_rows = sum(position == block_inputs.streams[0] for position, _ in block_inputs.dynamic) == 1
        return len({(_number(size), _area(_sides(size)) if in_rows else _sides(size)) for size in sizes})
    numbers = {_number(size) for size in sizes}
    return len({number == (1,) for number in numbers}) if dynamic else len(numbers)


def _number(size: tuple[int, ...]) -> tuple[int, ...]:
    return size[: len(size) % 2]


def _sides(size: tuple[int, ...]) -> tuple[int, ...]:
    return size[len(size) % 2 :]


def _area(sides: tuple[int, ...]) -> int:
    return sum(height * width for height, width in zip(sides[::2], sides[1::2], strict=True))


def _blocks_to_compile(
    blocks: list[list[nn.Module]], block_classes: tuple[str, ...], options: Any
) -> tuple[list[list[nn.Module]], dict[nn.Module, str]]:
    """Return the blocks that `compile_blocks` names, and the backends of those with a separate one.

    All others run eagerly. Raises ConfigError if the model has fewer blocks.
    """
    if not options.compile_blocks:
        return blocks, {}
    raise_if_any([*options.beyond({cls: len(group) for cls, group in zip(block_classes, blocks, strict=True)})])
    ranges, chosen, backends = options.ranges(), [], {}
    for cls, group in zip(block_classes, blocks, strict=True):
        block_ranges = ranges.get(cls, ())
        if block_ranges is None:  # all blocks of the class
            numbers = range(len(group))
        else:
            numbers = {n for first, last in block_ranges for n in range(first, last + 1)}
        chosen.append([group[n] for n in sorted(numbers)])
        backends |= {group[n]: options.backend_of(cls, n) for n in numbers}
    return chosen, backends
