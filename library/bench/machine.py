"""The hardware to measure on, and its free memory."""

import platform

import psutil
import torch

from library.config.json_types import JsonObject
from library.config.problems import ConfigError, first_line
from library.measuring import timing


def choose_device(requested: str) -> torch.device:
    """Return the device to measure on; `auto` prefers a GPU. Raises ConfigError for a missing one."""
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(requested)
        if device.type == "cuda":
            torch.cuda.get_device_properties(device)
            # CUDA events, streams and Triton's kernels belong to the current GPU, even if tensors are elsewhere.
            torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device.index)
            return torch.device("cuda", torch.cuda.current_device())
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            "--device {asked} cannot be used here ({why}); use auto or cpu",
            asked=requested,
            why=first_line(error)[:160],
        ) from error
    if device.type not in timing.MATRICES:
        raise ConfigError("--device {asked}: only cuda and cpu can be measured", asked=requested)
    return device


def half_type(on: torch.device) -> str:
    """Return the fast `mixed_precision` of this device; `no` for a CPU."""
    if on.type != "cuda":
        return "no"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def measured_machine(on: torch.device) -> JsonObject:
    """Return what a reader of the results needs to know about the machine."""
    facts: JsonObject = {
        "device": on.type,
        "name": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    if on.type == "cuda":
        properties = torch.cuda.get_device_properties(on)
        facts |= {
            "name": properties.name,
            "memory_gb": round(properties.total_memory / timing.BYTES_PER_GIB, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return facts


def free_bytes(on: torch.device) -> int:
    """Return the bytes available to a model."""
    if on.type == "cuda":
        return torch.cuda.mem_get_info(on)[0]
    return psutil.virtual_memory().available
