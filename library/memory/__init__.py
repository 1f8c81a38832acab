"""Making a denoiser fit and fly: storage, checkpointing, compilation and swapping, in the one order that works."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from library.config.schema import ConfigError
from library.families.base import BlockInputs

if TYPE_CHECKING:
    import torch
    from torch import nn

Sizes = Collection[tuple[int, int]]  # heights and widths of latents


def prepare(denoiser: nn.Module, family: Any, config: Any, device: torch.device, sizes: Sizes) -> str:
    """Place the denoiser on its device and apply everything that saves memory or time. The order matters.

    Adapters, dtype and `requires_grad` are final when this is called; parameter names stay as they are. `sizes` are the
    heights and widths of the data set's latents. Returns why the blocks run eagerly although compiling was asked for,
    '' when nothing is wrong.
    """
    import torch

    from library.compile_ledger import LEDGER
    from library.memory import attention, checkpointing, precision, swapping

    attention.switches(config.compile)
    LEDGER.attention = attention.prefer(device, config.memory.attention_kernel)
    denoiser.to(memory_format=torch.channels_last)  # 0. the order that convolutions are fastest in
    blocks = repeated(denoiser, family.regions)
    precision.store(blocks, config, device)  # 1. storage: 8 bits for the frozen matrices of the blocks
    to_swap = swapping.choose(denoiser, _to_swap(family, config))
    swap = swapping.Swap(to_swap, device, _stepped_on(config))  # 2. what waits on the host
    swap.place(denoiser)
    if config.memory.checkpointing:  # 3. recompute in backward, inside what is compiled
        memory = config.memory
        around = config.compile.compile and config.compile.compile_scope == "inner"
        keep, own = memory.checkpoint_keep_attention, getattr(config.precision, "fp8_compute", False)
        checkpointing.wrap(blocks, memory.cpu_offload_checkpointing, keep, around, own)
    why = _compile(denoiser, blocks, family, config, device, sizes)  # 4. in place: names in state_dict stay
    swap.attach(denoiser)  # 5. fetch swapped blocks ahead of use, around the compiled block
    return why


def prepare_encoders(encoders: Mapping[str, nn.Module], learns: Mapping[str, bool], config: Any) -> None:
    """Let text encoders recompute too, if they learn: T5's activations are larger than its adapters."""
    for name, encoder in encoders.items():
        if config.memory.checkpointing and learns.get(name):
            # Older versions of transformers have the other name only.
            enable = getattr(encoder, "activation_checkpointing_enable", None) or encoder.gradient_checkpointing_enable
            enable({"use_reentrant": False})  # type: ignore[operator]


def repeated(denoiser: nn.Module, regions: tuple[str, ...]) -> list[list[nn.Module]]:
    """The denoiser's blocks, one list for each class in `regions`, in the order of the module tree."""
    return [[m for m in denoiser.modules() if type(m).__name__ == region] for region in regions]


def _to_swap(family: Any, config: Any) -> dict[str, int]:
    number = config.memory.blocks_to_swap or 0
    return family.swapped(number) if number else {}


def _stepped_on(config: Any) -> str:
    """Where swapped blocks are stepped, if they learn: on the device only while they are there for their gradients."""
    if config.adapters:
        return ""
    return "device" if config.optim.stepped_early else "host"


def _compile(  # noqa: PLR0913 - all that the order above decides
    denoiser: nn.Module,
    blocks: list[list[nn.Module]],
    family: Any,
    config: Any,
    device: torch.device,
    sizes: Sizes,
) -> str:
    if not config.compile.compile:
        return ""
    from library import compile_utils
    from library.memory import norms

    options, static = config.compile, len(sizes) == 1 or config.compile.dynamic is False
    inputs: Mapping[str, BlockInputs] = family.block_inputs
    if options.compile_scope == "model":
        blocks, backends = [[denoiser]], {}
        number = max(_number(given, sizes) for given in inputs.values()) if static else 1
        inputs = {type(denoiser).__name__: BlockInputs((), (), number)}
        options = options if static else replace(options, compile_dynamic="true")
        getattr(denoiser, "as_one_graph", lambda: None)()
    else:
        blocks, backends = _chosen(blocks, family.regions, options)
        if static:  # static sizes give the faster kernels
            inputs = {kind: replace(given, dynamic=(), sizes=_number(given, sizes)) for kind, given in inputs.items()}
    for block in (block for group in blocks for block in group):
        norms.keep_channels_last(block)
    try:
        compile_utils.compile_model(options, denoiser, blocks, False, family.name, inputs, backends)
    except ConfigError as e:
        if not options.compile_fallback:
            raise
        compile_utils.LEDGER.fallback = str(e)
        return str(e)
    return ""


def _number(given: BlockInputs, sizes: Sizes) -> int:
    """How many sizes blocks see: of height and width, or of their product, where the image is a row of tokens."""
    in_rows = sum(position == given.streams[0] for position, _ in given.dynamic) == 1
    return len({height * width if in_rows else (height, width) for height, width in sizes})


def _chosen(
    blocks: list[list[nn.Module]], regions: tuple[str, ...], options: Any
) -> tuple[list[list[nn.Module]], dict[nn.Module, str]]:
    """The blocks that `compile_blocks` names, and the backends of those that have one of their own.

    The others run eagerly. ConfigError where the model has fewer.
    """
    if not options.compile_blocks:
        return blocks, {}
    if wrong := [*options.beyond({cls: len(group) for cls, group in zip(regions, blocks, strict=True)})]:
        raise ConfigError("\n".join(wrong))
    ranges, chosen, backends = options.ranges(), [], {}
    for cls, group in zip(regions, blocks, strict=True):
        wanted = ranges.get(cls, ())
        numbers = range(len(group)) if wanted is None else {n for first, last in wanted for n in range(first, last + 1)}
        chosen.append([group[n] for n in sorted(numbers)])
        backends |= {group[n]: options.backend_of(cls, n) for n in numbers}
    return chosen, backends
