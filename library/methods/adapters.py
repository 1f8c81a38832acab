"""Layers that carry a low-rank adapter: W x + up(down(x)), with the scale folded into up.

An adapted layer is a subclass instance in place of the original one. It holds the same weight and bias Parameters, so
names in the base model's state dict stay, and code that looks for nn.Linear still finds it.

No value that varies between layers or steps is a Python number read in `forward`: the scale is a tensor, dropout draws
tensor masks on the device. So all layers of one shape share one graph, which stays valid for any multiplier.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.compiler.subclass import wanted_type
from library.families.shared import empty_weights
from library.families.stored_weights import restore_layer
from library.methods import ggpo


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """The settings of one adapter."""

    rank: int
    alpha: float | int  # the delta is scaled by alpha / rank
    dropout: float = 0.0  # of single values of down(x)
    rank_dropout: float = 0.0  # of rank rows, drawn per image
    module_dropout: float = 0.0  # of the whole adapter, drawn per forward pass
    noise: ggpo.Noise | None = None  # noise added to the output of a linear layer, see ggpo.py
    frozen_down: bool = False  # lora_down keeps its initial values (LoRA-FA)
    split: tuple[int, ...] = ()  # output sizes of separate adapters inside one fused matrix (query, key, value, ...)

    @property
    def drops(self) -> bool:
        return bool(self.dropout or self.rank_dropout or self.module_dropout)


class Adapter(nn.Module):
    """Common parts of adapted layers. `rank` counts the rows of lora_down, over all parts of a fused matrix."""

    spec: AdapterSpec
    weight: Tensor
    alpha: float | int
    multiplier: float
    lora_down: nn.Linear | nn.Conv2d
    lora_up: Any  # the same, or an nn.ModuleList of nn.Linear
    scale: Tensor
    ggpo_base: Tensor
    ggpo_rows: Tensor
    cached_factors: tuple[Tensor, ...] | None = None  # cast and scaled factors of this pass, see factor_cache.py

    @classmethod
    def around(cls, layer: nn.Linear | nn.Conv2d, spec: AdapterSpec, dtype: torch.dtype = torch.float32) -> "Adapter":
        """Return an adapted layer that shares `layer`'s parameters. Its output is the same while lora_up is zero."""
        if spec.noise:
            restore_layer(layer, torch.bfloat16)
        adapted = cls.__new__(cls)
        # Without __init__, which would allocate a new weight. Copy the registries, or the adapter would also appear
        # inside the original layer.
        adapted.__dict__.update({k: v.copy() if isinstance(v, dict | set) else v for k, v in layer.__dict__.items()})
        adapted.spec, adapted.alpha, adapted.multiplier = spec, spec.alpha, 1.0
        device = layer.weight.device
        adapted._add_factors(spec, {"device": device, "dtype": dtype})
        adapted.register_buffer("scale", torch.ones((), device=device), persistent=False)
        adapted.set_multiplier(1.0)
        if spec.noise and isinstance(layer, nn.Linear):
            adapted.register_buffer("ggpo_base", ggpo.typical_row(layer.weight), persistent=False)
            adapted.register_buffer("ggpo_rows", torch.zeros(layer.out_features, device=device), persistent=False)
        return adapted

    @property
    def rank(self) -> int:
        return self.lora_down.weight.shape[0]

    @property
    def ups(self) -> Sequence[Any]:
        return (self.lora_up,)

    @property
    def strength(self) -> float:
        return float(self.alpha) / self.spec.rank

    def factors(self) -> list[Tensor]:
        return [self.lora_down.weight, *(up.weight for up in self.ups)]

    def with_strength(self, factors: Sequence[Tensor]) -> list[tuple[Tensor, float | None]]:
        return [(factor, self.strength if n else None) for n, factor in enumerate(factors)]

    def delta(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        """x [..., in] -> the adapter's contribution to the output [..., out]; `hidden` is down(x) if known."""
        down, *ups = self.cached_factors or self._own_factors(x)
        hidden = self._dropout(self._down(x, down) if hidden is None else hidden)
        if not scaled_in(ups[0].dtype):
            # In float16 the factors would lose the scale, so it is applied to the activations.
            hidden = hidden * self.scale
        output = self._up(hidden, ups)
        if not self.spec.noise or not self.training:
            return output
        # A switched-off adapter must not add noise either.
        return output + ggpo.disturbance(x, self.ggpo_rows * (self.scale != 0)).to(output.dtype)

    @torch.no_grad()
    def note_gradients(self) -> None:
        """Compute the noise strength of the next pass from factors and gradients (GGPO). Call it before a step."""
        if (noise := self.spec.noise) and (gradients := ggpo.gradients_of(self.lora_down, self.ups)):
            up, down, base = self._merged_up(), self.lora_down.weight, self.ggpo_base
            self.ggpo_rows.copy_(ggpo.scales(up, down, gradients, self.strength, base, noise))

    def _own_factors(self, x: Tensor) -> list[Tensor]:
        """Return the factors of a layer that is called directly instead of by its network."""
        down, *ups = self.factors()
        dtype = wanted_type(x)
        return [down.to(dtype), *((up * self.scale if scaled_in(dtype) else up).to(dtype) for up in ups)]

    def set_multiplier(self, multiplier: float) -> None:
        # Only a tensor's value changes, so compiled code stays valid.
        self.multiplier = multiplier
        self.scale.fill_(self.strength * multiplier)

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapter's tensors as in a file, without its name."""
        is_whole = isinstance(self.alpha, int)  # like sd-scripts, store a default alpha as an integer tensor
        parts = len(self.spec.split) or 1
        alpha = torch.tensor(self.alpha * parts, dtype=torch.int64 if is_whole else torch.float32)
        return {"lora_down.weight": self.lora_down.weight, "lora_up.weight": self._merged_up(), "alpha": alpha}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load an adapter from a file with its alpha. Raises ValueError if it does not fit."""
        down, up = tensors["lora_down.weight"], tensors["lora_up.weight"]
        if (file_rank := down.shape[0]) != self.rank:
            raise ValueError(f"has rank {file_rank} in the file and {self.rank} here")
        self.lora_down.weight.copy_(down.reshape(self.lora_down.weight.shape))
        self._take_up(up)
        self.take_alpha(saved_alpha(tensors, down.shape[0]) / (len(self.spec.split) or 1))

    def take_alpha(self, alpha: float) -> None:
        """Set the alpha, and the scale that follows from it."""
        self.alpha = alpha
        # Keep the integer, as its type decides the tensor's type in the saved file.
        if isinstance(self.spec.alpha, int) and self.alpha == self.spec.alpha:
            self.alpha = self.spec.alpha
        self.set_multiplier(self.multiplier)

    def product_norm(self) -> Tensor:
        """Return the Frobenius norm of scale * up @ down at multiplier 1."""
        # The product itself would be as large as the layer.
        down = self.lora_down.weight.float().flatten(1)
        up = self._merged_up().float().flatten(1)
        # ||U D||^2 = sum((U^T U) * (D D^T)): two small matrices instead of one as large as the layer.
        square = ((up.T @ up) * (down @ down.T)).sum().clamp(min=0)
        return square.sqrt() * self.strength

    def __getstate__(self) -> dict[str, Any]:
        # Factors cached during a pass must not travel with a copy.
        return {**self.__dict__, "cached_factors": None}

    def _apply(self, fn: Any, recurse: bool = True) -> "Adapter":
        """Cast or move the adapter, but keep its scale in float32."""
        # Rounding alpha / rank = 1/24 to bfloat16 would be 0.2 % off.
        super()._apply(fn, recurse)
        for name in {"scale", "ggpo_base", "ggpo_rows"} & self._buffers.keys():
            self._buffers[name] = getattr(self, name).float()
        self.set_multiplier(self.multiplier)
        return self

    # ---- defined by linear layers and convolutions

    def _add_factors(self, spec: AdapterSpec, device_and_dtype: dict) -> None:
        raise NotImplementedError

    def _down(self, x: Tensor, down: Tensor) -> Tensor:
        """[..., in] -> [..., rank], or of images [B, in, h, w] -> [B, rank, h', w']."""
        raise NotImplementedError

    def _up(self, hidden: Tensor, ups: Sequence[Tensor]) -> Tensor:
        """[..., rank] -> [..., out], or of images [B, rank, h, w] -> [B, out, h, w]."""
        raise NotImplementedError

    def _merged_up(self) -> Tensor:
        return self.lora_up.weight

    def _take_up(self, up: Tensor) -> None:
        self.lora_up.weight.copy_(up.reshape(self.lora_up.weight.shape))

    def _rank_mask_shape(self, hidden: Tensor) -> tuple[int, ...]:
        raise NotImplementedError

    def _dropout(self, hidden: Tensor) -> Tensor:
        """Apply dropout with masks drawn on the device."""
        # F.dropout under torch.compile repeats its mask on CUDA (pytorch#198333).
        spec = self.spec
        if not spec.drops or not self.training:  # test `drops` first, as reading `training` adds a guard to the graph
            return hidden
        if spec.dropout:  # divided by at least 1e-6, so that a dropout of 1 gives zeros instead of NaN
            hidden = hidden * keep_mask(hidden, hidden.shape, spec.dropout) / max(1 - spec.dropout, 1e-6)
        if spec.rank_dropout:
            hidden = (
                hidden
                * keep_mask(hidden, self._rank_mask_shape(hidden), spec.rank_dropout)
                / max(1 - spec.rank_dropout, 1e-6)
            )
        if spec.module_dropout:  # without rescaling, as in sd-scripts
            hidden = hidden * keep_mask(hidden, (1,), spec.module_dropout)
        return hidden


class LoraLinear(Adapter, nn.Linear):
    """A linear layer with an adapter."""

    can_join = True  # with layers of this very class; see families/shared/joint_layers.py

    def forward(self, input: Tensor, hidden: Tensor | None = None) -> Tensor:
        """[..., in] -> [..., out]; `hidden` [..., rank] if `down_projections` has computed it for several layers."""
        return self.base(input) + self.delta(input, hidden)

    @staticmethod
    def down_projections(x: Tensor, layers: Sequence["LoraLinear"]) -> Sequence[Tensor]:
        # x is then read once, and once more for their gradients.
        downs = torch.cat([(layer.cached_factors or layer._own_factors(x))[0] for layer in layers])
        return F.linear(x, cast_like(downs, x)).split([layer.rank for layer in layers], dim=-1)

    def base(self, x: Tensor) -> Tensor:
        return F.linear(x, cast_like(self.weight, x), None if self.bias is None else cast_like(self.bias, x))

    def _add_factors(self, spec: AdapterSpec, device_and_dtype: dict) -> None:
        self.lora_down = _linear(self.in_features, spec.rank, device_and_dtype)
        self.lora_up = _linear(spec.rank, self.out_features, device_and_dtype)
        _init_factors(self.lora_down, [self.lora_up], spec.frozen_down)

    def _down(self, x: Tensor, down: Tensor) -> Tensor:
        return F.linear(x, cast_like(down, x))

    def _up(self, hidden: Tensor, ups: Sequence[Tensor]) -> Tensor:
        return F.linear(hidden, cast_like(ups[0], hidden))

    def _rank_mask_shape(self, hidden: Tensor) -> tuple[int, ...]:
        return (hidden.shape[0], *(1 for _ in hidden.shape[1:-1]), hidden.shape[-1])


class SplitLoraLinear(LoraLinear):
    """Separate adapters for the parts of a fused matrix: [r, in] and [part, r] for each part.

    In the file they are one adapter: lora_down stacked to [n * r, in], lora_up block-diagonal [out, n * r], and alpha
    times n, so that alpha / rows equals the trained strength.
    """

    @property
    def ups(self) -> Sequence[Any]:
        return [*self.lora_up]

    def _add_factors(self, spec: AdapterSpec, device_and_dtype: dict) -> None:
        self.lora_down = _linear(self.in_features, spec.rank * len(spec.split), device_and_dtype)
        self.lora_up = nn.ModuleList(_linear(spec.rank, size, device_and_dtype) for size in spec.split)
        _init_factors(self.lora_down, self.lora_up, spec.frozen_down)

    def _up(self, hidden: Tensor, ups: Sequence[Tensor]) -> Tensor:
        parts = zip(ups, hidden.chunk(len(ups), dim=-1), strict=True)
        return torch.cat([F.linear(h, cast_like(up, h)) for up, h in parts], dim=-1)

    def _merged_up(self) -> Tensor:
        return torch.block_diag(*(up.weight for up in self.lora_up))

    def _take_up(self, up: Tensor) -> None:
        blocks = [part.chunk(len(self.lora_up), dim=1) for part in up.split(self.spec.split)]
        # Separate adapters are block-diagonal in the file, so one with other values was trained as a whole.
        off_diagonal = [block for i, row in enumerate(blocks) for j, block in enumerate(row) if i != j]
        if any(bool(block.any()) for block in off_diagonal):
            raise ValueError("was trained without split_qkv; leave split_qkv out to continue with it")
        for i, part in enumerate(self.lora_up):
            part.weight.copy_(blocks[i][i])


class LoraConv2d(Adapter, nn.Conv2d):
    """A convolution with an adapter: lora_down has its kernel, stride and padding, lora_up is 1x1."""

    def forward(self, input: Tensor) -> Tensor:
        """[B, in, h, w] -> [B, out, h', w']."""
        return self.base(input) + self.delta(input)

    def base(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, cast_like(self.weight, x), None if self.bias is None else cast_like(self.bias, x))

    def _add_factors(self, spec: AdapterSpec, device_and_dtype: dict) -> None:
        shape: dict[str, Any] = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        kernel: Any = self.kernel_size  # Conv2d annotates these more narrowly than it accepts
        with empty_weights.without_random_init():
            self.lora_down = nn.Conv2d(self.in_channels, spec.rank, kernel, bias=False, **shape, **device_and_dtype)
            self.lora_up = nn.Conv2d(spec.rank, self.out_channels, 1, bias=False, **device_and_dtype)
        _init_factors(self.lora_down, [self.lora_up], spec.frozen_down)

    def _down(self, x: Tensor, down: Tensor) -> Tensor:
        padding: Any = self.padding  # a word or numbers, for which conv2d has separate overloads
        return F.conv2d(x, cast_like(down, x), None, self.stride, padding, self.dilation)

    def _up(self, hidden: Tensor, ups: Sequence[Tensor]) -> Tensor:
        return F.conv2d(hidden, cast_like(ups[0], hidden))

    def _rank_mask_shape(self, hidden: Tensor) -> tuple[int, ...]:
        return (*hidden.shape[:2], 1, 1)


def adapter_class(layer: nn.Module, spec: AdapterSpec) -> type[Adapter] | None:
    """Return the class that adapts this layer, or None."""
    if isinstance(layer, nn.Linear):
        return SplitLoraLinear if spec.split else LoraLinear
    if isinstance(layer, nn.Conv2d) and layer.groups == 1 and layer.padding_mode == "zeros":
        return LoraConv2d
    return None


def cast_like(weight: Tensor, x: Tensor) -> Tensor:
    """Return the weight in the dtype of x; unchanged under autocast."""
    # Autocast caches its own casts, which a cast here would defeat.
    if torch.is_autocast_enabled(x.device.type):
        return weight
    return weight.to(x.dtype)


def scaled_in(dtype: torch.dtype) -> bool:
    # float16 would lose small factors: its smallest positive number is too large.
    return dtype != torch.float16


def keep_mask(like: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
    return (torch.rand(shape, device=like.device) >= p).to(like.dtype)


def factors_fit(weight: Tensor, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a file's adapter factors, of any rank, fit a layer with a weight of this size."""
    down, up, alpha = tensors["lora_down.weight"], tensors.get("lora_up.weight"), tensors.get("alpha")
    if up is None or min(down.ndim, up.ndim) < 2 or (alpha is not None and alpha.numel() != 1):
        return False
    factor_sizes = up.shape[0], up.shape[1], math.prod(down.shape[1:])
    return factor_sizes == (weight.shape[0], down.shape[0], math.prod(weight.shape[1:]))


def saved_alpha(tensors: Mapping[str, Tensor], rank: int) -> float:
    return float(tensors["alpha"]) if "alpha" in tensors else float(rank)


def _linear(inputs: int, outputs: int, device_and_dtype: dict) -> nn.Linear:
    with empty_weights.without_random_init():
        return nn.Linear(inputs, outputs, bias=False, **device_and_dtype)


@torch.no_grad()
def _init_factors(down: nn.Linear | nn.Conv2d, ups: Iterable[Any], frozen: bool = False) -> None:
    """Initialize lora_down like a linear layer, or for LoRA-FA; lora_up with zeros, so that the adapter starts without
    effect.
    """
    weight = down.weight
    # Draw on the host, so that the same seed gives the same adapters on every device.
    drawn = torch.empty_like(weight, device="cpu") if weight.device.type not in ("cpu", "meta") else weight
    if frozen:  # as in sd-scripts, after LoRA-FA (arXiv 2308.03303)
        nn.init.normal_(drawn, std=math.sqrt(2.0 / (weight.shape[0] + weight.shape[1])))
    else:
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))  # the default of nn.Linear and nn.Conv2d
    if drawn is not weight:
        weight.copy_(drawn)
    for up in ups:
        nn.init.zeros_(up.weight)
