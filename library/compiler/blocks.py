"""torch.compile for the repeated blocks of a denoiser.

Blocks are compiled in place (`module.compile()`), one by one. PyTorch keeps compiled code with the `forward` function,
so blocks of one class share their graphs, and parameter names never change. Compile last: after adapters, dtype, device
and `requires_grad` are final.
"""

import argparse
import itertools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from library.compiler import cache, cudagraph, torch_private
from library.compiler.block_inputs import BlockInputs
from library.compiler.checks import find_compile_problems, find_hooks
from library.compiler.entry import graph_shape, with_canonical_inputs
from library.compiler.log import CompileLog
from library.compiler.plan import CompilePlan
from library.compiler.torch_settings import THREAD_SETTINGS, limit_of, torch_version, wanted_settings
from library.config.compile_modes import MODES, RECORDED_MODES
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, counted, raise_if_any

__all__ = ["find_compile_problems"]  # also defines the classes below

logger = logging.getLogger(__name__)

WRAPPER = "_orig_mod."

M = TypeVar("M", bound=nn.Module)
V = TypeVar("V")


def add_compile_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the six compile flags to your own parser. The trainers get theirs from `library.config`."""
    group = parser.add_argument_group("Torch Compile Settings")
    group.add_argument("--compile", action="store_true", help="compile the model's blocks with torch.compile")
    group.add_argument("--compile_backend", default="inductor", help="torch.compile backend (default: inductor)")
    group.add_argument("--compile_mode", default="default", choices=MODES, help="what inductor optimises for")
    group.add_argument(
        "--compile_dynamic",
        default=None,
        type=str.lower,
        choices=("auto", "true", "false"),
        help="compile for varying sizes: true, false, or auto (PyTorch's own choice)",
    )
    group.add_argument("--compile_fullgraph", action="store_true", help="fail where a block does not fit in one graph")
    group.add_argument(
        "--compile_cache_size_limit",
        type=int,
        default=0,
        help="graphs kept per block before torch gives up; 0 is PyTorch's own limit",
    )


def torch_compile_options(args: Any, sizes: int = 1) -> JsonObject:
    """Translate the options into keyword arguments of torch.compile. `auto` and 0 leave the choice to PyTorch.

    Raises the recompile limit if more `sizes` than it allows are compiled separately.
    """
    dynamic = str(args.compile_dynamic or "auto").lower()
    chosen: JsonObject = {
        "backend": args.compile_backend,
        "dynamic": {"true": True, "false": False, "auto": None}[dynamic],
        "fullgraph": bool(args.compile_fullgraph),
    }
    if args.compile_mode not in (None, "default"):
        chosen["mode"] = args.compile_mode
    if (limit := limit_of(args, sizes)) and torch_version() >= (2, 13):
        # The keyword holds in every thread; the config value is invisible to autograd's threads (pytorch#186537).
        chosen["recompile_limit"] = limit
    return chosen


# Inductor for CUDA (torch 2.11) fails with varying sizes in all of FLUX.1 or SDXL, so blocks are the default.
# Why: docs/decisions/2026-11-20-whole-model-graph-per-size.md
def compile_model(  # noqa: PLR0913 - the signature is a published one
    args: Any,
    model: M,
    target_blocks: Iterable[Sequence[nn.Module]],
    disable_linear: bool = False,
    log_prefix: str = "Model",
    inputs: Mapping[Any, BlockInputs] | None = None,
    backends: Mapping[nn.Module, str] | None = None,
    log: CompileLog | None = None,
    plan: CompilePlan | None = None,
) -> M:
    """Compile every block of `target_blocks` (a list of lists) in place and return `model`.

    `args` is any object with the six options as attributes. `inputs` (by class name or block) lets blocks of a class
    share graphs; `backends` overrides the backend for single blocks. `log` records each graph. A `plan` brings its own
    log, and lets the caller compile some or all blocks later. Raises ConfigError if this machine cannot compile.
    """
    device = next((p.device for p in model.parameters() if p.device.type != "cpu"), torch.device("cpu"))
    blocks = list(itertools.chain.from_iterable(target_blocks))
    inputs, backends = inputs or {}, backends or {}
    raise_if_any([*find_compile_problems(args, device, disable_linear), *find_hooks(model, blocks)])
    cache.use_cache(getattr(args, "compile_cache_dir", None), device)
    THREAD_SETTINGS.want(wanted_settings(args, device, _most_sizes(inputs)))
    plan = plan or CompilePlan(log)
    plan.log.listen()
    if disable_linear:
        for block in blocks:
            disable_linear_from_compile(block)
    learning = {type(block).__name__ for block in blocks if any(p.requires_grad for p in block.parameters())}
    options = block_options(args, blocks, inputs, device)
    compiler = BlockCompiler(args, options, inputs, backends, plan.log, learning)
    for block in blocks:
        block.__class__ = compiler.entry(block, type(block))
        block.__dict__["_compile_log"] = plan.log
    if _records_denoiser(args, device):
        cudagraph.record_denoiser_calls(model, plan)
    first_steps = args.first_steps() if hasattr(args, "first_steps") else {}
    plan.begin(blocks, compiler.compile, first_steps, getattr(args, "compile_compare_steps", 0))
    _log_compiling(log_prefix, len(blocks), plan.log, {"mode": args.compile_mode or "default", **options})
    return model


def _log_compiling(prefix: str, num_blocks: int, log: CompileLog, options: JsonMapping) -> None:
    graphs = counted(sum(log.predicted().values()), "graph")
    option_text = ", ".join(f"{name}={value}" for name, value in options.items())
    logger.info("%s: %s, %s (%s)", prefix, counted(num_blocks, "block"), graphs, option_text)


def _most_sizes(inputs: Mapping[Any, BlockInputs]) -> int:
    """Return the most sizes for which any block is compiled separately."""
    return max((block_inputs.sizes for block_inputs in inputs.values()), default=1)


def _records_denoiser(args: Any, device: torch.device) -> bool:
    """Return whether compile_mode records CUDA graphs: of the whole denoiser, instead of inductor's for each block."""
    return device.type == "cuda" and args.compile_mode in RECORDED_MODES


def block_options(
    args: Any, blocks: Sequence[nn.Module], inputs: Mapping[Any, BlockInputs], device: torch.device
) -> JsonObject:
    """Return the keyword arguments of torch.compile for these blocks."""
    options = torch_compile_options(args, _most_sizes(inputs))
    all_described = bool(blocks) and all(block in inputs or type(block).__name__ in inputs for block in blocks)
    if all_described and options["dynamic"] is None:
        # Dimensions that vary are marked one by one. With dynamic=None PyTorch infers them per line of code, which
        # blocks of all widths share, and would make a size dynamic that is the same for all images.
        options["dynamic"] = False
    if _records_denoiser(args, device):
        options["mode"] = RECORDED_MODES[args.compile_mode]
    return options


@dataclass(frozen=True)
class BlockCompiler:
    """How the blocks of one model enter compiled code, and with which options of torch.compile."""

    args: Any  # with the six options as attributes
    options: JsonMapping  # of torch.compile
    inputs: Mapping[Any, BlockInputs]  # by block or class name
    backends: Mapping[nn.Module, str]  # of blocks with a separate one
    log: CompileLog
    learning: Collection[str] = ()  # classes of which some block has trained parameters
    apart: str = ""  # separates graphs from those of other calls of the same blocks

    def entry(self, block: nn.Module, cls: type[nn.Module]) -> type[nn.Module]:
        """Return the class with which a block of the class `cls` enters compiled code, and let the log expect it."""
        kind = type(block).__name__
        block_inputs = self.inputs.get(block, self.inputs.get(kind))
        place = (block_inputs.level, block_inputs.before_trainable) if block_inputs else ()
        backend = self.backends.get(block, self.args.compile_backend)
        shape = (*graph_shape(block), backend, *place, *filter(None, [self.apart]))
        streams = block_inputs.streams if block_inputs else ()
        chosen_by_block = str(self.args.compile_dynamic or "auto").lower() == "auto"
        dynamic = block_inputs.dynamic if block_inputs and chosen_by_block else ()
        learns = not block_inputs.before_trainable if block_inputs else kind in self.learning
        self.log.expect(kind, shape, block_inputs.sizes if block_inputs else 1)
        return with_canonical_inputs(cls, shape, streams, dynamic, learns and not self.apart, bool(self.apart))

    def compile(self, block: nn.Module) -> None:
        """Compile a block in place."""
        backend = self.backends.get(block, self.args.compile_backend)
        # Only inductor has modes.
        options = {name: value for name, value in self.options.items() if name != "mode" or backend == "inductor"}
        block.compile(**options | {"backend": torch_private.eager_backend if backend == "eager" else backend})


def uncompile_model(model: nn.Module) -> None:
    # Only between steps, as forward and backward of a step must match.
    for module in model.modules():
        torch_private.forget_compiled_call(module)


def disable_linear_from_compile(module: nn.Module) -> None:
    """Exclude every Linear layer of `module` from compiled graphs."""
    # Every disabled layer breaks the graph, which costs most of the speedup.
    layers: list[Any] = [child for child in module.modules() if isinstance(child, nn.Linear)]
    for layer in layers:
        layer.forward = torch.compiler.disable(layer.forward)


def maybe_uncompile_state_dict(state_dict: dict[str, V]) -> dict[str, V]:
    """Remove from keys the `_orig_mod.` that wrapped (not in-place) compilation leaves. Values are not copied."""
    if not any(WRAPPER in key for key in state_dict):
        return state_dict
    cleaned = {key.replace(WRAPPER, ""): value for key, value in state_dict.items()}
    if len(cleaned) != len(state_dict):
        raise ConfigError("this file holds compiled and plain copies of the same weights; keep one of them")
    return cleaned


def is_compile_error(error: BaseException) -> bool:
    """Return whether the compiler raised this error, not the model (such as out of memory)."""
    # Chains of causes can be circular.
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        if isinstance(error, torch.OutOfMemoryError):
            return False
        if type(error).__module__.startswith(torch_private.COMPILER_MODULES):
            return True
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return False


def compile_error_cause(error: BaseException, torch_file: str = torch.__file__) -> str:
    """Return the line of a compiler's error output that names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if " " in torch_file and any("cannot find" in line for line in lines):
        # Inductor's linker call does not quote the path.
        return "PyTorch cannot compile below a folder with a blank in its name; move the project to another"
    telling = (line for line in lines if "error:" in line.lower())
    return next(telling, lines[0])[:200]
