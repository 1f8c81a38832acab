"""Modulation layers in host memory: their weights are copied to the device once in each forward pass.

They read only a vector of the time and pooled text, so their products are a few rows, which are appended to that vector
as the block's input. Recomputing the block in the backward pass needs no weight again, so this costs half of the copies
that swapping them would.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.compiler.subclass import keep_class_name, wanted_type
from library.families.capabilities import JOINED_ON, BlockModulation
from library.memory import swapping


def modulation_layers(block: nn.Module, plan: Mapping[str, BlockModulation]) -> list[Any]:
    """Return the modulation layers of a block by its family's plan."""
    modulation = plan.get(type(block).__name__)
    return [block.get_submodule(path) for path in modulation.layers] if modulation else []


# Why: docs/decisions/2026-11-29-modulation-in-host-memory.md
class OffloadedModulation:
    """The modulation layers of a denoiser, with frozen weights in host memory; adapters on them stay on the device."""

    def __init__(self, denoiser: nn.Module, plan: Mapping[str, BlockModulation], device: torch.device) -> None:
        """`plan` says which layers they are, by class of block."""
        blocks = [block for block in denoiser.modules() if modulation_layers(block, plan)]
        self._layers = {block: modulation_layers(block, plan) for block in blocks}
        self._arguments = {block: plan[type(block).__name__].argument for block in blocks}
        self._numbers = {block: number for number, block in enumerate(blocks)}
        self._own_classes = {layer: type(layer) for layers in self._layers.values() for layer in layers}
        self._swap = swapping.Swap(blocks, device, parts=lambda block: [layer.weight for layer in self._layers[block]])
        self._joint: dict[nn.Module, _JointProduct] = {}

    @property
    def weights(self) -> list[nn.Parameter]:
        return self._swap.weights

    def attach(self) -> None:
        """Pass the products to blocks when they are called. Call it after the blocks are compiled."""
        for block, layers in self._layers.items():
            if self._swap.device.type in JOINED_ON and are_one_matrix(layers):
                self._joint[block] = _JointProduct(layers)
            end = layers[0].in_features
            for layer in layers:
                layer.__class__ = _without_product(type(layer))
                begin, end = end, end + layer.out_features
                vars(layer)["place_of_product"] = slice(begin, end)
            vars(block)[swapping.MODULATION] = self
            swapping.fetch_when_called(block)

    def undo(self) -> None:
        """Restore ordinary layers with weights in host memory."""
        self._swap.undo()
        for layer, cls in self._own_classes.items():
            layer.__class__ = cls
            vars(layer).pop("place_of_product", None)

    def add_products(self, block: nn.Module, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return a block's arguments with its products behind the conditioning vector, [B, C + outputs of all]."""
        argument = self._arguments[block]
        vec = args[argument]
        if vec.requires_grad and torch.is_grad_enabled():
            products = _Products.apply(vec, self, block)
        else:
            products = self.products(block, vec)
        return (*args[:argument], torch.cat((vec, products), dim=-1), *args[argument + 1 :])

    def products(self, block: nn.Module, vec: Tensor, forward: bool = True) -> Tensor:
        """vec [B, C] -> its products with the frozen weights of a block's modulation, [B, outputs of all].

        `forward` decides which block's weights are fetched next.
        """
        self._swap.use(self._numbers[block], forward)
        x = F.silu(vec)
        if block in self._joint:
            return self._joint[block](x)
        return torch.cat([layer.whole_product(x) for layer in self._layers[block]], dim=-1)


def are_one_matrix(layers: Sequence[Any]) -> bool:
    """Return whether frozen weights follow each other in memory, and are one matrix with a scale per row or none."""
    ends = [layer.weight.data_ptr() + layer.weight.nbytes for layer in layers]
    follow = all(layer.weight.data_ptr() == end for layer, end in zip(layers[1:], ends, strict=False))
    alike = len({"weight_scale" in layer._buffers for layer in layers}) == 1
    return follow and alike and not any({"rotation", "scale_code"} & layer._buffers.keys() for layer in layers)


class _JointProduct:
    """The product with all modulation layers of a block at once: few kernels, as the host launches them block by block
    in the forward pass. Scales are applied to the sums, in float32.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        """`layers` can be joined."""
        self._first, self._rows = layers[0], sum(layer.out_features for layer in layers)
        self._scale, self._bias = _joined(layers, "weight_scale"), _joined(layers, "bias")

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, in] -> [B, outputs of all]; the weights are on the device."""
        dtype, inputs = wanted_type(x), self._first.in_features
        matrix = self._first.weight.data.as_strided((self._rows, inputs), (inputs, 1)).to(dtype)
        output = F.linear(x.to(dtype), matrix).float()
        if self._scale is not None:
            output = output * self._scale
        return (output if self._bias is None else output + self._bias).to(dtype)


def _joined(layers: Sequence[Any], name: str) -> Tensor | None:
    """Return the values of this name of all layers, one after another in float32; None if a layer has none."""
    if any(getattr(layer, name, None) is None for layer in layers):
        return None
    return torch.cat([getattr(layer, name).data.float() for layer in layers])


class _Products(torch.autograd.Function):
    """The products with a gradient for the vector, for which the weights are copied once more."""

    @staticmethod
    def forward(ctx: Any, vec: Tensor, modulation: OffloadedModulation, block: nn.Module) -> Tensor:
        ctx.modulation, ctx.block = modulation, block
        ctx.save_for_backward(vec)
        return modulation.products(block, vec)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        with torch.enable_grad():
            vec = ctx.saved_tensors[0].detach().requires_grad_()
            products = ctx.modulation.products(ctx.block, vec, forward=False)
            (gradient,) = torch.autograd.grad(products, vec, gradients[0])
        return gradient, None, None


@functools.cache
def _without_product(cls: type[Any]) -> type[Any]:
    """Return a subclass of a layer that returns zeros for its weight's product; bias and adapters still apply."""
    product = "base" if hasattr(cls, "base") else "forward"

    class WithoutProduct(cls):
        def whole_product(self, x: Tensor) -> Tensor:
            """x [..., in] -> [..., out], with the weight, which is on the device, and the bias."""
            return getattr(super(), product)(x)

    def zeros(self: Any, x: Tensor) -> Tensor:
        return x.new_zeros((*x.shape[:-1], self.out_features), dtype=wanted_type(x))

    setattr(WithoutProduct, product, zeros)
    return keep_class_name(WithoutProduct, cls)
