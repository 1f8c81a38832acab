"""ControlNet-LLLite: trains small networks beside layers of the denoiser to follow a control image."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from library.compiler import torch_private
from library.compiler.subclass import keep_class_name
from library.config.hub_names import about_absent
from library.config.problems import ConfigError, Problem
from library.config.sections import ControlRun
from library.families.base import Family, ModelComponents
from library.families.capabilities import HasControlledLayers
from library.methods.base import dtype_of
from library.methods.frozen_base import FrozenBaseMethod
from library.methods.small_files import tensors_of

PARTS = ("conditioning1", "down", "mid", "up")  # of the names in a file
BEGINNING = "lllite_"  # of all names in a file
NOTHING = "nothing is trained: learning_rate is 0; 2e-4 is usual"


class ControlPicture:
    """The control image [B, 3, H, W] in -1..1 that all layers read in this pass; without one they are as before."""

    pixels: Tensor | None = None


class ControlledLinear(nn.Module):
    """A linear layer whose input is moved by what a small network makes of it and of the control image."""

    def __init__(self, layer: nn.Linear, halvings: int, sizes: tuple[int, int], dropout: float) -> None:
        """`halvings`: how often the latents were halved where the layer is; `sizes`: cond_emb_dim and network_dim."""
        super().__init__()
        channels, width = sizes
        self.layer, self.dropout = layer, dropout
        self.conditioning1 = _embedding(channels, halvings + 1)
        self.down = nn.Sequential(nn.Linear(layer.in_features, width), nn.ReLU())
        self.mid = nn.Sequential(nn.Linear(width + channels, width), nn.ReLU())
        self.up = nn.Sequential(nn.Linear(width, layer.in_features))
        for parameter in self.up.parameters():
            nn.init.zeros_(parameter)
        self.picture = ControlPicture()

    def forward(self, x: Tensor) -> Tensor:
        """x [B, tokens, C], one token for each place of the latents as they are here."""
        if (pixels := self.picture.pixels) is None:
            return self.layer(x)
        return self.layer(x + self.change(x, pixels))

    def change(self, x: Tensor, pixels: Tensor) -> Tensor:
        """What is added to the layer's input, [B, tokens, C]."""
        seen = _embedded(self.conditioning1, pixels)
        inside = self.mid(torch.cat([seen.expand(len(x), -1, -1), self.down(x)], dim=-1))
        return self.up(functional.dropout(inside, self.dropout, self.training))


class LLLite(FrozenBaseMethod):
    """All controlled layers of a denoiser, by their names in files."""

    def __init__(self, layers: Mapping[str, ControlledLinear], config: ControlRun) -> None:
        super().__init__(config, "unet", ("denoiser",), NOTHING)
        self.layers = dict(layers)

    def named(self) -> dict[str, nn.Parameter]:
        """Trained parameters by their names in files."""
        every = (
            (f"{name}.{part}.{rest}", p)
            for name, layer in self.layers.items()
            for part in PARTS
            for rest, p in getattr(layer, part).named_parameters()
        )
        return dict(every)

    def load(self, path: str) -> None:
        """Load a file. ConfigError if its layers or sizes differ."""
        given, here = tensors_of(path, "a LLLite file"), self.named()
        odd = sorted(
            name
            for name in given.keys() | here.keys()
            if name not in given or name not in here or given[name].shape != here[name].shape
        )
        if odd:
            raise ConfigError(
                Problem(
                    "network_weights",
                    ": {path} does not fit ({tensor} differs): set cond_emb_dim and network_dim as they were for this "
                    "file, or choose another one",
                    path=path,
                    tensor=odd[0],
                )
            )
        with torch.no_grad():
            for name, parameter in here.items():
                parameter.copy_(given[name])

    def train(self, mode: bool = True) -> "LLLite":
        """Switch dropout on or off."""
        for layer in self.layers.values():
            layer.train(mode)
        return self


def attach(components: ModelComponents, family: Family, config: ControlRun) -> LLLite:
    """Put small networks beside the layers that the family names. The model must be frozen already."""
    assert isinstance(family, HasControlledLayers)  # or it had no such script
    control, picture = config.control, show_picture(components.denoiser)
    layers = {}
    for path, halvings in list(family.controlled_layers(components.denoiser)):
        parent, _, child = path.rpartition(".")
        layer: Any = components.denoiser.get_submodule(path)
        sizes = control.cond_emb_dim or 0, control.network_dim or 0
        made = ControlledLinear(layer, halvings, sizes, control.network_dropout or 0.0)
        for part in PARTS:
            getattr(made, part).to(layer.weight.device, dtype_of(config))
        made.picture = picture
        setattr(components.denoiser.get_submodule(parent), child, made)
        layers[family.control_name(path)] = made
    method = LLLite(layers, config)
    if control.network_weights:
        method.load(control.network_weights)
    return method


def show_picture(denoiser: Any) -> ControlPicture:
    """Let a denoiser take a control image among its conditions; what its layers read of it."""
    denoiser.__class__ = _shown(type(denoiser))
    denoiser.control_picture = ControlPicture()
    return denoiser.control_picture


def problems(config: ControlRun) -> Iterator[Problem]:
    """What of the options only files can tell."""
    if (path := config.control.network_weights) and not Path(path).is_file():
        yield about_absent("network_weights", path)


def _embedding(channels: int, depth: int) -> nn.Sequential:
    """Pixels -> `channels` at the size of latents that were halved `depth` - 1 times; layers as in upstream's files."""
    half = channels // 2
    steps = {1: [(channels, 2)], 2: [(channels, 4)], 3: [(half, 4), (channels, 2)]}[depth]
    made: list[nn.Module] = [nn.Conv2d(3, half, 4, 4)]
    for out, stride in steps:
        made += [nn.ReLU(), nn.Conv2d(half, out, stride, stride)]
    return nn.Sequential(*made)


def _embedded(layers: nn.Sequential, pixels: Tensor) -> Tensor:
    """What convolutions that step as far as they reach make of pixels [B, 3, H, W]: [B, tokens, C], one product each.

    As convolutions they would be compiled again for some sizes of image: PyTorch compares height, width and channels to
    choose the order of an answer in memory.
    """
    x = pixels.permute(0, 2, 3, 1)
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            side = layer.stride[0]
            patches = x.unflatten(2, (-1, side)).unflatten(1, (-1, side)).permute(0, 1, 3, 5, 2, 4)
            x = functional.linear(patches.flatten(3), layer.weight.flatten(1), layer.bias)
        else:
            x = layer(x)
    return x.flatten(1, 2)


@functools.cache
def _shown(cls: type[nn.Module]) -> type[nn.Module]:
    """A denoiser that takes the control image among its conditions, so that it is an input of what records a pass."""

    class Shown(cls):
        control_picture: ControlPicture

        def forward(self, *args: Any, added_cond_kwargs: dict[str, Tensor], **kwargs: Any) -> Any:
            pixels = self.control_picture.pixels = added_cond_kwargs.get("control")
            if pixels is not None:  # compiled blocks read it, and what they are called with does not tell its size
                for side in (2, 3):
                    torch_private.mark_dynamic(pixels, side)
            return super().forward(*args, added_cond_kwargs=added_cond_kwargs, **kwargs)

    return keep_class_name(Shown, cls)
