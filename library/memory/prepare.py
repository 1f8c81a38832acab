"""Apply storage, swapping, checkpointing and compilation to a denoiser, in the only order that works."""

import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from library.compiler import cudagraph
from library.compiler.blocks import compile_model
from library.compiler.log import CompileLog
from library.compiler.subclass import EIGHT_BIT, behaviours_of
from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.families.base import BlockInputs, Family
from library.memory import attention, channels_last, checkpointing, swapping
from library.memory.quantization import fp8_storage

logger = logging.getLogger(__name__)

BYTES_OF_ADAM = 8  # per trained weight: two states, which are not allocated yet when a size is first recorded

# Of batches: images, unless all have as many; height and width of their latents, then those of reference images.
Sizes = Collection[tuple[int, ...]]


@dataclass(frozen=True)
class Prepared:
    """What `prepare_denoiser` has chosen."""

    attention: str  # the attention kernel that was put first, "" on a CPU
    not_compiled: str  # why the blocks run eagerly although compiling was asked for, "" when nothing is wrong
    blocks: str  # what the blocks do besides computing, for the log


def prepare_denoiser(  # noqa: PLR0913 - what is made ready, and for what
    denoiser: nn.Module,
    family: Family,
    config: RunConfig,
    device: torch.device,
    sizes: Sizes,
    text_learns: bool = False,
    log: CompileLog | None = None,
) -> Prepared:
    """Place the denoiser on its device and apply everything that saves memory or time. The order matters.

    Adapters, dtype and `requires_grad` are final when this is called; parameter names stay as they are. `sizes` are
    those of the data set's batches; `text_learns` says that gradients go on through what the denoiser reads. `log` is
    handed on to what compiles.
    """
    attention.switches(config.compile)
    kernel = attention.prefer(device, config.memory.attention_kernel)
    order: dict[str, Any] = {"memory_format": torch.channels_last}  # not among the declared arguments of `to`
    denoiser.to(**order)  # 0. the order that convolutions are fastest in
    blocks = blocks_by_class(denoiser, family.block_classes)
    number = config.memory.blocks_to_swap or 0
    to_swap = swapping.choose_blocks(denoiser, family.swap_plan(number) if number else {})
    fp8_storage.store_blocks(blocks, config, device, to_swap)  # 1. storage: 8 bits for the blocks' frozen matrices
    # Swapped blocks that learn are on the device only while they are there for their gradients.
    stepped_on = "" if config.adapters else "device" if config.optim.stepped_early else "host"
    swap = swapping.Swap(to_swap, device, stepped_on)  # 2. what waits on the host
    if not is_sharded(config):  # shards are taken from the host, and only they go to the device
        swap.place(denoiser)
    if config.memory.checkpointing:  # 3. recompute in backward, inside what is compiled
        memory = config.memory
        around = config.compile.compile and config.compile.compile_scope == "inner"
        keep = memory.checkpoint_keep_attention
        own = config.precision.fp8_compute or config.precision.int8_compute
        checkpointing.checkpoint_blocks(blocks, device if memory.cpu_offload_checkpointing else None, keep, around, own)
    # 4. in place: names in state_dict stay
    log = log or CompileLog()
    why = _compile(denoiser, blocks, family, config, device, sizes, text_learns, log)
    swap.attach(denoiser)  # 5. fetch swapped blocks ahead of use, around the compiled block
    if why_not := _record(denoiser, config, device, log):  # 6. all of it as one piece
        logger.info("CUDA graphs are not recorded: %s", why_not)
    if device.type == "cpu":
        channels_last.let_norms_learn(denoiser)
    logger.info(said := describe_blocks(denoiser, family.block_classes))
    return Prepared(kernel, why, said)


def compiles_size_by_size(config: RunConfig, device: torch.device) -> bool:
    """Whether the whole denoiser is one graph that cannot serve all sizes of image, so that each needs its own.

    Inductor for CUDA (torch 2.11) ends with errors of its own where sizes vary in a whole model; in blocks they may.
    """
    return device.type == "cuda" and config.compile.compile_scope == "model" and config.compile.dynamic is None


def prepare_encoders(encoders: Mapping[str, nn.Module], learns: Mapping[str, bool], config: RunConfig) -> None:
    """Checkpoint text encoders, too, if they are trained: T5's activations are larger than its adapters."""
    for name, encoder in encoders.items():
        if config.memory.checkpointing and learns.get(name):
            # Older versions of transformers have the other name only.
            enable = getattr(encoder, "activation_checkpointing_enable", None) or encoder.gradient_checkpointing_enable
            enable({"use_reentrant": False})  # type: ignore[operator]


def blocks_by_class(denoiser: nn.Module, block_classes: tuple[str, ...]) -> list[list[nn.Module]]:
    """The denoiser's blocks, one list for each class in `block_classes`, in the order of the module tree."""
    return [[m for m in denoiser.modules() if type(m).__name__ == region] for region in block_classes]


def _compile(  # noqa: PLR0913 - all that the order above decides
    denoiser: nn.Module,
    blocks: list[list[nn.Module]],
    family: Family,
    config: RunConfig,
    device: torch.device,
    sizes: Sizes,
    text_learns: bool,
    log: CompileLog,
) -> str:
    if not config.compile.compile:
        return ""
    options = config.compile
    blocks, backends, inputs = _what_to_compile(denoiser, blocks, family, config, device, sizes)
    if options.compile_scope == "model":
        options = options if _is_static(config, device, sizes) else replace(options, compile_dynamic="true")
        getattr(denoiser, "as_one_graph", lambda: None)()
    elif not text_learns:
        every = (block for group in blocks for block in group if block in inputs)
        ahead = before_trainable(denoiser, every, family)
        inputs |= {block: replace(inputs[block], before_trainable=True) for block in ahead}
    # PyTorch's own GroupNorm ends the process on a CPU, if it learns in this order and what comes in does not.
    for block in [denoiser] if device.type == "cpu" else (block for group in blocks for block in group):
        channels_last.keep_channels_last(block)
    try:
        compile_model(options, denoiser, blocks, False, family.name, inputs, backends, log)
    except ConfigError as e:
        if not options.compile_fallback:
            raise
        return str(e)
    return ""


def graphs_per_block(denoiser: nn.Module, family: Family, config: RunConfig, device: torch.device, sizes: Sizes) -> int:
    """How many graphs one block needs at most for batches of these sizes. The denoiser may be without memory."""
    blocks = blocks_by_class(denoiser, family.block_classes)
    _, _, inputs = _what_to_compile(denoiser, blocks, family, config, device, sizes)
    return max((given.sizes for given in inputs.values()), default=0)


def _what_to_compile(  # noqa: PLR0913 - all that decides about it
    denoiser: nn.Module,
    blocks: list[list[nn.Module]],
    family: Family,
    config: RunConfig,
    device: torch.device,
    sizes: Sizes,
) -> tuple[list[list[nn.Module]], dict[nn.Module, str], dict[nn.Module, BlockInputs]]:
    """The modules to compile, the backends of those that have one of their own, and what each of them gets."""
    options, static = config.compile, _is_static(config, device, sizes)
    if options.compile_scope == "model":
        number = max(
            _count_graphs(block_input, options.dynamic, sizes, static) for block_input in family.block_inputs.values()
        )
        return [[denoiser]], {}, {denoiser: BlockInputs((), (), number)}
    blocks, backends = _blocks_to_compile(blocks, family.block_classes, options)
    return blocks, backends, _block_inputs(denoiser, blocks, family, options.dynamic, sizes, static)


def _is_static(config: RunConfig, device: torch.device, sizes: Sizes) -> bool:
    """Whether each size of image gets graphs of its own: static sizes give the faster kernels."""
    dynamic, one_size = config.compile.dynamic, len({_image_sides(size) for size in sizes}) == 1
    return dynamic is False or (dynamic is None and one_size) or compiles_size_by_size(config, device)


def _record(denoiser: nn.Module, config: Any, device: torch.device, log: CompileLog) -> str:
    """Record CUDA graphs of the denoiser where its config allows that; returns why not on a GPU, "" otherwise."""
    recorder = cudagraph.recorder_of(denoiser)
    if (early := config.optim.stepped_early) and several_processes():
        # Processes average each gradient as soon as it is complete, and that order differs between a recording and
        # eager blocks.
        if recorder:
            recorder.give_up(f"several processes train with {early}")
        return f"several processes train with {early}"
    if recorder or device.type != "cuda":
        return ""  # compile_mode asked for it; or there is nothing to record
    if is_sharded(config):
        return "fsdp gathers weights at every block"
    if why := config.compile.why_not_recorded(config):
        return why
    learning = sum(p.numel() for p in denoiser.parameters() if p.requires_grad)
    room = 0 if config.optim.stepped_early else BYTES_OF_ADAM * learning
    cudagraph.record_denoiser_calls(denoiser, log, None if config.compile.records_graphs else room)
    return ""


def is_sharded(config: RunConfig) -> bool:
    """Whether each of several processes keeps a part of the denoiser."""
    return config.distributed.fsdp and several_processes()


def several_processes() -> bool:
    """Whether this is one of several processes that train together."""
    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    return known and torch.distributed.get_world_size() > 1


def _block_inputs(  # noqa: PLR0913 - all that decides about the sizes
    denoiser: nn.Module, blocks: list[list[nn.Module]], family: Family, dynamic: bool | None, sizes: Sizes, static: bool
) -> dict[nn.Module, BlockInputs]:
    """What each block gets. Where sizes are compiled one by one, equally wide blocks of two levels see others."""
    paths, inputs_by_block = {module: path for path, module in denoiser.named_modules()}, {}
    for block in (block for group in blocks for block in group):
        inputs_of_kind = family.block_inputs.get(type(block).__name__)
        if inputs_of_kind and static:
            level = family.resolution_level(paths[block])
            halved = {(*_image_count(size), *(-(-side // 2**level) for side in _image_sides(size))) for size in sizes}
            inputs_by_block[block] = replace(
                inputs_of_kind, dynamic=(), level=level, sizes=_count_graphs(inputs_of_kind, dynamic, halved, static)
            )
        elif inputs_of_kind:
            inputs_by_block[block] = replace(
                inputs_of_kind, sizes=_count_graphs(inputs_of_kind, dynamic, sizes, static)
            )
    return inputs_by_block


def _count_graphs(inputs: BlockInputs, dynamic: bool | None, sizes: Sizes, static: bool) -> int:
    """How many graphs a block needs: one for each number of images, times the sizes where these are fixed as well.

    A size is a height and a width, or their product, where the image is a row of tokens. With dynamic = True even the
    number of images may vary, but for a single one, which is always a case of its own to PyTorch.
    """
    if static:
        in_rows = sum(position == inputs.streams[0] for position, _ in inputs.dynamic) == 1
        return len(
            {(_image_count(size), _area(_image_sides(size)) if in_rows else _image_sides(size)) for size in sizes}
        )
    numbers = {_image_count(size) for size in sizes}
    return len({number == (1,) for number in numbers}) if dynamic else len(numbers)


def _image_count(size: tuple[int, ...]) -> tuple[int, ...]:
    return size[: len(size) % 2]


def _image_sides(size: tuple[int, ...]) -> tuple[int, ...]:
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


def before_trainable(denoiser: nn.Module, blocks: Iterable[nn.Module], family: Family) -> set[nn.Module]:
    """The blocks that run before anything that learns does, so that no gradient has to go through them.

    None where nothing of the denoiser learns at all.
    """
    named = enumerate(denoiser.named_parameters())
    order = {id(p): (family.execution_key(path), number, p.requires_grad) for number, (path, p) in named}
    learning = [place for place in order.values() if place[-1]]
    if not learning:
        return set()
    first = min(learning)
    return {block for block in blocks if all(order[id(p)] < first for p in block.parameters())}


def describe_blocks(denoiser: nn.Module, block_classes: tuple[str, ...]) -> str:
    """One line on what the blocks do besides computing.

    Preparing replaces the classes of blocks and layers by subclasses that keep their names, so that neither the tree
    nor `repr` shows it.
    """
    whole = sorted(behaviours_of(denoiser))
    parts = [f"{type(denoiser).__name__} as one ({', '.join(whole)})"] if whole else []
    for name, blocks in zip(block_classes, blocks_by_class(denoiser, block_classes), strict=True):
        counts = Counter(found for block in blocks for found in _behaviours_within(block))
        shown = [found if number == len(blocks) else f"{number} {found}" for found, number in sorted(counts.items())]
        parts.append(f"{len(blocks)} {name}" + (f" ({', '.join(shown)})" if shown else ""))
    return f"Blocks: {'; '.join(parts)}"


def _behaviours_within(block: nn.Module) -> set[str]:
    """Of a block and its layers. All blocks of a class can swap, so that they share their graphs; not all do."""
    behaviours = {behaviour for module in block.modules() for behaviour in behaviours_of(module)}
    if any(parameter.dtype.itemsize == 1 for parameter in block.parameters()):  # also where adapters cast them
        behaviours.add(EIGHT_BIT)
    return behaviours if "_swap" in vars(block) else behaviours - {"swapped"}


@contextlib.contextmanager
def restored_after(denoiser: nn.Module, block_classes: tuple[str, ...]) -> Iterator[None]:
    """Restore block classes, hooks and swap state after a trial preparation: nothing recomputes, swaps or is compiled.

    Layers that are stored in 8 bits stay so, and weights stay on the device, where the next preparation wants them.
    """
    modules = [denoiser, *(module for module in denoiser.modules() if type(module).__name__ in block_classes)]
    classes, names = [type(module) for module in modules], [set(vars(module)) for module in modules]
    hooks = dict(denoiser._forward_pre_hooks)
    try:
        yield
    finally:
        if swap := vars(denoiser).get("_swap"):
            swap.undo()
        denoiser._forward_pre_hooks.clear()
        denoiser._forward_pre_hooks.update(hooks)
        for module, cls, known in zip(modules, classes, names, strict=True):
            module.__class__ = cls
            for name in set(vars(module)) - known:
                del vars(module)[name]
