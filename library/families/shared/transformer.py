"""Shared modules of transformers over image and text tokens: modulated norms, rotary embeddings, attention.

Shape letters as in the models: B images, S tokens, C hidden width, H heads, D width of one head.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.families.shared.attention import attend, attend_padded

EPS = 1e-6
TIME_CHANNELS = 256  # width of the sinusoids before the embedding MLPs


# One stacked product reads the tokens once instead of three times.
# Why: docs/decisions/2026-11-23-adapters-that-read-the-same.md
def projections(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Return the outputs of several layers for the same input; if all have adapters, with a single down projection."""
    if not all(hasattr(layer, "down_projections") for layer in layers):
        return tuple(layer(x) for layer in layers)
    first: Any = layers[0]
    return tuple(layer(x, hidden) for layer, hidden in zip(layers, first.down_projections(x, layers), strict=True))


def from_condition(layer: nn.Module, vec: Tensor) -> Tensor:
    """Conditioning vector [B, C] -> what a modulation layer returns for its SiLU, [B, outputs].

    If the layer's weight is in host memory, `vec` has its product as well, and the layer returns the rest of its
    output: see library/memory/modulation.py.
    """
    place = getattr(layer, "place_of_product", None)
    if place is None:
        return layer(F.silu(vec))
    rest = layer(F.silu(vec[..., : layer.in_features]))
    return vec[..., place].to(rest.dtype) + rest


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return (1 + scale) * F.layer_norm(x, x.shape[-1:], eps=EPS) + shift


class WeightedRMSNorm(nn.Module):
    """RMS norm with weights, in float32 for any input dtype."""

    def __init__(self, width: int, eps: float = EPS):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same in float32."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)


class TimestepEmbedding(nn.Module):
    """The MLP after the timestep sinusoids. LyCORIS finds the class by its name."""

    def __init__(self, channels: int, hidden: int, outputs: int, bias: bool = True):
        super().__init__()
        self.linear_1 = nn.Linear(channels, hidden, bias)
        self.linear_2 = nn.Linear(hidden, outputs, bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels] in the layers' dtype -> [B, outputs]."""
        # The dtype is not read from the weights, as LyCORIS may have replaced them.
        return self.linear_2(F.silu(self.linear_1(x)))


class TimeTextEmbed(nn.Module):
    """The conditioning vector, of the timestep only, despite its name in files."""

    def __init__(self, hidden: int, bias: bool):
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(TIME_CHANNELS, hidden, hidden, bias)

    def forward(self, timesteps: Tensor, dtype: torch.dtype) -> Tensor:
        """[B] in 0..1 -> [B, C] in the dtype of the layers."""
        return self.timestep_embedder(sinusoids(timesteps).to(dtype))


class FinalLayer(nn.Module):
    """The modulated norm and the projection after the blocks. LyCORIS finds the class by its name."""

    def __init__(self, linear: nn.Linear, **modulation: nn.Module):
        """`modulation`, by its name in files, maps the time embedding to a scale, or to shift and scale."""
        super().__init__()
        ((self._modulation, layers),) = modulation.items()
        self.linear = linear
        self.add_module(self._modulation, layers)

    def forward(self, x: Tensor, temb: Tensor, shared: Tensor | None = None) -> Tensor:
        """x [B, S, C], temb [B, channels], shared [B, 2 * C] to add to shift and scale -> [B, S, outputs]."""
        modulation, width = self.get_submodule(self._modulation)(temb), x.shape[-1]
        modulation = (modulation if shared is None else modulation + shared)[:, None]
        normed = (1 + modulation[..., -width:]) * F.layer_norm(x, (width,), eps=EPS)
        if modulation.shape[-1] > width:
            normed = normed + modulation[..., :width]
        return self.linear(normed.to(x.dtype))


def rotate_pairs(x: Tensor, pe: Tensor) -> Tensor:
    """Apply the rotary embedding: rotate adjacent pairs of channels by the angles of their position.

    x [B, H, S, D], pe [2, S, D / 2] or [2, B, 1, S, D / 2] (cosines, sines); all in float32.
    """
    # Compiled code reads more, and under conditions, where pairs are put together from even and odd channels.
    pairs = x.unflatten(-1, (-1, 2))
    cos, sin = pe[..., None]
    signs = torch.arange(-1, 2, 2, device=sin.device, dtype=sin.dtype)
    rotated = pairs * cos + pairs.flip(-1) * (sin * signs)
    return rotated.flatten(-2).contiguous()  # always in this order in memory, by which attention chooses its plans


def rotated_halves(x: Tensor, pe: Tensor) -> Tensor:
    """Rotate like `rotate_pairs`, but with the channels of the first half paired with those of the second."""
    (first, second), (cos, sin) = x.chunk(2, dim=-1), pe
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class DenseGradient(torch.autograd.Function):
    """The identity for the output of attention [B, H, S, D]; its gradient is contiguous as [B, S, H, D]."""

    # cuDNN's attention caches backward plans by the memory order of q, k and v, but not of this gradient
    # (ATen/native/cudnn/MHA.cpp in torch 2.11 to 2.13). Eager and compiled code order it differently, and a plan of one
    # used by the other read out of bounds.
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """[B, H, S, D], in memory as [B, S, H, D]."""
        return gradients[0].transpose(1, 2).contiguous().transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention by torch: q, k, v [B, H, S, D]; mask [B, S], true where a key is attended to, or None -> [B, S, C]."""
    output = None if mask is None else attend_padded(q, k, v, mask)
    if output is None:
        output = DenseGradient.apply(attend(q, k, v, mask if mask is None else mask[:, None, None, :]))
    return output.transpose(1, 2).flatten(2)


def causal_sdpa(q: Tensor, k: Tensor, v: Tensor, among: Tensor | None) -> Tensor:
    """Attention like `sdpa` of a token to those before it and itself, by a kernel that needs no mask; or, with `among`
    [S, S], to those where it is true -> [B, S, C].
    """
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True) if among is None else attend(q, k, v, among)
    return DenseGradient.apply(output).transpose(1, 2).flatten(2)


def grouped_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention like `sdpa`, of heads of which several share keys and values: q [B, H, S, D], k and v [B, G, S, D],
    where H is a multiple of G -> [B, S, C].
    """
    if mask is not None and (output := attend_padded(q, k, v, mask)) is not None:
        return output.transpose(1, 2).flatten(2)
    # Why: docs/decisions/2026-11-28-heads-that-share-keys-are-rows.md
    number, heads, length, _ = q.shape
    rows = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    output = DenseGradient.apply(attend(rows, k, v, mask if mask is None else mask[:, None, None, :]))
    return output.reshape(number, heads, length, -1).transpose(1, 2).flatten(2)


def finite(x: Tensor) -> Tensor:
    # Some trained activations exceed float16's range.
    return x.clamp(-65504, 65504) if x.dtype == torch.float16 else x


def sinusoids(t: Tensor, channels: int = TIME_CHANNELS, scale: float = 1000.0) -> Tensor:
    """[B] in 0..1 -> [B, channels]: cosines, then sines, of t * scale at frequencies from 1 down to 1/10000."""
    # float32 to the end: in bfloat16 a timestep above 512 would be rounded to a multiple of 4.
    half = channels // 2
    steps = torch.arange(half, dtype=torch.float32, device=t.device)
    angles = scale * t.float()[:, None] * torch.exp(-math.log(10000) * steps / half)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@torch.no_grad()
def rope_axes(head: int) -> tuple[int, int, int]:
    """Return how the width of a head is shared by three axes of a position: 128 gives (16, 56, 56)."""
    # Other widths keep the first axis near one eighth, as a multiple of 4, so that the other two are equal and even.
    if head % 4:
        raise ValueError(f"a head of width {head} cannot be shared by three axes; it must be a multiple of 4")
    first = 4 * max(head // 32, 1)
    return first, (head - first) // 2, (head - first) // 2


def equal_axes(head: int) -> tuple[int, ...]:
    """Return how the width of a head is shared equally by the four axes of a position."""
    if head % 8:
        raise ValueError(f"a head of width {head} cannot be shared by four axes; it must be a multiple of 8")
    return (head // 4,) * 4


def rope(ids: Tensor, axes: tuple[int, ...], theta: float = 10000.0) -> Tensor:
    """Positions [S, axes] -> cosines and sines [2, S, D / 2], computed in float64 and rounded once to float32."""
    exact = torch.float32 if ids.device.type == "mps" else torch.float64  # which Apple's GPUs lack
    angles = []
    for axis, width in enumerate(axes):
        steps = torch.arange(0, width, 2, dtype=exact, device=ids.device) / width
        angles.append(ids[:, axis, None].to(exact) * theta**-steps)
    joined = torch.cat(angles, dim=-1)
    return torch.stack((joined.cos(), joined.sin())).float()


class RopeTableCache:
    """RoPE tables, cached by size of image and length of text."""

    MAX_TABLES = 32  # one for each bucket; 2.3 MB each at 1024 x 1024

    def __init__(self) -> None:
        self.keeps = True
        self._known: dict[tuple[Any, ...], Any] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, sizes: tuple[int, ...], device: torch.device, make: Callable[[], Any]) -> Any:
        """Return the cached table for these sizes on this device, or a new one."""
        if not self.keeps or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return make()  # a cached table may be evicted, but a CUDA graph keeps its address
        key = (*sizes, device)
        table = self._known.pop(key, None)
        if table is None:
            # A table created for sample images is also used in training, which rejects inference tensors.
            with torch.inference_mode(False):
                table = make()
            while len(self._known) >= self.MAX_TABLES:
                self._known.pop(next(iter(self._known)))
        self._known[key] = table
        return table


class DenoiserWithTables(nn.Module):
    """A denoiser that caches its RoPE tables."""

    def __init__(self) -> None:
        super().__init__()
        self._tables = RopeTableCache()

    def as_one_graph(self) -> None:
        # A cached table would become a constant of the compiled graph.
        self._tables.keeps = False
