"""LoRA files applied beside the layers of a model for sampling, each at a strength that may change between images.

Nothing is merged: what each file adds is summed to the output of a layer, so that weights in 8 bits or on the host stay
as they are, and the model with all files off computes exactly what it does without them.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.config.problems import ConfigError
from library.families.base import Family, ModelComponents
from library.methods import targets
from library.methods.adapters import cast_like, fits, saved_alpha
from library.methods.lora import AdapterLocation, by_name, file_of, networks

LORA, LOHA = ("lora_down.weight", "lora_up.weight"), ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
LOKR = ("lokr_w1", "lokr_w2"), ("lokr_w1_a", "lokr_w1_b"), ("lokr_w2_a", "lokr_w2_b")
OTHERS = {"dora_scale": "DoRA", "lora_mid.weight": "LoRA with Tucker", "hada_t1": "LoHa with Tucker",
          "lokr_t2": "LoKr with Tucker", "oft_blocks": "OFT", "oft_diag": "OFT", "a1.weight": "GLoRA",
          "diff": "a full difference"}  # fmt: skip


class LayerChange:
    """What one file adds to the output of one layer."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.stored, self.strength = dict(tensors), 0.0
        self._on_device: dict[str, Tensor] = {}  # while it is used

    def set_strength(self, strength: float) -> None:
        """0 switches it off and frees its memory on the device."""
        self.strength = strength
        if not strength:
            self._on_device = {}

    def delta(self, layer: nn.Linear | nn.Conv2d, x: Tensor) -> Tensor:
        """What is added to the layer's output for `x`."""
        if not self._on_device:
            self._on_device = {name: value.to(x.device) for name, value in self.stored.items() if name != "alpha"}
        if LORA[0] in self._on_device:
            return self._low_rank(layer, x)
        weight = cast_like((self._product() * self.strength).reshape(layer.weight.shape), x)
        return F.linear(x, weight) if isinstance(layer, nn.Linear) else layer._conv_forward(x, weight, None)

    def _low_rank(self, layer: nn.Linear | nn.Conv2d, x: Tensor) -> Tensor:
        down, up = (cast_like(self._on_device[name], x) for name in LORA)
        scale = self.strength * saved_alpha(self.stored, down.shape[0]) / down.shape[0]
        if isinstance(layer, nn.Linear):
            return F.linear(F.linear(x, down.flatten(1)), up.flatten(1)) * scale
        hidden = layer._conv_forward(x, down.reshape(down.shape[0], *layer.weight.shape[1:]), None)
        return F.conv2d(hidden, up.reshape(*up.shape[:2], 1, 1)) * scale

    def _product(self) -> Tensor:
        """The change of the weight by LoHa or LoKr at strength 1, in float32."""
        ready = {name: value.float() for name, value in self._on_device.items()}
        if LOHA[0] in ready:
            first, second = ready[LOHA[0]] @ ready[LOHA[1]], ready[LOHA[2]] @ ready[LOHA[3]]
            return first * second * saved_alpha(self.stored, ready[LOHA[1]].shape[0]) / ready[LOHA[1]].shape[0]
        factors, ranks = [], []
        for whole, (a, b) in zip(LOKR[0], LOKR[1:], strict=True):
            if whole in ready:
                factors.append(ready[whole])
            else:
                factors.append((ready[a] @ ready[b].flatten(1)).reshape(ready[a].shape[0], *ready[b].shape[1:]))
                ranks.append(ready[b].shape[0])
        small, large = factors
        small = small.reshape(*small.shape, *(1 for _ in range(large.ndim - small.ndim)))
        # alpha is relative to the rank; of two full factors there is none.
        return torch.kron(small, large.contiguous()) * (saved_alpha(self.stored, ranks[-1]) / ranks[-1] if ranks else 1)


class AppliedLoras:
    """LoRA, LoHa and LoKr files applied to a model, and to its text encoders where a file was trained for them."""

    def __init__(self, components: ModelComponents, family: Family) -> None:
        self._layers, self._family = {}, family.config.family
        self._changes: dict[Path, list[LayerChange]] = {}
        self._hooked: dict[str, list[LayerChange]] = {}
        self.changes_text = False  # whether a file has something for a text encoder
        for part, root in networks(components).items():
            for found in targets.layers(root, part, family.adapter_name, ()):
                place = AdapterLocation(part, found.path)
                for name in filter(None, (found.name, place.alias)):
                    self._layers[name] = part, found.layer

    def add(self, path: Path) -> None:
        """Read a file; it is switched off at first. Raises ConfigError when it is none, or for another model."""
        found = by_name(file_of(path, self._family))
        for tensors in found.values():
            for mark in OTHERS.keys() & tensors.keys():
                raise ConfigError("{path} is {kind}, which is not applied here: choose a LoRA, LoHa or LoKr", path=path,
                    kind=OTHERS[mark])  # fmt: skip
        known = {name: tensors for name, tensors in found.items() if name in self._layers}
        if not known:
            raise ConfigError("{path} holds nothing for this model: choose a LoRA that was trained for it", path=path)
        self._changes[path] = []
        for name, tensors in known.items():
            part, layer = self._layers[name]
            if not (LORA[0] in tensors or LOHA[0] in tensors or {"lokr_w1", "lokr_w1_a"} & tensors.keys()):
                raise ConfigError("{path} holds {name}, which is no LoRA, LoHa or LoKr", path=path, name=name)
            change = LayerChange(tensors)
            _check(layer, change, path, name)
            self.changes_text = self.changes_text or part != "denoiser"
            self._changes[path].append(change)
            if name not in self._hooked:
                self._hooked[name] = []
                layer.register_forward_hook(_hook(self._hooked[name]))
            self._hooked[name].append(change)

    def set(self, strengths: Mapping[Path, float]) -> None:
        """Use the files at these strengths; those that are not named are switched off."""
        for path, changes in self._changes.items():
            for change in changes:
                change.set_strength(strengths.get(path, 0.0))


def _hook(changes: list[LayerChange]):  # noqa: ANN202 - what torch calls
    def add(layer: nn.Linear | nn.Conv2d, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        for change in changes:
            if change.strength:
                output = output + change.delta(layer, inputs[0]).to(output.dtype)
        return output

    return add


def _check(layer: nn.Module, change: LayerChange, path: Path, name: str) -> None:
    """Raise ConfigError unless a change fits its layer."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    try:
        if LORA[0] in change.stored:
            whole = fits(weight, change.stored)
        else:
            change._on_device = {key: value.to("meta") for key, value in change.stored.items() if key != "alpha"}
            whole = change._product().numel() == weight.numel()
            change._on_device = {}
    except (KeyError, RuntimeError, IndexError):
        whole = False
    if not whole:
        raise ConfigError("{path}: {name} has another size than this model's layer: it is for another model", path=path,
            name=name)  # fmt: skip
