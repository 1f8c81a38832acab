"""GGPO: noise added to an adapted layer's output in training, larger where weights and gradients are large.

sd-scripts adds x P^T, P random of the weight's shape, each row i scaled by (sigma * |W_i + dW_i| + beta * |G_i|^2) /
sqrt(out). |W_i| is the mean over all rows of the frozen weight, dW = s U D the adapter's product and G = s (U gD + gU
D) the implied gradient of the weight, with U = lora_up, D = lora_down.

Neither dW nor G is formed: the squared length of row i of A B is A_i (B B^T) A_i^T, and B B^T is as small as the rank.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Noise = tuple[float, float]  # sigma, beta
MAX_STACKED = 2**23  # most adapter values that are processed together


def typical_row(weight: Tensor) -> Tensor:
    """Return the mean length of a weight's rows, a float32 scalar on the weight's device."""
    return weight.detach().float().norm(dim=1).mean()


def scales(up: Tensor, down: Tensor, gradients: tuple[Tensor, Tensor], s: float, base: Tensor, noise: Noise) -> Tensor:
    """Return the noise strength of each row: up [out, r], down [r, in], the gradients of both -> [out], float32."""
    u, d, (gu, gd) = up.float(), down.float(), (g.float() for g in gradients)
    product = s * s * ((u @ (d @ d.T)) * u).sum(1)
    gradient = s * s * squares((u, d), (gu, gd))
    sigma, beta = noise
    return (sigma * (base**2 + product.clamp(min=0)).sqrt() + beta * gradient.clamp(min=0)) / up.shape[0] ** 0.5


def squares(factors: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor]) -> Tensor:
    """Return the squared length of each row of U gD + gU D: [..., out, r] and [..., r, in], both twice ->
    [..., out].
    """
    (u, d), (gu, gd) = factors, gradients
    # |u gD + gU d|^2 = |u gD|^2 + 2 <u gD, gU d> + |gU d|^2, each term as in the module's docstring.
    terms = (u @ (gd @ gd.mT)) * u + 2 * (u @ (gd @ d.mT)) * gu + (gu @ (d @ d.mT)) * gu
    return terms.sum(-1)


@torch.no_grad()
def mean_gradient(adapters: Iterable[Any]) -> Tensor | None:
    """Return sd-scripts' `norm/avg_grad_norm`: the mean length of G's rows, averaged over trained linear adapters; None
    if there are none.
    """
    # Adapters of one shape are stacked, as far as that takes little memory.
    by_shape: dict[Any, list[Any]] = {}
    for adapter in adapters:
        up, down = adapter.lora_up, adapter.lora_down
        learns = isinstance(up, nn.Linear) and up.weight.grad is not None and down.weight.grad is not None
        if learns:  # sd-scripts leaves out split adapters, too
            by_shape.setdefault((up.weight.shape, down.weight.shape, up.weight.device), []).append(adapter)
    means = []
    for (up, down, _), members in by_shape.items():
        size = max(1, MAX_STACKED // (up.numel() + down.numel()))
        for first in range(0, len(members), size):
            batch = members[first : first + size]
            ups, downs = [a.lora_up.weight for a in batch], [a.lora_down.weight for a in batch]
            u, d, gu, gd = (
                torch.stack(tensors).float() for tensors in (ups, downs, [w.grad for w in ups], [w.grad for w in downs])
            )
            lengths = squares((u, d), (gu, gd)).clamp(min=0).sqrt().mean(-1)
            means.append(lengths * torch.tensor([a.strength for a in batch]).to(lengths.device, non_blocking=True))
    return torch.cat([m.to(means[0].device) for m in means]).mean() if means else None


def disturbance(x: Tensor, rows: Tensor) -> Tensor:
    """[..., in] -> [..., out]: multiply x by a new random matrix whose rows are scaled by `rows` [out]."""
    random = torch.randn(rows.shape[0], x.shape[-1], device=x.device, dtype=x.dtype)
    output = F.linear(x, random)
    return output * rows.to(output.dtype)


def gradients_of(down: nn.Linear | nn.Conv2d, ups: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
    """Return the gradients of lora_up and lora_down; None if they are not trained."""
    gradients = [gradient for layer in (down, *ups) if (gradient := layer.weight.grad) is not None]
    if len(gradients) <= len(ups):
        return None
    return (gradients[1] if len(ups) == 1 else torch.block_diag(*gradients[1:])), gradients[0]
