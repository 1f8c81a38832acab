"""Model FLOPs utilization (MFU): the share of a GPU's peak that the steps of a training reach."""

from collections import Counter

import torch

from library.config.run_config import RunConfig
from library.data.caches import LATENT
from library.data.loading import Kind, latent_area
from library.measuring import timing
from library.measuring.model_stats import model_stats
from library.measuring.operations import data_sheet_rate, operations_of_image


def step_operations(config: RunConfig, kinds: Counter[Kind]) -> float:
    """Return the floating point operations of a mean step of one process, by the kinds of its batches
    (`Batches.kinds`).
    """
    model, done = model_stats(config), 0.0
    for kind, number in kinds.items():
        width, height = kind[2], latent_area(kind) // (kind[0] * kind[2])  # of one image with as many pixels
        done += number * kind[0] * operations_of_image(config, model, (width * LATENT, height * LATENT))
    return done / kinds.total() * config.steps.gradient_accumulation_steps


def utilization(operations: float, seconds: float, device: torch.device) -> dict[str, float]:
    """Return TFLOP/s of such steps, the GPU's peak, and their ratio; empty on a CPU.

    The peak is the data sheet's for bf16, or measured for an unknown GPU if memory is left.
    """
    if device.type != "cuda":
        return {}
    rate = data_sheet_rate(torch.cuda.get_device_name(device))
    try:
        rate = rate or timing.matmul_rate(device, torch.bfloat16)["tflops"]
    except torch.OutOfMemoryError:
        return {}
    reached = operations / seconds / 1e12
    return {"tflops": round(reached, 1), "gpu_tflops": rate, "share": round(reached / rate, 3)}


def utilization_sentence(reached: dict[str, float]) -> str:
    rates = f"about {reached['tflops']:.3g} of {reached['gpu_tflops']:g} TFLOP/s"
    return f"The steps reached {reached['share']:.0%} of this GPU's bf16 matrix rate ({rates})."
