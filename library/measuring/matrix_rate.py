"""How fast a device multiplies matrices: on paper, and measured."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SECONDS, MOST = 0.4, 2000  # of multiplying, per size
SIZES = {"cuda": (4096, 8192), "cpu": (512, 1024)}

# Dense bf16 matrix products on paper, in TFLOP/s, by a part of the GPU's name. The first that fits counts.
PAPER = {"B200": 2250, "H200": 989, "H100": 989, "H800": 989, "A100": 312, "A800": 312, "L40S": 362,
         "RTX 6000 Ada": 364, "RTX PRO 6000": 500, "A6000": 155, "A40": 150, "L4": 121, "A10": 125, "T4": 65,
         "V100": 112,
         "5090": 210, "5080": 113, "5070 Ti": 88, "5070": 62, "5060": 48, "4090": 165, "4080": 98, "4070 Ti": 80,
         "4070": 58, "4060": 30, "3090": 71, "3080": 60, "3070": 41, "3060": 26}  # fmt: skip


def on_paper(gpu: str) -> float:
    """TFLOP/s of dense bf16 products in the data sheet of a GPU of this name; 0 where that is not known."""
    return next((rate for part, rate in PAPER.items() if part in gpu), 0)


def measured(on: "torch.device", dtype: "torch.dtype") -> dict[str, Any]:
    """The best rate of plain matrix products of this type, in TFLOP/s: what utilisation is measured against."""
    import torch  # the check of a form asks for rates on paper, and must not load it

    from library.measuring import timing

    best: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "tflops": 0.0, "size": 0}
    for size in SIZES[on.type]:
        a, b = (torch.randn(size, size, device=on, dtype=dtype) for _ in range(2))
        plan = timing.TimingPlan(steps=MOST, seconds=SECONDS)
        rate = 2 * size**3 / timing.measure(lambda a=a, b=b: torch.mm(a, b), on, plan).p50 / 1e9
        if rate > best["tflops"]:
            best |= {"tflops": round(rate, 3 if rate < 10 else 1), "size": size}
    return best
