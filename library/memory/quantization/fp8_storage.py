"""How weights are stored, and the dtype that a run computes in."""

import itertools
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from library import families
from library.compiler.subclass import EIGHT_BIT, keep_class_name, wanted_type, with_forward
from library.config.run_config import RunConfig
from library.families.base import ModelComponents
from library.families.stored_weights import forget_stored, restore_layer, stored_weight
from library.memory import quantization
from library.memory.quantization import fp8_matmul, int8, int8_matmul, multiplies_in_8_bits, nf4

COMPUTE_TYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FP8_DTYPE = torch.float8_e4m3fn


def compute_type(config: RunConfig) -> torch.dtype:
    return COMPUTE_TYPES[config.precision.mixed_precision]


def storage_type(config: RunConfig) -> torch.dtype:
    """Return the dtype that the denoiser is loaded in.

    Adapters are trained on a frozen base in the compute dtype. A whole model is trained on float32 masters, unless
    `full_bf16` or `full_fp16` is set, or the family is too large for them.
    """
    precision = config.precision
    whole_in_half = precision.full_bf16 or precision.full_fp16
    if config.adapters or whole_in_half or families.facts_of(config.family).trained_in_compute_dtype:
        return compute_type(config)
    return torch.float32


def store_blocks(
    blocks: Iterable[Sequence[nn.Module]],
    config: RunConfig,
    device: torch.device,
    waiting: Collection[nn.Module] = (),
    of_one_row: Container[nn.Module] = (),
) -> None:
    """Store the frozen matrices of the blocks in 8 bits with `fp8_base` (a plain cast, as elsewhere in the ecosystem).

    Matrices are rounded on `device` one at a time and stay there, except for blocks and layers that are `waiting`. With
    `fp8_compute` linear layers also multiply in 8 bits, if the device can. `int8_base` and `int8_compute` do the same
    with integers, and `base_bits = 4` stores linear layers in 4 bits, convolutions in int8. Norms, biases, embeddings
    and everything outside the blocks keep their dtype. With `fp8_transposed_weights`, weights are stored transposed as
    well, except in layers `of_one_row`, whose products are not in fp8.
    """
    precision, waiting_modules = config.precision, {*waiting}
    if not config.adapters:
        return
    multiplies_int8 = precision.int8_base and precision.int8_compute and int8_matmul.supports_int8(device)
    multiplies_fp8 = precision.fp8_compute and fp8_matmul.supports_fp8(device)
    for block in itertools.chain.from_iterable(blocks):
        if precision.fp8_denoiser:
            _store(block, device, device if multiplies_fp8 else None, waiting_modules)
            if multiplies_fp8 and precision.fp8_transposed_weights and not config.memory.blocks_to_swap:
                for layer in block.modules():
                    if layer not in of_one_row and fp8_matmul.multiplies_fp8(layer):
                        fp8_matmul.keep_transposed(layer)
        elif precision.int8_base or precision.nf4_denoiser:
            for layer in frozen_layers(block):
                if not {block, layer} & waiting_modules:
                    layer.weight.data = layer.weight.data.to(device)
                if precision.nf4_denoiser and nf4.fits_nf4(layer):
                    nf4.quantize_nf4_(layer, device)
                else:
                    int8.quantize_int8_(layer, device, multiplies_int8, precision.int8_rotation)


def store_encoders(encoders: Mapping[str, nn.Module], config: RunConfig) -> None:
    """Do the same for layers of text encoders. Call it before they are used or get adapters."""
    if config.adapters and config.precision.fp8_encoders:
        for encoder in encoders.values():
            for layers in (m for m in encoder.modules() if isinstance(m, nn.ModuleList)):
                _store(layers, None)


def store_when_read(components: ModelComponents, config: RunConfig) -> None:
    """Do the same for deferred text encoders as soon as each is read."""
    if not (config.adapters and config.precision.fp8_encoders):
        return

    def stored(name: str, read: Callable[[], nn.Module]) -> nn.Module:
        encoder = read()
        store_encoders({name: encoder}, config)
        return encoder

    for name, source in components.deferred.items():
        if name != "vae":
            components.deferred[name] = replace(
                source, read=partial(stored, name, source.read), kind=f"{source.kind} fp8"
            )


def _store(
    block: nn.Module,
    device: torch.device | None,
    multiply_on: torch.device | None = None,
    waiting: Collection[nn.Module] = (),
) -> None:
    for module in frozen_layers(block):
        stays = block not in waiting and module not in waiting
        storage = device if device and stays else module.weight.device
        if multiply_on and multiplies_in_8_bits(module):
            fp8_matmul.quantize_fp8_(module, multiply_on, storage)
            continue
        if (scaled := stored_weight(module)) and scaled.values.dtype == FP8_DTYPE:
            forget_stored(module)
            module.register_buffer("weight_scale", scaled.factors.to(storage), persistent=False)
            module.weight.data = scaled.values.to(storage)
            module.__class__ = with_forward(type(module), _forward_scaled)
            continue
        restore_layer(module, torch.float32)
        rounded = (
            module.weight.data if module.weight.dtype == FP8_DTYPE else module.weight.data.to(device).to(FP8_DTYPE)
        )
        module.weight.data = rounded.to(storage)
        if type(module) is nn.Linear:
            module.__class__ = StoredLinear
        elif type(module) is nn.Conv2d:
            module.__class__ = StoredConv2d


def _forward_scaled(layer: Any, x: Tensor) -> Tensor:
    """x [..., in] -> [..., out] in the compute dtype, with a weight in fp8 and the scale of its file."""
    dtype = wanted_type(x)
    if quantization.is_one_row(x):
        return quantization.multiply_one_row(x.to(dtype), layer.weight, layer.weight_scale, layer.bias)
    bias = None if layer.bias is None else layer.bias.to(dtype)
    return F.linear(x.to(dtype), (layer.weight.float() * layer.weight_scale[:, None]).to(dtype), bias)


def frozen_layers(block: nn.Module) -> list[Any]:
    layers = [m for m in block.modules() if isinstance(m, nn.Linear | nn.Conv2d) and not m.weight.requires_grad]
    return [layer for layer in layers if "weight_scale" not in layer._buffers]


class StoredLinear(nn.Linear):
    """A linear layer that stores its weight in fewer bits than it computes in."""

    def forward(self, input: Tensor) -> Tensor:
        """Cast the weight to the input's dtype (or autocast's), then multiply."""
        dtype = wanted_type(input)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(input.to(dtype), self.weight.to(dtype), bias)


class StoredConv2d(nn.Conv2d):
    """A convolution that stores its weight in fewer bits than it computes in."""

    def forward(self, input: Tensor) -> Tensor:
        """Cast the weight to the input's dtype (or autocast's), then convolve."""
        dtype = wanted_type(input)
        bias = None if self.bias is None else self.bias.to(dtype)
        return self._conv_forward(input.to(dtype), self.weight.to(dtype), bias)


keep_class_name(StoredLinear, nn.Linear, EIGHT_BIT)  # adapter packages find layers by class name
keep_class_name(StoredConv2d, nn.Conv2d, EIGHT_BIT)
