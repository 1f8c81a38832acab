"""Attention over padded tokens without a mask. With one, cuDNN's kernels are slower and flash attention cannot be used.

Keys and values of padding become zeros. A kernel without a mask then adds 1 to the denominator of a query's softmax for
each padded token, and nothing to the numerator. With L, the logarithm of that denominator, the output is divided by
1 - n * exp(-L), which takes n padded tokens out exactly. The backward kernels get the output and the denominator of the
real tokens alone, and keys of zeros add nothing to the gradient of the queries.

All keys are shifted by their mean first, which no softmax depends on. Then the real tokens' denominator is at least
their number, because exp is convex, and the subtraction loses no digits.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from library.compiler import attention_kernels
from library.families.shared.attention import PaddedAttention

KERNEL_DTYPES = (torch.float16, torch.bfloat16)
LARGEST_HEAD, HEAD_MULTIPLE = 128, 8  # channels of a head that cuDNN and flash attention support in both passes
LARGEST_SHARE = 1 - 2**-20  # of padding in a denominator; less than 1, so images without a real token give zeros


# Always the same function for a kernel, as compiled code is only valid for one.
# Why: docs/decisions/2026-11-29-padding-without-masks.md
@functools.cache
def attention_by(kernel: str) -> PaddedAttention:
    """Return the attention over padded tokens by a kernel of `attention_kernels`."""
    return functools.partial(_attend_padded, kernel)


def _attend_padded(kernel: str, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor | None:
    """Attend from q [B, H, Q, D] to those of k and v [B, G, S, D] for which `real` [B, S] is true; H is a multiple of
    G. Return [B, H, Q, D], or None if the kernel does not support these tensors.
    """
    width = q.shape[-1]
    if width > LARGEST_HEAD or width % HEAD_MULTIPLE or (q.is_cuda and q.dtype not in KERNEL_DTYPES):
        return None
    is_real = real[:, None, :, None]
    number = real.sum(1, dtype=torch.float32)
    # A constant for the gradient: the output does not depend on it.
    total = torch.where(is_real, k.detach(), 0).sum(2, keepdim=True, dtype=torch.float32)
    mean = total / number.clamp(min=1)[:, None, None, None]
    k = torch.where(is_real, k - mean, 0).to(q.dtype)
    return _PaddedAttention.apply(q, k, torch.where(is_real, v, 0), real.shape[1] - number, kernel)


class _PaddedAttention(torch.autograd.Function):
    """q, k, v, the number of padded tokens of each image [B], and the kernel -> [B, H, Q, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, padding: Tensor, kernel: str) -> Tensor:
        output, logarithm = torch.ops.kohya.padded_scaled_dot_product(q, k, v, kernel)
        # Not within the operator: compiled code takes the padding out where it reads the output anyway.
        share = (padding[:, None, None] * torch.exp(-logarithm)).clamp(max=LARGEST_SHARE)
        # Not in place: a checkpoint may keep the first, and compiled code of torch 2.11 would then lose the gradient.
        output = (output * (1 / (1 - share[..., None]))).to(q.dtype)
        logarithm = logarithm + torch.log1p(-share)
        ctx.save_for_backward(q, k, v, output, logarithm)
        ctx.kernel = kernel
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, logarithm = ctx.saved_tensors
        input_gradients = torch.ops.kohya.padded_scaled_dot_product_backward(
            gradients[0], q, k, v, output, logarithm, ctx.kernel
        )
        return *input_gradients, None, None


# The names contain "_scaled_dot_product", by which checkpoints find attention.
@torch.library.custom_op("kohya::padded_scaled_dot_product", mutates_args=())
def padded_forward(q: Tensor, k: Tensor, v: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, Q, D] as if padding were text, in memory like q, and the logarithm of the denominator
    [B, H, Q].
    """
    output, logarithm = attention_kernels.unmasked_attention(kernel, q, k, v)
    return _like(output, q), logarithm


@padded_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("kohya::padded_scaled_dot_product_backward", mutates_args=())
def padded_backward(  # noqa: PLR0913 - what the kernels need
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, logarithm: Tensor, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, in memory like these."""
    # For cuDNN in one order: see `DenseGradient`.
    gradient = gradient.transpose(1, 2).contiguous().transpose(1, 2)
    gradients = attention_kernels.unmasked_attention_backward(kernel, gradient, q, k, v, output, logarithm)
    return _like(gradients[0], q), _like(gradients[1], k), _like(gradients[2], v)


@padded_backward.register_fake
def _(  # noqa: PLR0913
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, logarithm: Tensor, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _like(values: Tensor, x: Tensor) -> Tensor:
    """Return values of x's shape in x's order in memory."""
    like = torch.empty_like(x)
    return values if values.stride() == like.stride() else like.copy_(values)
