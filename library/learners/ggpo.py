"""GGPO: noise in an adapted layer's answer while it learns, larger where weights and gradients are.

sd-scripts adds x P^T, P random of the weight's shape, each row i scaled by
(sigma * |W_i + dW_i| + beta * |G_i|^2) / sqrt(out). |W_i| is the mean over all rows of the frozen weight, dW = s U D
the adapter's product and G = s (U gD + gU D) what its gradient means for the weight, U being lora_up, D lora_down.

Neither dW nor G is ever formed: the squared length of row i of A B is A_i (B B^T) A_i^T, and B B^T is as small as the
rank.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Noise = tuple[float, float]  # sigma, beta


def typical_row(weight: Tensor) -> Tensor:
    """The mean length of a weight's rows, a float32 scalar where the weight is."""
    return weight.detach().float().norm(dim=1).mean()


def scales(up: Tensor, down: Tensor, gradients: tuple[Tensor, Tensor], s: float, base: Tensor, noise: Noise) -> Tensor:
    """How strong the noise of each row is: up [out, r], down [r, in], the gradients of both -> [out], float32."""
    u, d, (gu, gd) = up.float(), down.float(), (g.float() for g in gradients)
    own = s * s * ((u @ (d @ d.T)) * u).sum(1)
    both = (u @ (gd @ gd.T)) * u + 2 * (u @ (gd @ d.T)) * gu + (gu @ (d @ d.T)) * gu
    gradient = s * s * both.sum(1)
    sigma, beta = noise
    return (sigma * (base**2 + own.clamp(min=0)).sqrt() + beta * gradient.clamp(min=0)) / up.shape[0] ** 0.5


def disturbance(x: Tensor, rows: Tensor) -> Tensor:
    """[..., in] -> [..., out]: x times a new random matrix whose rows are scaled by `rows` [out]."""
    random = torch.randn(rows.shape[0], x.shape[-1], device=x.device, dtype=x.dtype)
    answer = F.linear(x, random)
    return answer * rows.to(answer.dtype)


def gradients_of(down: nn.Module, ups: list[nn.Module]) -> tuple[Tensor, Tensor] | None:
    """The gradients of lora_up and lora_down; None where they do not learn."""
    found = [layer.weight.grad for layer in (down, *ups)]
    if any(gradient is None for gradient in found):
        return None
    return (found[1] if len(ups) == 1 else torch.block_diag(*found[1:])), found[0]
