"""Apply storage, swapping, checkpointing and compilation to a denoiser, in the only order that works."""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from library.compiler import cudagraph
from library.compiler.blocks import compile_model
from library.compiler.log import CompileLog
from library.compiler.plan import CompilePlan
from library.compiler.subclass import EIGHT_BIT, SWAPPED, behaviours_of
from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.families.base import Family
from library.memory import attention, channels_last, checkpointing, swapping
from library.memory.compile_targets import Sizes, blocks_by_class, compile_targets, is_static
from library.memory.quantization import fp8_storage

logger = logging.getLogger(__name__)

BYTES_OF_ADAM = 8  # per trained weight: two states, which are not allocated yet when a size is first recorded


@dataclass(frozen=True)
class Prepared:
    """What `prepare_denoiser` has chosen."""

    attention: str  # the attention kernel that was put first, "" on a CPU
    not_compiled: str  # why the blocks run eagerly although compiling was asked for, "" when nothing is wrong
    blocks: str  # what the blocks do besides computing, for the log
    plan: CompilePlan  # when its blocks are compiled


@dataclass
class _Preparation:
    """A denoiser on its way through PREPARATION_STEPS, and what decides about it."""

    denoiser: nn.Module
    family: Family
    config: RunConfig
    device: torch.device
    sizes: Sizes
    text_learns: bool
    plan: CompilePlan
    swap: swapping.Swap | None = None  # from `_place_weights` on
    not_compiled: str = ""

    @property
    def blocks(self) -> list[list[nn.Module]]:
        """The denoiser's blocks by class; replaced classes keep their names."""
        return blocks_by_class(self.denoiser, self.family.block_classes)


def prepare_denoiser(  # noqa: PLR0913 - what is made ready, and for what
    denoiser: nn.Module,
    family: Family,
    config: RunConfig,
    device: torch.device,
    sizes: Sizes,
    text_learns: bool = False,
    log: CompileLog | None = None,
) -> Prepared:
    """Place the denoiser on its device and apply everything that saves memory or time, in this order.

    Adapters, dtype and `requires_grad` are final when this is called; parameter names stay as they are. `sizes` are
    those of the data set's batches; `text_learns` says that gradients go on through what the denoiser reads. `log` is
    handed on to what compiles.
    """
    attention.switches(config.compile)
    kernel = attention.prefer(device, config.memory.attention_kernel)
    given = _Preparation(denoiser, family, config, device, sizes, text_learns, CompilePlan(log))
    for step, _ in PREPARATION_STEPS:
        step(given)
    logger.info(said := describe_blocks(denoiser, family.block_classes))
    return Prepared(kernel, given.not_compiled, said, given.plan)


def prepare_encoders(encoders: Mapping[str, nn.Module], learns: Mapping[str, bool], config: RunConfig) -> None:
    """Checkpoint text encoders, too, if they are trained: T5's activations are larger than its adapters."""
    for name, encoder in encoders.items():
        if config.memory.checkpointing and learns.get(name):
            # Older versions of transformers have the other name only.
            enable = getattr(encoder, "activation_checkpointing_enable", None) or encoder.gradient_checkpointing_enable
            enable({"use_reentrant": False})  # type: ignore[operator]


# ---- the steps


def _order_convolutions(given: _Preparation) -> None:
    order: dict[str, Any] = {"memory_format": torch.channels_last}  # not among the declared arguments of `to`
    given.denoiser.to(**order)


def _place_weights(given: _Preparation) -> None:
    """Round the blocks' frozen matrices to 8 bits, and move everything but swapped weights to the device."""
    config, denoiser = given.config, given.denoiser
    number = config.memory.blocks_to_swap or 0
    to_swap = swapping.choose_blocks(denoiser, given.family.swap_plan(number) if number else {})
    fp8_storage.store_blocks(given.blocks, config, given.device, to_swap)
    # Swapped blocks that learn are on the device only while they are there for their gradients.
    stepped_on = "" if config.adapters else "device" if config.optim.stepped_early else "host"
    given.swap = swapping.Swap(to_swap, given.device, stepped_on)
    if not is_sharded(config):  # shards are taken from CPU memory, and only they go to the device
        given.swap.place(denoiser)


def _checkpoint(given: _Preparation) -> None:
    memory, options, precision = given.config.memory, given.config.compile, given.config.precision
    if memory.checkpointing:
        around = options.compile and options.compile_scope == "inner"
        own_gradients = precision.fp8_compute or precision.int8_compute
        offload_from = given.device if memory.cpu_offload_checkpointing else None
        checkpointing.checkpoint_blocks(
            given.blocks, offload_from, memory.checkpoint_keep_attention, around, own_gradients
        )


def _compile(given: _Preparation) -> None:
    options, denoiser, family, device = given.config.compile, given.denoiser, given.family, given.device
    if not options.compile:
        return
    blocks, backends, inputs = compile_targets(denoiser, given.blocks, family, given.config, device, given.sizes)
    if options.compile_scope == "model":
        options = options if is_static(given.config, device, given.sizes) else replace(options, compile_dynamic="true")
        getattr(denoiser, "as_one_graph", lambda: None)()
    elif not given.text_learns:
        every = (block for group in blocks for block in group if block in inputs)
        ahead = before_trainable(denoiser, every, family)
        inputs |= {block: replace(inputs[block], before_trainable=True) for block in ahead}
    # PyTorch's own GroupNorm ends the process on a CPU, if it learns in this order and what comes in does not.
    for block in [denoiser] if device.type == "cpu" else (block for group in blocks for block in group):
        channels_last.keep_channels_last(block)
    try:
        compile_model(options, denoiser, blocks, False, family.name, inputs, backends, plan=given.plan)
    except ConfigError as e:
        if not options.compile_fallback:
            raise
        given.not_compiled = str(e)
        given.plan.give_up(given.not_compiled)


def _swap_blocks(given: _Preparation) -> None:
    assert given.swap is not None, "_place_weights comes first"
    given.swap.attach(given.denoiser)


def _record(given: _Preparation) -> None:
    if why_not := _record_graphs(given.denoiser, given.config, given.device, given.plan):
        logger.info("CUDA graphs are not recorded: %s", why_not)


def _let_norms_learn(given: _Preparation) -> None:
    if given.device.type == "cpu":
        channels_last.let_norms_learn(given.denoiser)


# In this order only, each with the reason. What changes the classes of blocks is in the order of subclass.INSIDE_OUT,
# which is asserted wherever a class changes.
PREPARATION_STEPS: tuple[tuple[Callable[[_Preparation], None], str], ...] = (
    (_order_convolutions, "weights are rounded and moved in the order that convolutions are fastest in"),
    (_place_weights, "what is swapped are the rounded weights"),
    (_checkpoint, "inside what is compiled, so that one graph has the forward pass and its recomputation"),
    (_compile, "the names in state_dict stay, as blocks are compiled in place"),
    (_swap_blocks, "around compiled blocks, so that weights are fetched before a graph reads them"),
    (_record, "a recording replays all of the above as one piece"),
    (_let_norms_learn, "only norms that compiling has left as they were need it"),
)


def _record_graphs(denoiser: nn.Module, config: Any, device: torch.device, plan: CompilePlan) -> str:
    """Record CUDA graphs of the denoiser where its config allows that; returns why not on a GPU, "" otherwise."""
    recorder = cudagraph.recorder_of(denoiser)
    if (early := config.optim.stepped_early) and several_processes():
        # Processes average each gradient as soon as it is complete, and that order differs between a recording and
        # eager blocks.
        if recorder:
            recorder.give_up(f"several processes train with {early}")
        return f"several processes train with {early}"
    if recorder or device.type != "cuda":
        return ""  # the mode of compiling asked for it; or there is nothing to record
    if is_sharded(config):
        return "fsdp gathers weights at every block"
    if why := config.compile.why_not_recorded(config):
        return why
    learning = sum(p.numel() for p in denoiser.parameters() if p.requires_grad)
    room = 0 if config.optim.stepped_early else BYTES_OF_ADAM * learning
    cudagraph.record_denoiser_calls(denoiser, plan, None if config.compile.records_graphs else room)
    return ""


def is_sharded(config: RunConfig) -> bool:
    """Whether each of several processes keeps a part of the denoiser."""
    return config.distributed.fsdp and several_processes()


def several_processes() -> bool:
    """Whether this is one of several processes that train together."""
    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    return known and torch.distributed.get_world_size() > 1


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
    found = {behaviour for module in block.modules() for behaviour in behaviours_of(module)}
    if any(parameter.dtype.itemsize == 1 for parameter in block.parameters()):  # also where adapters cast them
        found.add(EIGHT_BIT)
    return found if "_swap" in vars(block) else found - {SWAPPED}


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
