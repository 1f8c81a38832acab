"""Attention of a denoiser's blocks: PyTorch's, or a function without gradients that takes its place for images."""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [B, H, S, D] -> [B, H, S, D]
PaddedAttention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor | None]  # with a mask [B, S] of the keys
_for_images: Attention | None = None
_for_padding: PaddedAttention | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend from q to k and v, each [B, H, S, D]; `mask` broadcasts to [B, H, S, S], true where a key counts."""
    # In this order, so that graphs of a training, which compute gradients, do not depend on the rest.
    if not torch.is_grad_enabled() and _for_images is not None and mask is None:
        return _for_images(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attend_padded(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor | None:
    """Attend from q [B, H, Q, D] to those of k and v [B, G, S, D] for which `real` [B, S] is true, without a mask; H is
    a multiple of G. Return [B, H, Q, D], or None if this needs a mask here.
    """
    return None if _for_padding is None else _for_padding(q, k, v, real)


def replace_masks(attention: PaddedAttention | None) -> None:
    """Use `attention` instead of masks of padding from now on, wherever it returns a result; None for masks."""
    global _for_padding
    _for_padding = attention


@contextlib.contextmanager
def replaced_for_images(attention: Attention | None) -> Iterator[None]:
    """Within this context, calls without gradients and masks use `attention`."""
    global _for_images
    before, _for_images = _for_images, attention
    try:
        yield
    finally:
        _for_images = before
