"""Adapter files applied beside the layers of a model for sampling, each at a strength that may change between images.

Nothing is merged: each file's contribution is added to a layer's output, so weights in 8 bits or on the host stay
unchanged, and the model with all files off computes exactly the same as without them.
"""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.adapter_files.changes import LayerChange
from library.adapter_files.names import TENSOR_ROLES
from library.compiler.subclass import keep_class_name, wanted_type
from library.config.problems import ConfigError
from library.families.base import Family, ModelComponents
from library.methods import targets
from library.methods.adapters import cast_like, factors_fit, saved_alpha, scaled_in
from library.methods.lora import AdapterLocation, networks
from library.methods.lora_files import by_name, file_of

LORA = ("lora_down.weight", "lora_up.weight")
PLAIN_ROLES = {*LORA, "alpha"}
NORMS = (nn.LayerNorm, nn.GroupNorm)


class AppliedChange:
    """One file's contribution to the output of one layer."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.stored, self.strength = dict(tensors), 0.0
        self.change = LayerChange({TENSOR_ROLES.get(name, name): tensor for name, tensor in tensors.items()})
        self.is_plain = self.stored.keys() <= PLAIN_ROLES
        self._scale = 0.0
        is_number = "alpha" not in self.stored or self.stored["alpha"].numel() == 1  # else `fits` is False
        if self.is_plain and LORA[0] in self.stored and is_number:
            rank = self.stored[LORA[0]].shape[0]
            self._scale = saved_alpha(self.stored, rank) / rank
        self._on_device: dict[str, Tensor] = {}  # filled while the strength is not 0
        self._ready: LayerChange | None = None

    def set_strength(self, strength: float) -> None:
        """Set the strength; 0 switches it off and frees its device memory."""
        if strength != self.strength:
            self._on_device = {}  # they contain the strength
        self.strength = strength
        if not strength:
            self._ready = None

    def delta(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return the contribution to the layer's output for `x`."""
        if isinstance(layer, nn.LayerNorm | nn.GroupNorm):
            return self._of_norm(layer, x)
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        if self.is_plain:
            return self._low_rank(layer, x)
        change = self._on(x.device)
        bias = change.bias(self.strength)
        bias = None if bias is None else cast_like(bias, x)
        if not change.has_weight:
            assert bias is not None
            return bias if isinstance(layer, nn.Linear) else bias[:, None, None]
        base = own_weight(layer, x) if change.uses_weight else _like_weight(layer)
        weight = cast_like(change.delta(base, self.strength), x)
        return F.linear(x, weight, bias) if isinstance(layer, nn.Linear) else layer._conv_forward(x, weight, bias)

    def fits(self, layer: nn.Module) -> bool:
        """Return whether the file's tensors have the sizes of this layer."""
        weight = _like_weight(layer)
        if isinstance(layer, NORMS) != (self.change.kind.title == "norm") or self.change.missing:
            return False
        return factors_fit(weight, self.stored) if self.is_plain else self.change.fits(tuple(weight.shape))

    def _on(self, device: torch.device) -> LayerChange:
        if self._ready is None:
            self._ready = self.change.ready(device)
        return self._ready

    def _low_rank(self, layer: nn.Linear | nn.Conv2d, x: Tensor) -> Tensor:
        down, up = self._factors(x)
        if isinstance(layer, nn.Linear):
            hidden = F.linear(x, down.flatten(1))
        else:
            hidden = layer._conv_forward(x, down.reshape(down.shape[0], *weight_in_use(layer).shape[1:]), None)
        if not scaled_in(up.dtype):
            hidden = hidden * (self.strength * self._scale)
        if isinstance(layer, nn.Linear):
            return F.linear(hidden, up.flatten(1))
        return F.conv2d(hidden, up.reshape(*up.shape[:2], 1, 1))

    def _factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors in the dtype and on the device in which the layer computes, scaled and rounded as in a
        training (factor_cache.py), whose previews are then the images of its file.
        """
        dtype, known = wanted_type(x), self._on_device.get(LORA[0])
        if known is None or known.device != x.device or known.dtype != dtype:
            down, up = (self.stored[name].to(x.device) for name in LORA)
            if scaled_in(dtype):
                up = up.float() * (self.strength * self._scale)
            self._on_device = dict(zip(LORA, (down.to(dtype), up.to(dtype)), strict=True))
        return self._on_device[LORA[0]], self._on_device[LORA[1]]

    def _of_norm(self, layer: nn.LayerNorm | nn.GroupNorm, x: Tensor) -> Tensor:
        change = self._on(x.device)
        weight = change.delta(weight_in_use(layer).float(), self.strength)
        bias = change.bias(self.strength)
        if isinstance(layer, nn.GroupNorm):
            return F.group_norm(x.float(), layer.num_groups, weight, bias, layer.eps)
        return F.layer_norm(x.float(), layer.normalized_shape, weight, bias, layer.eps)


class AppliedLoras:
    """Adapters of any kind applied to a model, and to its text encoders if a file was trained for them."""

    def __init__(self, components: ModelComponents, family: Family) -> None:
        self._layers, self._family = {}, family.config.family
        self._changes: dict[Path, list[AppliedChange]] = {}
        self._changed_layers: dict[nn.Module, list[AppliedChange]] = {}
        self._own_classes: dict[nn.Module, type[nn.Module]] = {}  # of layers while files are applied
        self._own_forwards: dict[nn.Module, Any] = {}  # of those whose weight an adapter has taken
        self.changes_text = False  # whether a file adapts a text encoder
        for part, root in networks(components).items():
            root = getattr(root, "module", root)  # a distributed wrapper would add to the layers' paths
            for path, name, layer in adaptable_layers(root, part, family):
                for file_name in filter(None, (name, AdapterLocation(part, path).alias)):
                    self._layers[file_name] = part, layer

    def add(self, path: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Add a file, which is read unless its tensors are given; it starts switched off. Raises ConfigError if it is
        no adapter, or for another model.
        """
        adapters = by_name(file_of(path, self._family) if tensors is None else tensors)
        matching = {name: tensors for name, tensors in adapters.items() if name in self._layers}
        if not matching:
            raise ConfigError("{path} holds nothing for this model: choose a LoRA that was trained for it", path=path)
        self._changes[path] = []
        for name, parts in matching.items():
            part, layer = self._layers[name]
            change = AppliedChange(parts)
            if change.change.missing and not change.change.parts.keys() & TENSOR_ROLES.values():
                raise ConfigError(
                    "{path} holds {name}, which is neither LoRA nor a kind of LyCORIS", path=path, name=name
                )
            if not change.fits(layer):
                raise ConfigError(
                    "{path}: {name} has another size than this model's layer: it is for another model",
                    path=path,
                    name=name,
                )
            self.changes_text = self.changes_text or part != "denoiser"
            self._changes[path].append(change)
            self._changed_layers.setdefault(layer, []).append(change)

    def remove(self) -> None:
        """Take all files off the model, which is then as if none had ever been added."""
        for layer, cls in self._own_classes.items():
            layer.__class__ = cls
            del layer.__dict__["_applied_changes"]
        for layer, forward in self._own_forwards.items():
            layer.__dict__["forward"] = forward
        self._own_classes, self._changed_layers, self._changes, self._own_forwards = {}, {}, {}, {}

    def set(self, strengths: Mapping[Path, float]) -> None:
        """Set the strengths of these files; switch all others off."""
        for path, changes in self._changes.items():
            for change in changes:
                change.set_strength(strengths.get(path, 0.0))
        # Not before the model is prepared: storing a layer in 8 bits depends on its class.
        for layer, changes in self._changed_layers.items():
            if layer not in self._own_classes:
                self._own_classes[layer] = type(layer)
                layer.__class__ = _with_changes(type(layer))
                if getattr(layer, "weight", None) is None:  # the adapter computes all of the layer
                    self._own_forwards[layer] = vars(layer)["forward"]
                    layer.__dict__["forward"] = functools.partial(_with_contributions, layer, self._own_forwards[layer])
            layer.__dict__["_applied_changes"] = changes


def weight_in_use(layer: Any) -> Tensor:
    """Return a layer's weight, which LyCORIS' full takes from it and trains in its adapter."""
    weight = getattr(layer, "weight", None)
    return layer.adapter.weight if weight is None else weight


def _base_weight(layer: Any) -> Tensor:
    weight = getattr(layer, "weight", None)
    return layer.adapter.org_weight if weight is None else weight


def _like_weight(layer: Any) -> Tensor:
    """Return a tensor without memory of the shape of a layer's weight, which in 4 bits is stored in another."""
    shape = (layer.out_features, layer.in_features) if isinstance(layer, nn.Linear) else weight_in_use(layer).shape
    return torch.empty(shape, device="meta")


@torch.no_grad()
def own_weight(layer: nn.Linear | nn.Conv2d, x: Tensor) -> Tensor:
    """Return a layer's weight in the base model, in float32 on the device of `x`, however it is stored, and whatever an
    adapter that is trained makes of it.
    """
    weight = _base_weight(layer)
    if "weight_scale" not in layer._buffers:
        return weight.to(x.device, torch.float32)
    # A weight in 8 bits may be stored rotated, but the layer's output for the identity is the transposed weight.
    if isinstance(layer, nn.Linear):
        identity = torch.eye(layer.in_features, device=x.device, dtype=x.dtype)[None]
        # A layer whose own product is computed ahead returns zeros for it (library/memory/modulation.py); the base of
        # one with a LoRA is without that.
        names = ("whole_product", "base", "unchanged", "forward")
        product = next(getattr(layer, name) for name in names if hasattr(layer, name))
        output = product(identity)[0].float()
        return (output if layer.bias is None else output - layer.bias.float()).T.contiguous()
    scale = layer.get_buffer("weight_scale").view(-1, *(1 for _ in weight.shape[1:]))
    return (weight.float() * scale).to(x.device)


def adaptable_layers(root: nn.Module, part: str, family: Family) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield path, file name and module of everything that an adapter may change."""
    for target in targets.find_target_layers(root, part, family.adapter_name, ()):
        yield target.path, target.name, target.layer
    for path, module in root.named_modules():
        if isinstance(module, NORMS) and (hasattr(module, "adapter") or module.weight is not None):
            yield path, family.adapter_name(part, path), module


def _with_contributions(layer: nn.Module, forward: Any, x: Tensor, *more: Tensor) -> Tensor:
    output = forward(x, *more)
    for change in layer.__dict__["_applied_changes"]:
        if change.strength:
            output = output + change.delta(layer, x).to(output.dtype)
    return output


# Compiled blocks would ignore hooks. Why: docs/decisions/2026-11-20-no-hooks-inside-compiled-blocks.md
@functools.cache
def _with_changes(cls: type[nn.Module]) -> type[nn.Module]:
    class Changed(cls):
        def unchanged(self, *inputs: Tensor) -> Tensor:
            return super().forward(*inputs)

        def forward(self, x: Tensor, *more: Tensor) -> Tensor:
            return _with_contributions(self, super().forward, x, *more)

    return keep_class_name(Changed, cls)
