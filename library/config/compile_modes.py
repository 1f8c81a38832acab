"""The modes that inductor compiles with, for the options, the checks and the compiler alike."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from library.config.sections import Compile

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
MODES: tuple[Mode, ...] = get_args(Mode)
# Modes that record CUDA graphs -> the mode that compiles the same code without: the model is recorded
# as a whole, and not block by block.
RECORDED_MODES: Mapping[str, Mode] = MappingProxyType(
    {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
)
TUNED_MODES = ("max-autotune", "max-autotune-no-cudagraphs")  # which time many kernels for each product
# The options that the seconds of compiling depend on.
TIMED_BY = ("compile_backend", "compile_mode", "compile_dynamic", "compile_blocks", "compile_scope")


def is_usual(options: "Compile") -> bool:
    """Whether inductor compiles in its default mode."""
    return options.compile_mode == "default" and options.compile_backend == "inductor"


def tunes_kernels(options: "Compile") -> bool:
    """Whether compiling times many kernels, which takes minutes."""
    return options.compile_mode in TUNED_MODES


def recorded_on_gpu_alone(options: "Compile") -> str:
    """The option that asks for CUDA graphs and does nothing without a GPU, "" where none does."""
    return "" if options.compile_mode == "max-autotune" else options.recorded_by  # which tunes kernels of a CPU, too
