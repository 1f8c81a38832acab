"""Attention kernels of PyTorch that also return the softmax's denominator, which nothing public does.

Kernels: "cudnn", "flash" and, for tests on a CPU, "cpu".
"""

import torch
from torch import Tensor


def unmasked_attention(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attend from q [B, H, Q, D] to k and v [B, G, S, D], where H is a multiple of G -> output [B, H, Q, D] and the
    logarithm of the softmax's denominator [B, H, Q] in float32.
    """
    if kernel == "cudnn":
        output, logarithm = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[:2]
    elif kernel == "flash":
        output, logarithm = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[:2]
    else:
        output, logarithm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return output, logarithm.reshape(q.shape[:3])


def unmasked_attention_backward(  # noqa: PLR0913 - what the kernels need
    kernel: str, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, logarithm: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, from the results of `unmasked_attention` and the gradient of its output."""
    tensors, aten = (gradient, q, k, v, output), torch.ops.aten
    lengths, dropout = (None, None, q.shape[2], k.shape[2]), (0.0, False)
    unused = torch.empty(2, dtype=torch.int64, device=q.device)  # dropout's random numbers
    if kernel == "cudnn":
        return aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, logarithm[..., None], unused, unused, None, *lengths, *dropout
        )
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention_backward(
            *tensors, logarithm, *lengths, *dropout, unused, unused
        )
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, logarithm, *dropout)
