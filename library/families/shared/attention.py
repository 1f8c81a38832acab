"""Attention of a denoiser's blocks: PyTorch's, or a function without gradients that takes its place for images."""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [B, H, S, D] -> [B, H, S, D]
_for_images: Attention | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend from q to k and v, each [B, H, S, D]; `mask` broadcasts to [B, H, S, S], true where a key counts."""
    # In this order, so that graphs of a training, which compute gradients, do not depend on the rest.
    if not torch.is_grad_enabled() and _for_images is not None and mask is None:
        return _for_images(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@contextlib.contextmanager
def replaced_for_images(attention: Attention | None) -> Iterator[None]:
    """Within this context, calls without gradients and masks use `attention`."""
    global _for_images
    before, _for_images = _for_images, attention
    try:
        yield
    finally:
        _for_images = before
