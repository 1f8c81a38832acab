"""ControlNet-LLLite: trains small networks beside layers of the denoiser that follow a control image."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from library.compiler import torch_private
from library.compiler.subclass import keep_class_name
from library.config.problems import ConfigError, Problem
from library.config.sections import ControlRun
from library.families.base import Family, ModelComponents
from library.families.capabilities import HasControlledLayers
from library.methods.base import FrozenBaseMethod, trained_dtype
from library.methods.small_files import read_tensors

TENSOR_GROUPS = ("conditioning1", "down", "mid", "up")  # parts of a name in a file
BEGINNING = "lllite_"  # prefix of all names in a file
NOTHING_TRAINED = "nothing is trained: learning_rate is 0; 2e-4 is usual"


class ControlPicture:
    """The control image [B, 3, H, W] in -1..1 that all layers use in this pass; None disables them."""

    pixels: Tensor | None = None


class ControlledLinear(nn.Module):
    """A linear layer whose input is shifted by a small network's output for it and the control image."""

    def __init__(self, layer: nn.Linear, halvings: int, sizes: tuple[int, int], dropout: float) -> None:
        """`halvings`: how often latents are halved before the layer; `sizes`: cond_emb_dim and network_dim."""
        super().__init__()
        channels, width = sizes
        self.layer, self.dropout = layer, dropout
        self.conditioning1 = _control_embedding(channels, halvings + 1)
        self.down = nn.Sequential(nn.Linear(layer.in_features, width), nn.ReLU())
        self.mid = nn.Sequential(nn.Linear(width + channels, width), nn.ReLU())
        self.up = nn.Sequential(nn.Linear(width, layer.in_features))
        for parameter in self.up.parameters():  # starts without effect
            nn.init.zeros_(parameter)
        self.picture = ControlPicture()

    def forward(self, x: Tensor) -> Tensor:
        """x [B, tokens, C], one token per position of the latents at this level."""
        if (pixels := self.picture.pixels) is None:
            return self.layer(x)
        return self.layer(x + self.change(x, pixels))

    def change(self, x: Tensor, pixels: Tensor) -> Tensor:
        """Return the shift of the layer's input, [B, tokens, C]."""
        embedded = _embedded(self.conditioning1, pixels)
        hidden = self.mid(torch.cat([embedded.expand(len(x), -1, -1), self.down(x)], dim=-1))
        return self.up(functional.dropout(hidden, self.dropout, self.training))


class LLLite(FrozenBaseMethod):
    """All controlled layers of a denoiser, by their names in files."""

    def __init__(self, layers: Mapping[str, ControlledLinear], config: ControlRun) -> None:
        super().__init__(config, "unet", ("denoiser",), NOTHING_TRAINED)
        self.layers = dict(layers)

    def named(self) -> dict[str, nn.Parameter]:
        """Return trained parameters by their names in files."""
        parameters = (
            (f"{name}.{part}.{key}", p)
            for name, layer in self.layers.items()
            for part in TENSOR_GROUPS
            for key, p in getattr(layer, part).named_parameters()
        )
        return dict(parameters)

    def load(self, path: str) -> None:
        """Load a file. Raises ConfigError if its layers or sizes differ."""
        tensors, parameters = read_tensors(path, "a LLLite file", "network_weights"), self.named()
        differing = sorted(
            name
            for name in tensors.keys() | parameters.keys()
            if name not in tensors or name not in parameters or tensors[name].shape != parameters[name].shape
        )
        if differing:
            raise ConfigError(
                Problem(
                    "network_weights",
                    ": {path} does not fit ({tensor} differs): set cond_emb_dim and network_dim as they were for this "
                    "file, or choose another one",
                    path=path,
                    tensor=differing[0],
                )
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name])

    def train(self, mode: bool = True) -> "LLLite":
        """Switch dropout on or off."""
        for layer in self.layers.values():
            layer.train(mode)
        return self


def attach_lllite(components: ModelComponents, family: Family, config: ControlRun) -> LLLite:
    """Add small networks beside the layers that the family names. The model must be frozen already."""
    assert isinstance(family, HasControlledLayers)  # only such families have this script
    control, picture = config.control, show_picture(components.denoiser)
    layers = {}
    for path, halvings in list(family.controlled_layers(components.denoiser)):
        parent, _, child = path.rpartition(".")
        layer: Any = components.denoiser.get_submodule(path)
        sizes = control.cond_emb_dim or 0, control.network_dim or 0
        linear = ControlledLinear(layer, halvings, sizes, control.network_dropout or 0.0)
        for part in TENSOR_GROUPS:
            getattr(linear, part).to(layer.weight.device, trained_dtype(config))
        linear.picture = picture
        setattr(components.denoiser.get_submodule(parent), child, linear)
        layers[family.control_name(path)] = linear
    method = LLLite(layers, config)
    if control.network_weights:
        method.load(control.network_weights)
    return method


def show_picture(denoiser: Any) -> ControlPicture:
    """Make a denoiser accept a control image among its conditions; return the holder that its layers read."""
    denoiser.__class__ = _with_control_input(type(denoiser))
    denoiser.control_picture = ControlPicture()
    return denoiser.control_picture


def _control_embedding(channels: int, depth: int) -> nn.Sequential:
    """Return layers from pixels to `channels` at the size of latents halved `depth` - 1 times, as in sd-scripts."""
    half = channels // 2
    steps = {1: [(channels, 2)], 2: [(channels, 4)], 3: [(half, 4), (channels, 2)]}[depth]
    modules: list[nn.Module] = [nn.Conv2d(3, half, 4, 4)]
    for out, stride in steps:
        modules += [nn.ReLU(), nn.Conv2d(half, out, stride, stride)]
    return nn.Sequential(*modules)


def _embedded(layers: nn.Sequential, pixels: Tensor) -> Tensor:
    """Apply convolutions with stride = kernel size to pixels [B, 3, H, W]: [B, tokens, C], one product each."""
    # Convolutions would be recompiled for some image sizes: PyTorch compares height, width and channels to choose the
    # memory format of the output.
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
def _with_control_input(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a denoiser class that accepts the control image among its conditions."""

    # As an argument the image becomes an input of recorded passes (CUDA graphs), which are replayed with new values.
    class Shown(cls):
        control_picture: ControlPicture

        def forward(self, *args: Any, added_cond_kwargs: dict[str, Tensor], **kwargs: Any) -> Any:
            pixels = self.control_picture.pixels = added_cond_kwargs.get("control")
            if pixels is not None:  # compiled blocks read it, but their arguments do not reveal its size
                for side in (2, 3):
                    torch_private.mark_dynamic(pixels, side)
            return super().forward(*args, added_cond_kwargs=added_cond_kwargs, **kwargs)

    return keep_class_name(Shown, cls)
