"""Which modules of a denoiser are compiled, what each of them gets, and how many graphs that takes."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.families.base import BlockInputs, Family

# Of batches: images, unless all have as many; height and width of their latents, then those of reference images.
Sizes = Collection[tuple[int, ...]]


def compiles_size_by_size(config: RunConfig, device: torch.device) -> bool:
    """Whether the whole denoiser is one graph that cannot serve all sizes of image, so that each needs its own.

    Inductor for CUDA (torch 2.11) ends with errors of its own where sizes vary in a whole model; in blocks they may.
    """
    return device.type == "cuda" and config.compile.compile_scope == "model" and config.compile.dynamic is None


def blocks_by_class(denoiser: nn.Module, block_classes: tuple[str, ...]) -> list[list[nn.Module]]:
    """The denoiser's blocks, one list for each class in `block_classes`, in the order of the module tree."""
    return [[m for m in denoiser.modules() if type(m).__name__ == region] for region in block_classes]


def graphs_per_block(denoiser: nn.Module, family: Family, config: RunConfig, device: torch.device, sizes: Sizes) -> int:
    """How many graphs one block needs at most for batches of these sizes. The denoiser may be without memory."""
    blocks = blocks_by_class(denoiser, family.block_classes)
    _, _, inputs = compile_targets(denoiser, blocks, family, config, device, sizes)
    return max((given.sizes for given in inputs.values()), default=0)


def compile_targets(  # noqa: PLR0913 - all that decides about it
    denoiser: nn.Module,
    blocks: list[list[nn.Module]],
    family: Family,
    config: RunConfig,
    device: torch.device,
    sizes: Sizes,
) -> tuple[list[list[nn.Module]], dict[nn.Module, str], dict[nn.Module, BlockInputs]]:
    """The modules to compile, the backends of those that have one of their own, and what each of them gets."""
    options, static = config.compile, is_static(config, device, sizes)
    if options.compile_scope == "model":
        number = max(_graphs(given, options.dynamic, sizes, static) for given in family.block_inputs.values())
        return [[denoiser]], {}, {denoiser: BlockInputs((), (), number)}
    blocks, backends = _blocks_to_compile(blocks, family.block_classes, options)
    return blocks, backends, _inputs(denoiser, blocks, family, options.dynamic, sizes, static)


def is_static(config: RunConfig, device: torch.device, sizes: Sizes) -> bool:
    """Whether each size of image gets graphs of its own: static sizes give the faster kernels."""
    dynamic, one_size = config.compile.dynamic, len({_sides(size) for size in sizes}) == 1
    return dynamic is False or (dynamic is None and one_size) or compiles_size_by_size(config, device)


def _inputs(  # noqa: PLR0913 - all that decides about the sizes
    denoiser: nn.Module, blocks: list[list[nn.Module]], family: Family, dynamic: bool | None, sizes: Sizes, static: bool
) -> dict[nn.Module, BlockInputs]:
    """What each block gets. Where sizes are compiled one by one, equally wide blocks of two levels see others."""
    paths, found = {module: path for path, module in denoiser.named_modules()}, {}
    for block in (block for group in blocks for block in group):
        given = family.block_inputs.get(type(block).__name__)
        if given and static:
            level = family.resolution_level(paths[block])
            halved = {(*_number(size), *(-(-side // 2**level) for side in _sides(size))) for size in sizes}
            found[block] = replace(given, dynamic=(), level=level, sizes=_graphs(given, dynamic, halved, static))
        elif given:
            found[block] = replace(given, sizes=_graphs(given, dynamic, sizes, static))
    return found


def _graphs(given: BlockInputs, dynamic: bool | None, sizes: Sizes, static: bool) -> int:
    """How many graphs a block needs: one for each number of images, times the sizes where these are fixed as well.

    A size is a height and a width, or their product, where the image is a row of tokens. With dynamic = True even the
    number of images may vary, but for a single one, which is always a case of its own to PyTorch.
    """
    if static:
        in_rows = sum(position == given.streams[0] for position, _ in given.dynamic) == 1
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
    """The blocks that `compile_blocks` names, and the backends of those that have one of their own.

    The others run eagerly. ConfigError where the model has fewer.
    """
    if not options.compile_blocks:
        return blocks, {}
    if wrong := [*options.beyond({cls: len(group) for cls, group in zip(block_classes, blocks, strict=True)})]:
        raise ConfigError(*wrong)
    ranges, chosen, backends = options.ranges(), [], {}
    for cls, group in zip(block_classes, blocks, strict=True):
        wanted = ranges.get(cls, ())
        numbers = range(len(group)) if wanted is None else {n for first, last in wanted for n in range(first, last + 1)}
        chosen.append([group[n] for n in sorted(numbers)])
        backends |= {group[n]: options.backend_of(cls, n) for n in numbers}
    return chosen, backends
