"""The modes that inductor compiles with, for the options, the checks and the compiler alike."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from library.config.sections import Compile

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
MODES: tuple[Mode, ...] = get_args(Mode)
# Modes that record CUDA graphs -> the mode that compiles the same code without recording: this trainer records the
# model as a whole, where PyTorch's modes would record block by block.
RECORDED_MODES: Mapping[str, Mode] = MappingProxyType(
    {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
)
TUNED_MODES = ("max-autotune", "max-autotune-no-cudagraphs")  # which time many kernels for each product
# The options that the seconds of compiling depend on.
TIMED_BY = ("compile_backend", "compile_mode", "compile_dynamic", "compile_blocks", "compile_scope")


def is_usual(options: "Compile") -> bool:
    return options.compile_mode == "default" and options.compile_backend == "inductor"


def tunes_kernels(options: "Compile") -> bool:
    return options.compile_mode in TUNED_MODES  # timing kernels takes minutes


def recorded_on_gpu_alone(options: "Compile") -> str:
    # max-autotune is left out, as it tunes kernels on a CPU, too.
    return "" if options.compile_mode == "max-autotune" else options.recorded_by
