"""Layers of a U-Net that read the same input, computed as one product on a GPU.

A step of SDXL is made of thousands of small kernels. Here the frozen weights of such layers become parts of one matrix;
their names, values and the memory in use stay.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.families.capabilities import JOINED_ON


# Why: docs/decisions/2026-11-29-layers-with-one-input.md
class JointLayers:
    """Linear layers with one input, equal sizes and adapters of equal rank, and the matrix that has their weights."""

    def __init__(self, layers: Sequence[Any]) -> None:
        """`layers` can be joined (see `can_join`); their weights become parts of `matrix` [sum of outputs, inputs]."""
        self.layers, self._classes = tuple(layers), tuple(map(type, layers))
        self.matrix = torch.cat([layer.weight.data for layer in layers])
        for layer, part in zip(layers, self.matrix.chunk(len(layers)), strict=True):
            layer.weight.data = part
        self._addresses = [layer.weight.data_ptr() for layer in layers]

    def has(self, layers: Sequence[Any]) -> bool:
        """Return whether these are still the layers and weights that were joined: files that are applied for images
        replace layers or change their classes.
        """
        return all(
            layer is own and type(layer) is cls and layer.weight.data_ptr() == address
            for layer, own, cls, address in zip(layers, self.layers, self._classes, self._addresses, strict=True)
        )

    def separate(self) -> None:
        """Give each layer that is still joined a weight of its own."""
        for layer, address in zip(self.layers, self._addresses, strict=True):
            if layer.weight.data_ptr() == address:
                layer.weight.data = layer.weight.data.clone()

    def serves(self, x: Tensor) -> bool:
        """Return whether x is multiplied in the matrix's type; in float16 adapters scale their activations."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return self.matrix.dtype == dtype != torch.float16

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what each layer returns for x [..., inputs]: a contiguous tensor [..., outputs]."""
        number, rows = len(self.layers), x.flatten(0, -2)
        outputs = F.linear(rows, self.matrix).unflatten(-1, (number, -1)).transpose(0, 1)  # [layers, rows, outputs]
        if rank_of(self.layers[0]):
            factors = [layer.cached_factors or layer._own_factors(x) for layer in self.layers]
            downs = torch.cat([down for down, _ in factors]).to(outputs.dtype)
            ups = torch.stack([up for _, up in factors]).to(outputs.dtype)
            hidden = F.linear(rows, downs).unflatten(-1, (number, -1)).transpose(0, 1)
            outputs = _AddAdapters.apply(outputs, hidden, ups)
        return outputs.contiguous().unflatten(1, x.shape[:-1]).unbind()


class _AddAdapters(torch.autograd.Function):
    """outputs [layers, rows, outputs] + hidden [layers, rows, rank] @ ups [layers, outputs, rank], transposed."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, hidden: Tensor, ups: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, ups)
        return torch.baddbmm(outputs, hidden, ups.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, ups = ctx.saved_tensors
        # PyTorch's own gradient of `ups` would be transposed in memory; those of all factors are cast at once only if
        # none is.
        return gradients[0], gradients[0] @ ups, gradients[0].transpose(1, 2) @ hidden


def can_join(layers: Sequence[Any]) -> bool:
    """Return whether layers can be joined: frozen, without bias, not in 8 bits, and alike."""
    if not all(map(_is_plain, layers)):
        return False
    kinds = {(layer.weight.shape, layer.weight.dtype, layer.weight.device, rank_of(layer)) for layer in layers}
    _, dtype, device, _ = next(iter(kinds))
    return len(kinds) == 1 and device.type in JOINED_ON and dtype in (torch.bfloat16, torch.float32)


def rank_of(layer: Any) -> int:
    return layer.rank if hasattr(layer, "spec") else 0


def _is_plain(layer: Any) -> bool:
    """Return whether a layer computes nothing but W x and an adapter that drops nothing and adds no noise."""
    if "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks:
        return False  # it may not even have a weight
    is_adapted = bool(vars(type(layer)).get("can_join"))
    if not (type(layer) is nn.Linear or is_adapted) or layer.bias is not None or layer.weight.requires_grad:
        return False
    return not (is_adapted and (layer.spec.drops or layer.spec.noise))


class JointAttention:
    """The attention layers of a U-Net whose projections are joined."""

    def __init__(self, attentions: Iterable[Any]) -> None:
        """Of self-attentions, queries, keys and values are joined; keys and values of all cross-attentions, which read
        the same text, are joined across blocks.
        """
        self._own: list[tuple[Any, JointLayers]] = []
        self._of_text: list[tuple[list[Any], JointLayers]] = []
        readers = defaultdict(list)
        self._attentions = tuple(attentions)
        for attention in self._attentions:
            attention.joint = attention.text_projected = None
            if attention.is_cross_attention:
                readers[attention.inner_kv_dim, rank_of(attention.to_k)].append(attention)
            elif can_join(layers := (attention.to_q, attention.to_k, attention.to_v)):
                attention.joint = JointLayers(layers)
                self._own.append((attention, attention.joint))
        for members in readers.values():
            if can_join(layers := _readers(members)):
                self._of_text.append((members, JointLayers(layers)))

    def separate(self) -> None:
        """Give each layer a weight of its own again: one that is swapped would keep the whole matrix in memory."""
        for attention in self._attentions:
            attention.joint = attention.text_projected = None
        for _, joint in (*self._own, *self._of_text):
            joint.separate()

    def begin_pass(self, text: Tensor) -> None:
        """Give all cross-attentions their keys and values of the text [B, L, text channels]."""
        for attention, joint in self._own:
            attention.joint = joint if joint.has((attention.to_q, attention.to_k, attention.to_v)) else None
        for attentions, joint in self._of_text:
            projected = joint(text) if joint.has(_readers(attentions)) and joint.serves(text) else ()
            pairs = zip(projected[::2], projected[1::2], strict=True) if projected else [None] * len(attentions)
            for attention, pair in zip(attentions, pairs, strict=True):
                attention.text_projected = pair


def _readers(attentions: Iterable[Any]) -> list[Any]:
    return [layer for attention in attentions for layer in (attention.to_k, attention.to_v)]
