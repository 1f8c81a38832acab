"""The kernels that work on this machine's GPU (or CPU), each tried instead of looked up."""

import warnings
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from library.compiler import torch_private
from library.measuring import timing

KERNELS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cuDNN": "CUDNN_ATTENTION", "math": "MATH"}
KERNEL_PACKAGES = {"flash_attn": "flash-attn", "xformers": "xformers", "sageattention": "sageattention"}
SHAPE = {"cuda": (1, 24, 4096, 128), "cpu": (1, 2, 64, 32)}  # batch, heads, tokens, width of a head; FLUX.1 at 1024


def time_attention(device: str) -> dict[str, float]:
    """Return the attention kernels that work here, forward and backward, with the milliseconds of both,
    fastest first.
    """

    def forward_and_backward() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        torch.autograd.grad(out.float().sum(), (q, k, v))

    half = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    dtype = half if device == "cuda" else torch.float32
    q, k, v = (torch.randn(SHAPE[device], device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    milliseconds = {}
    for name, backend in KERNELS.items():
        if backend == "MATH" and device == "cuda":  # always works, but would take gigabytes at this size
            continue
        try:
            with warnings.catch_warnings(action="ignore"), sdpa_kernel(getattr(SDPBackend, backend)):
                milliseconds[name] = timing.measure_call(
                    forward_and_backward, torch.device(device), timing.TimingPlan(steps=5, warmup=1)
                ).p50
        except (RuntimeError, AttributeError):
            continue
    if device == "cuda":  # sorted last, and left out of the times that are shown
        milliseconds["math"] = float("inf")
    return dict(sorted(milliseconds.items(), key=lambda kernel: kernel[1]))


def fp8_works() -> bool:
    """Return whether fp8 products with row scales work and give correct results."""
    a, b = (torch.randn(64, 64, device="cuda") for _ in range(2))
    (x, by_row), (y, by_column) = _quantize_rows(a), _quantize_rows(b)
    try:
        product = torch_private.scaled_mm(x, y.t(), by_row, by_column.t())
    except (RuntimeError, AttributeError, ValueError):
        return False
    expected = (x.float() * by_row) @ (y.float() * by_column).t()
    return bool(torch.allclose(product.float(), expected, rtol=0.05, atol=0.5))


def _quantize_rows(x: Any) -> tuple[Any, Any]:
    scale = x.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn), scale.float()
