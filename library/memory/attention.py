"""Which of PyTorch's attention kernels comes first, and the two switches that let a GPU compute faster."""

from typing import Any

import torch

# By compute capability: from the kernel that is fastest in training to the one that always works. cuDNN's was measured
# 1.7 to 2.3 times as fast as flash attention on Hopper, and slower on Ampere and on RTX PRO cards
# (huggingface/transformers#48163), so all others keep PyTorch's own order.
ORDERS: dict[tuple[int, int], tuple[str, ...]] = {
    (9, 0): ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"),
}
CUDNN = 90000  # versions before 9 had wrong gradients for some strides (pytorch#138581)
OWN = "PyTorch's order"


def prefer(device: torch.device) -> str:
    """Put the fastest attention kernel for this GPU first; returns its name for the run's record, "" on the CPU.

    The others stay in line for shapes and masks that the first cannot do. Compiled blocks keep what they were compiled
    with, so this comes before compiling.
    """
    if device.type != "cuda":
        return ""
    order = ORDERS.get(torch.cuda.get_device_capability(device))
    if not order or (torch.backends.cudnn.version() or 0) < CUDNN or not hasattr(torch._C, "_set_sdp_priority_order"):
        return OWN
    from torch.nn.attention import SDPBackend

    first = [int(getattr(SDPBackend, name)) for name in order]
    rest = [kernel for kernel in torch._C._get_sdp_priority_order() if kernel not in first]
    torch._C._set_sdp_priority_order(first + rest)
    return order[0]


def switches(options: Any) -> None:
    """`cuda_allow_tf32` and `cuda_cudnn_benchmark`, for matrix products and convolutions that are left in float32."""
    torch.set_float32_matmul_precision("high" if options.cuda_allow_tf32 else "highest")
    torch.backends.cudnn.benchmark = options.cuda_cudnn_benchmark
