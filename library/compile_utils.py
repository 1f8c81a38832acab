"""torch.compile for the repeated blocks of a denoiser: what the options mean, and proof that it ran.

Blocks are compiled in place (`module.compile()`), one by one. PyTorch keeps compiled code with the `forward` function,
so blocks of one class share their graphs, and parameter names never change. Compile last: after adapters, dtype,
device and `requires_grad` are final.
"""

import argparse
import functools
import logging
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from library import compile_cache
from library.compile_ledger import LEDGER
from library.config.schema import ConfigError
from library.memory.blocks import copied, under_its_name

logger = logging.getLogger(__name__)

MINIMUM_TORCH = (2, 11)
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
WRAPPER = "_orig_mod."
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Shape = tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...]
M = TypeVar("M", bound=nn.Module)
V = TypeVar("V")


class Inputs(Protocol):
    """What blocks of one class are called with, by position, so that one graph can serve all of them.

    `streams` flow from block to block: all but the first block's carry a gradient. `dynamic` names the dimensions whose
    size depends on the bucket: ((position, dimension), ...).
    """

    streams: tuple[int, ...]
    dynamic: tuple[tuple[int, int], ...]


def add_compile_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the six flags to a parser of your own. The trainers get theirs from `library.config`."""
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


def torch_compile_options(args: Any) -> dict[str, Any]:
    """The options -> keyword arguments of torch.compile. `auto` and 0 leave the choice to PyTorch."""
    dynamic = str(args.compile_dynamic or "auto").lower()
    chosen: dict[str, Any] = {
        "backend": args.compile_backend,
        "dynamic": {"true": True, "false": False, "auto": None}[dynamic],
        "fullgraph": bool(args.compile_fullgraph),
    }
    if args.compile_mode not in (None, "default"):
        chosen["mode"] = args.compile_mode
    if args.compile_cache_size_limit and _version() >= (2, 13):
        # The keyword holds in every thread; the config value is invisible to autograd's threads (pytorch#186537).
        chosen["recompile_limit"] = int(args.compile_cache_size_limit)
    return chosen


def problems(args: Any, device: torch.device, disable_linear: bool = False) -> Iterator[str]:
    """Why blocks cannot be compiled here, one sentence each, found before a model is loaded."""
    if _version() < MINIMUM_TORCH:
        need = ".".join(map(str, MINIMUM_TORCH))
        yield f"compile: needs PyTorch {need} or newer, this is {torch.__version__}; update it, or switch compile off"
        return
    # Names with an underscore need not be listed; every other one is.
    if args.compile_backend not in torch._dynamo.list_backends(exclude_tags=()):
        known = ", ".join(sorted(torch._dynamo.list_backends()))
        yield f"compile_backend: PyTorch has no backend called {args.compile_backend!r}; choose one of {known}"
        return
    if args.compile_backend != "inductor" and args.compile_mode not in (None, "default"):
        yield f"compile_mode: {args.compile_mode} only exists for the inductor backend; use default"
    if disable_linear and args.compile_fullgraph:
        yield "compile_fullgraph: cannot hold while Linear layers are kept out of the graph; switch it off"
    if args.compile_backend == "inductor" and (why := _no_inductor(device)):
        yield f"compile: {why}"


def check_recording(args: Any, device: torch.device, num_shapes: int) -> None:
    """CUDA graphs are recorded for one size each: raises ConfigError where `reduce-overhead` meets several."""
    if args.compile_mode == "reduce-overhead" and device.type == "cuda" and num_shapes > 1:
        raise ConfigError(
            f"compile_mode: reduce-overhead needs images of one size, and this data set has {num_shapes}; "
            "switch enable_bucket off, or use default"
        )


def compile_model(  # noqa: PLR0913 - the signature is a published one
    args: Any,
    model: M,
    target_blocks: Iterable[Sequence[nn.Module]],
    disable_linear: bool = False,
    log_prefix: str = "Model",
    inputs: Mapping[str, Inputs] | None = None,
) -> M:
    """Compile every block of `target_blocks` (a list of lists) in place and return `model`.

    `args` is anything with the six option names. `inputs` (by class name) lets blocks of a class share one graph.
    Raises ConfigError when this machine cannot compile.
    """
    device = _device_of(model)
    blocks = [block for group in target_blocks for block in group]
    if wrong := [*problems(args, device, disable_linear), *_hooked(model, blocks)]:
        raise ConfigError("\n".join(wrong))
    compile_cache.use(getattr(args, "compile_cache_dir", None), device)
    _SETTINGS.want(_settings(args, device))
    LEDGER.listen()
    if device.type == "cuda" and args.compile_mode in ("reduce-overhead", "max-autotune"):
        # What the step before has left in the memory of recorded graphs may be written over from here on.
        model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
    options = torch_compile_options(args)
    learning = {type(block).__name__ for block in blocks if any(p.requires_grad for p in block.parameters())}
    for block in blocks:
        if disable_linear:
            disable_linear_from_compile(block)
        kind, shape = type(block).__name__, _shape(block)
        given = (inputs or {}).get(kind)
        streams = given.streams if given else ()
        dynamic = given.dynamic if given and options["dynamic"] is None else ()
        block.__class__ = _with_door(type(block), shape, streams, dynamic, kind in learning)
        LEDGER.expect(kind, shape)
    if waiting := getattr(args, "compile_compare_steps", 0):
        LEDGER.savings.held, LEDGER.savings.begin = waiting, functools.partial(_begin, blocks, options)
    else:
        _begin(blocks, options)
    shown = ", ".join(f"{k}={v}" for k, v in {"mode": args.compile_mode or "default", **options}.items())
    logger.info("%s: %d blocks, %d graphs (%s)", log_prefix, len(blocks), sum(LEDGER.predicted().values()), shown)
    return model


def _begin(blocks: Iterable[nn.Module], options: Mapping[str, Any]) -> None:
    for block in blocks:
        block.compile(**options)


def _hooked(model: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[str]:
    """Hooks inside of blocks: compiled code ignores those that come and go later, without a word, so none is allowed.

    Hooks of a block itself run around its compiled code, and are welcome.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for block in blocks:
        for inner in block.modules():
            if inner is not block and any(getattr(inner, kind) for kind in HOOKS):
                name = names.get(id(inner)) or type(inner).__name__
                yield f"compile: {name} has a hook, which compiled code would not run; remove it, or switch compile off"


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters() if p.device.type != "cpu"), torch.device("cpu"))


def uncompile_model(model: nn.Module) -> None:
    """Go back to eager blocks. Call it between steps only: forward and backward must not differ."""
    for module in model.modules():
        module._compiled_call_impl = None


def disable_linear_from_compile(module: nn.Module) -> None:
    """Keep every Linear layer of `module` out of compiled graphs. That costs most of the gain."""
    for child in module.modules():
        if isinstance(child, nn.Linear):
            child.forward = torch.compiler.disable(child.forward)


def maybe_uncompile_state_dict(state_dict: dict[str, V]) -> dict[str, V]:
    """Keys without the `_orig_mod.` that wrapped (not in-place) compilation leaves in them; values are not copied."""
    if not any(WRAPPER in key for key in state_dict):
        return state_dict
    cleaned = {key.replace(WRAPPER, ""): value for key, value in state_dict.items()}
    if len(cleaned) != len(state_dict):
        raise ConfigError("this file holds compiled and plain copies of the same weights; keep one of them")
    return cleaned


def is_compile_error(error: BaseException) -> bool:
    """Whether compiling failed, as opposed to the model: out of memory and the like are the model's own."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, torch.OutOfMemoryError):
            return False
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch")):
            return True
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return False


def why(error: BaseException, torch_file: str = torch.__file__) -> str:
    """The line of a compiler's long answer that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if " " in torch_file and any("cannot find" in line for line in lines):
        return "PyTorch cannot compile below a folder with a blank in its name; move the project to another"
    telling = (line for line in lines if "error:" in line.lower())
    return next(telling, lines[0])[:200]


def start_over() -> None:
    """Forget what an earlier training of this process has compiled, or given up to compile."""
    if LEDGER.used:  # also by what never expected a block: compile ids begin anew, and would be taken for its own
        torch._dynamo.reset()
        torch.compiler.set_stance("default")
        LEDGER.clear()


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def _no_inductor(device: torch.device) -> str:
    """Why inductor has no tool chain for this device, or ''."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception:
            return (
                "no C++ compiler was found, and inductor needs one on the CPU; "
                "install one (Debian: apt install g++, Windows: Visual Studio Build Tools), or switch compile off"
            )
        if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
            return (
                "Python's header files were not found (Debian: apt install python3-dev); install them, or switch it off"
            )
        if " " in torch.__file__:
            return "PyTorch cannot compile below a folder with a blank in its name; move the project, or switch it off"
        return ""
    from torch.utils._triton import has_triton

    if has_triton():
        return ""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (7, 0):
        return (
            f"{torch.cuda.get_device_name(device)} is too old for it (needs compute capability 7.0); switch compile off"
        )
    return "Triton was not found; install it (Windows: pip install triton-windows), or switch compile off"


class _Settings(threading.local):
    """PyTorch's switches for compiling, as block-wise compilation needs them.

    Since torch 2.12 a value that is set holds in its own thread only, and backward passes run in others
    (pytorch#186537). So every block asks for `hold` when it is called, which costs nothing where it has been done.
    """

    wanted: ClassVar[list[tuple[Any, str, Any]]] = []  # (config module, name, value), the same for all threads
    held: list[tuple[Any, str, Any]] | None = None

    def want(self, wanted: list[tuple[Any, str, Any]]) -> None:
        """From now on these, in every thread in which a block is compiled."""
        type(self).wanted = wanted
        self.hold()

    def hold(self) -> None:
        """Set them in this thread."""
        if self.held is not self.wanted:
            for module, name, value in self.wanted:
                setattr(module, name, value)
            self.held = self.wanted


_SETTINGS = _Settings()


def _settings(args: Any, device: torch.device) -> list[tuple[Any, str, Any]]:
    """Global switches that block-wise compilation needs."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    import torch.fx.experimental._config as shapes

    wanted = [
        # DDP's splitting would cut a block into several graphs; each block's backward overlaps communication anyway.
        (torch._dynamo.config, "optimize_ddp", False),
        # Text and image lengths that happen to be equal must not be taken for the same size.
        (shapes, "use_duck_shape", False),
        # Convolutions in channels-last order also for varying sizes: otherwise inductor makes the sizes of images
        # constants in the backward of a convolution, and every bucket costs a recompilation.
        (inductor, "force_layout_optimization", True),
        (functorch, "activation_memory_budget", getattr(args, "compile_activation_budget", 1.0)),
    ]
    if args.compile_cache_size_limit and _version() < (2, 13):
        wanted.append((torch._dynamo.config, "recompile_limit", int(args.compile_cache_size_limit)))
    if device.type == "cuda":
        # Repeated dropout masks in fused random kernels, wrong in the recompute (pytorch#198333).
        safe = "align_random_eager" if hasattr(inductor, "align_random_eager") else "fallback_random"
        wanted.append((inductor, safe, True))
        # A recording for every size of image would fill the memory; graphs for varying sizes run without.
        wanted.append((inductor.triton, "cudagraph_skip_dynamic_graphs", True))
    return wanted


def _shape(block: nn.Module) -> Shape:
    """What makes blocks of a class need graphs of their own: sizes and types of their weights, and which learn."""
    return tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())


@functools.cache
def _with_door(
    cls: type[nn.Module],
    shape: Shape,
    streams: tuple[int, ...],
    dynamic: tuple[tuple[int, int], ...],
    learns: bool,
) -> type[nn.Module]:
    """A subclass whose call runs eager code before the compiled one: it tells the ledger where compiling happens, and
    hands every block the same kind of tensors.

    There is one for each shape of a block, with code of its own, so that its graphs are its own as well: SDXL's twelve
    kinds of ResNet block would otherwise count as recompilations of one and exceed PyTorch's limit of 8.
    """
    kind = cls.__name__

    class Door(cls):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            given = list(args)
            # Text encoders that learn reach blocks that do not, through what these are told besides their streams.
            in_graph = learns or any(isinstance(x, Tensor) and x.requires_grad for x in args)
            for position in streams:
                given[position] = _as_inner(given[position], in_graph)
            for position, dimension in dynamic:
                if position < len(given) and isinstance(given[position], Tensor):
                    torch._dynamo.maybe_mark_dynamic(given[position], dimension)
            _SETTINGS.hold()
            with LEDGER.inside(kind):
                return super().__call__(*given, **kwargs)

    Door.forward = copied(cls.forward)
    return under_its_name(Door, cls)


def _as_inner(stream: Tensor, in_graph: bool) -> Tensor:
    """The first block's input looks like every other block's: in one order, and part of the graph of gradients.

    Without this, what stands in front of the first block costs a second graph: strides and requires_grad differ, and
    what comes out of a Linear layer is a view, whose base the graph would be bound to as well.
    Where nothing learns that comes in or is in blocks of the class, asking for a gradient would be work for nothing.
    """
    stream = stream.contiguous(memory_format=torch.channels_last if stream.dim() == 4 else torch.contiguous_format)
    if in_graph and torch.is_grad_enabled() and not stream.requires_grad:
        stream = stream.detach().requires_grad_(True)
    if stream.dim() == 3 and stream._is_view():
        stream = torch.ops.aten._unsafe_view(stream, stream.shape)
    return stream
