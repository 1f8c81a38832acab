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
from library.families.capabilities import BlockModulation, HasModulation
from library.families.stored_weights import restore_layer
from library.memory import attention, channels_last, checkpointing, swapping
from library.memory.compile_targets import Sizes, blocks_by_class, compile_targets, image_transformers, is_static
from library.memory.modulation import OffloadedModulation, modulation_layers
from library.memory.quantization import fp8_storage

logger = logging.getLogger(__name__)

BYTES_OF_ADAM = 8  # per trained weight: two float32 states, not allocated yet when a size is first recorded


@dataclass(frozen=True)
class Prepared:
    """The choices of `prepare_denoiser`."""

    attention: str  # the attention kernel that was put first, "" on a CPU
    not_compiled: str  # why the blocks run eagerly despite `compile`, else ""
    blocks: str  # changes to the blocks, for the log
    plan: CompilePlan  # when its blocks are compiled


@dataclass
class _Preparation:
    """A denoiser during PREPARATION_STEPS, and everything that these depend on."""

    denoiser: nn.Module
    family: Family
    config: RunConfig
    device: torch.device
    sizes: Sizes
    text_learns: bool
    plan: CompilePlan
    swap: swapping.Swap | None = None  # from `_place_weights` on
    modulation: OffloadedModulation | None = None  # the same
    not_compiled: str = ""

    @property
    def blocks(self) -> list[list[nn.Module]]:
        return blocks_by_class(self.denoiser, self.family.block_classes)


def prepare_denoiser(  # noqa: PLR0913 - the denoiser and everything that its preparation depends on
    denoiser: nn.Module,
    family: Family,
    config: RunConfig,
    device: torch.device,
    sizes: Sizes,
    text_learns: bool = False,
    log: CompileLog | None = None,
) -> Prepared:
    """Place the denoiser on its device and apply everything that saves memory or time, by PREPARATION_STEPS.

    Call it when adapters, dtype and `requires_grad` are final; parameter names stay. `sizes` are those of the data
    set's batches. `text_learns` says whether the text inputs need gradients, too. `log` collects compilations.
    """
    attention.switches(config.compile)
    kernel = attention.prefer(device, config.memory.attention_kernel)
    preparation = _Preparation(denoiser, family, config, device, sizes, text_learns, CompilePlan(log))
    for step, _ in PREPARATION_STEPS:
        step(preparation)
    logger.info(description := describe_blocks(denoiser, family.block_classes))
    return Prepared(kernel, preparation.not_compiled, description, preparation.plan)


def prepare_encoders(encoders: Mapping[str, nn.Module], learns: Mapping[str, bool], config: RunConfig) -> None:
    """Checkpoint the trained text encoders, too: T5's activations are larger than its adapters."""
    for name, encoder in encoders.items():
        if config.memory.checkpointing and learns.get(name):
            # Older versions of transformers have the other name only.
            enable = getattr(encoder, "activation_checkpointing_enable", None) or encoder.gradient_checkpointing_enable
            enable({"use_reentrant": False})  # type: ignore[operator]


# ---- the steps


def _order_convolutions(preparation: _Preparation) -> None:
    order: dict[str, Any] = {"memory_format": torch.channels_last}  # not among the declared arguments of `to`
    preparation.denoiser.to(**order)


def _place_weights(preparation: _Preparation) -> None:
    """Round the blocks' frozen matrices to 8 bits, and move everything but swapped weights to the device."""
    config, denoiser = preparation.config, preparation.denoiser
    number = config.memory.blocks_to_swap or 0
    to_swap = swapping.choose_blocks(denoiser, preparation.family.swap_plan(number) if number else {})
    plan = offloaded_modulation(preparation.family, config)
    layers = [layer for block in denoiser.modules() for layer in modulation_layers(block, plan)]
    of_one_row = {*_modulation_of(denoiser, preparation.family)}
    fp8_storage.store_blocks(preparation.blocks, config, preparation.device, [*to_swap, *layers], of_one_row)
    for layer in denoiser.modules():
        restore_layer(layer, fp8_storage.compute_type(config))  # weights kept in their file's format are stored already
    # Trained blocks that are swapped can be stepped on the device only within the backward pass, while they are there.
    stepped_on = "" if config.adapters else "device" if config.optim.stepped_early else "host"
    apart: list[nn.Parameter] = []
    if plan:
        preparation.modulation = OffloadedModulation(denoiser, plan, preparation.device)
        apart = preparation.modulation.weights
    preparation.swap = swapping.Swap(to_swap, preparation.device, stepped_on, apart)
    if not is_sharded(config):  # shards are taken from CPU memory, and only they go to the device
        preparation.swap.place(denoiser, apart)


def _join_layers(preparation: _Preparation) -> None:
    config = preparation.config
    whole = config.compile.compile and config.compile.compile_scope == "model"
    if not (whole or config.memory.moves_weights(config) or is_sharded(config)):
        getattr(preparation.denoiser, "join_layers", lambda: None)()


def _checkpoint(preparation: _Preparation) -> None:
    memory, options, precision = preparation.config.memory, preparation.config.compile, preparation.config.precision
    if memory.checkpointing:
        around = options.compile and options.compile_scope == "inner"
        # Attention without a mask has its own backward, too, but a policy slows down every operation of eager blocks.
        own_gradients = precision.fp8_compute or precision.int8_compute or precision.nf4_denoiser or options.compile
        offload_from = preparation.device if memory.cpu_offload_checkpointing else None
        checkpointing.checkpoint_blocks(
            preparation.blocks,
            offload_from,
            memory.checkpoint_keep_attention,
            around,
            own_gradients,
            until_compiled=options.keeps_by_budget,
        )


def _compile(preparation: _Preparation) -> None:
    config, denoiser, family = preparation.config, preparation.denoiser, preparation.family
    options, device, sizes = config.compile, preparation.device, preparation.sizes
    if not options.compile:
        return
    blocks, backends, inputs = compile_targets(denoiser, preparation.blocks, family, config, device, sizes)
    compiled = {block for group in blocks for block in group}
    if options.compile_scope == "model":
        options = options if is_static(config, device, sizes) else replace(options, compile_dynamic="true")
        getattr(denoiser, "as_one_graph", lambda: None)()
    elif not preparation.text_learns:
        # A norm in front of them is cheap, and as a block that learns it needs no graph of its own.
        large = (block for block in inputs if type(block).__name__ in family.block_classes)
        untrained_beginning = before_trainable(denoiser, large, family)
        inputs |= {block: replace(inputs[block], before_trainable=True) for block in untrained_beginning}
    for block in compiled:
        channels_last.compile_on_its_own(block)
    try:
        compile_model(options, denoiser, blocks, False, family.name, inputs, backends, plan=preparation.plan)
    except ConfigError as e:
        if not options.compile_fallback:
            raise
        preparation.not_compiled = str(e)
        preparation.plan.give_up(preparation.not_compiled)
        return  # with all layers as in a training without compiling
    # Blocks are traced when they run first. On a CPU, PyTorch's GroupNorm ends the process if it is trained in
    # channels_last and its input needs no gradient, so replace it in the whole denoiser there.
    for block in [denoiser] if device.type == "cpu" else compiled:
        channels_last.keep_channels_last(block)
    for module in image_transformers(denoiser, family):
        if module.norm in compiled:
            module.__class__ = channels_last.with_images_last(type(module))


def _swap_blocks(preparation: _Preparation) -> None:
    assert preparation.swap is not None, "_place_weights comes first"
    preparation.swap.attach(preparation.denoiser)
    if preparation.modulation:
        preparation.modulation.attach()


def _record(preparation: _Preparation) -> None:
    if why_not := _record_graphs(preparation.denoiser, preparation.config, preparation.device, preparation.plan):
        logger.info("CUDA graphs are not recorded: %s", why_not)


def _let_norms_learn(preparation: _Preparation) -> None:
    if preparation.device.type == "cpu":
        channels_last.let_norms_learn(preparation.denoiser)


# The only order that works, each step with the reason. Steps that change the classes of blocks are in the order of
# subclass.INSIDE_OUT, which is asserted wherever a class changes.
PREPARATION_STEPS: tuple[tuple[Callable[[_Preparation], None], str], ...] = (
    (_order_convolutions, "weights are rounded and moved in the memory format in which convolutions are fastest"),
    (_place_weights, "the rounded weights are swapped"),
    (_join_layers, "weights that stay on the device become parts of larger matrices"),
    (_checkpoint, "inside compiled blocks, so that one graph has the forward pass and its recomputation"),
    (_compile, "the names in state_dict stay, as blocks are compiled in place"),
    (_swap_blocks, "around compiled blocks, so that weights are fetched before a graph reads them"),
    (_record, "a recording replays all of the above as one piece"),
    (_let_norms_learn, "only norms that compiling has not replaced need it"),
)


def _record_graphs(denoiser: nn.Module, config: Any, device: torch.device, plan: CompilePlan) -> str:
    """Record CUDA graphs of the denoiser if its config allows that. Return the reason if not on a GPU, "" otherwise."""
    recorder = cudagraph.recorder_of(denoiser)
    if (early := config.optim.stepped_early) and several_processes():
        # Processes average each gradient as soon as it is complete, and that order differs between a recording and
        # eager blocks.
        if recorder:
            recorder.give_up(f"several processes train with {early}")
        return f"several processes train with {early}"
    if recorder or device.type != "cuda":
        return ""  # the compile mode has set up a recorder; or there is no GPU
    if is_sharded(config):
        return "fsdp gathers weights at every block"
    if why := config.compile.why_not_recorded(config):
        return why
    num_trained = sum(p.numel() for p in denoiser.parameters() if p.requires_grad)
    reserved = 0 if config.optim.stepped_early else BYTES_OF_ADAM * num_trained
    cudagraph.record_denoiser_calls(denoiser, plan, None if config.compile.records_graphs else reserved)
    return ""


def offloaded_modulation(family: Family, config: RunConfig) -> Mapping[str, BlockModulation]:
    """Return the modulation layers that wait in host memory, by class of block."""
    return all_modulation(family) if config.memory.moves_modulation(config) else {}


def all_modulation(family: Family) -> Mapping[str, BlockModulation]:
    """Return a family's modulation layers by class of block."""
    return family.modulation if isinstance(family, HasModulation) else {}


def _modulation_of(denoiser: nn.Module, family: Family) -> Iterator[nn.Module]:
    """Yield the modulation layers that the blocks have; those made for compiling alone lack some."""
    plan = all_modulation(family)
    for block in denoiser.modules():
        if modulation := plan.get(type(block).__name__):
            yield from (layer for path, layer in block.named_modules() if path in modulation.layers)


def is_sharded(config: RunConfig) -> bool:
    return config.distributed.fsdp and several_processes()


def several_processes() -> bool:
    is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return is_initialized and torch.distributed.get_world_size() > 1


def before_trainable(denoiser: nn.Module, blocks: Iterable[nn.Module], family: Family) -> set[nn.Module]:
    """Return the blocks that run before any trained parameter, so that no gradient has to pass through them.

    Empty if nothing in the denoiser is trained.
    """
    named = enumerate(denoiser.named_parameters())
    order = {id(p): (family.execution_key(path), number, p.requires_grad) for number, (path, p) in named}
    trained = [position for position in order.values() if position[-1]]
    if not trained:
        return set()
    first = min(trained)
    return {block for block in blocks if all(order[id(p)] < first for p in block.parameters())}


def describe_blocks(denoiser: nn.Module, block_classes: tuple[str, ...]) -> str:
    """Describe in one line what was applied to the blocks: compiled, checkpointed, swapped, ...

    Preparing replaces the classes of blocks and layers by subclasses that keep their names, so `repr` does not show it.
    """
    whole = sorted(behaviours_of(denoiser))
    parts = [f"{type(denoiser).__name__} as one ({', '.join(whole)})"] if whole else []
    for name, blocks in zip(block_classes, blocks_by_class(denoiser, block_classes), strict=True):
        counts = Counter(behaviour for block in blocks for behaviour in _behaviours_within(block))
        descriptions = [
            behaviour if number == len(blocks) else f"{number} {behaviour}"
            for behaviour, number in sorted(counts.items())
        ]
        parts.append(f"{len(blocks)} {name}" + (f" ({', '.join(descriptions)})" if descriptions else ""))
    return f"Blocks: {'; '.join(parts)}"


def _behaviours_within(block: nn.Module) -> set[str]:
    """Return the behaviours of a block and its layers. All blocks of a class have the class that swaps, so that they
    share graphs; only those with a `_swap` attribute do swap.
    """
    behaviours = {behaviour for module in block.modules() for behaviour in behaviours_of(module)}
    # Also if adapters cast the weights.
    if any(p.dtype.itemsize == 1 and p.dtype != torch.uint8 for p in block.parameters()):
        behaviours.add(EIGHT_BIT)
    if swapping.MODULATION in vars(block):
        behaviours.add("modulation in CPU memory")
    return behaviours if "_swap" in vars(block) else behaviours - {SWAPPED}


@contextlib.contextmanager
def restored_after(denoiser: nn.Module, family: Family) -> Iterator[None]:
    """Restore block classes, hooks and swap state after a trial preparation: nothing recomputes, swaps or is compiled.

    Layers stored in 8 bits stay so, and weights stay on the device, where the next preparation needs them.
    """
    blocks = [block for group in blocks_by_class(denoiser, family.block_classes) for block in group]
    around = [part for module in image_transformers(denoiser, family) for part in (module, module.norm)]
    modules: list[Any] = [denoiser, *blocks, *around]
    classes, names = [type(module) for module in modules], [set(vars(module)) for module in modules]
    hooks = dict(denoiser._forward_pre_hooks)
    try:
        yield
    finally:
        if swap := vars(denoiser).get("_swap"):
            swap.undo()
        for modulation in {vars(b)[swapping.MODULATION] for b in blocks if swapping.MODULATION in vars(b)}:
            modulation.undo()
        getattr(denoiser, "separate_layers", lambda: None)()
        denoiser._forward_pre_hooks.clear()
        denoiser._forward_pre_hooks.update(hooks)
        for module, cls, original_names in zip(modules, classes, names, strict=True):
            module.__class__ = cls
            for name in set(vars(module)) - original_names:
                del vars(module)[name]
