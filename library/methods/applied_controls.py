"""ControlNet-LLLite files applied beside the layers of a model for sampling; they use the prompt's control image."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from library.config.problems import ConfigError
from library.families.base import Family, ModelComponents
from library.families.capabilities import HasControlledLayers
from library.methods.lllite import BEGINNING, TENSOR_GROUPS, ControlledLinear, ControlPicture, show_picture
from library.methods.lora_files import by_name
from library.methods.small_files import read_tensors


class AppliedControl(ControlledLinear):
    """A layer that a file changes, at a strength."""

    strength = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """As in training, with the contribution times the strength; at 0 only the layer."""
        if (pixels := self.picture.pixels) is None or not self.strength:
            return self.layer(x)
        return self.layer(x + self.change(x, pixels) * self.strength)


class AppliedControls:
    """LLLite files applied to a model; all use one control image."""

    def __init__(self, components: ModelComponents, family: Family) -> None:
        self._denoiser: Any = components.denoiser
        self._family = family
        self._picture: ControlPicture | None = None
        self._layers: dict[Path, list[AppliedControl]] = {}

    def __bool__(self) -> bool:
        return bool(self._layers)

    def add(self, path: Path) -> None:
        """Read a file; it starts switched off. Raises ConfigError if it is for another model."""
        if not isinstance(self._family, HasControlledLayers):
            raise ConfigError("{path} is a LLLite file, which this model cannot follow: leave it out", path=path)
        family, adapters = self._family, by_name(read_tensors(path, "a LLLite file"))
        layers_by_name = {
            family.control_name(layer_path): (layer_path, halvings)
            for layer_path, halvings in family.controlled_layers(self._denoiser)
        }
        if unmatched := sorted(adapters.keys() - layers_by_name.keys()):
            raise ConfigError(
                "{path} is a LLLite file for another model: it has no layer {name}", path=path, name=unmatched[0]
            )
        if self._picture is None:
            self._picture = show_picture(self._denoiser)
        self._layers[path] = [
            self._put(path, name, *layers_by_name[name], tensors) for name, tensors in adapters.items()
        ]

    def set(self, strengths: Mapping[Path, float]) -> None:
        """Set the strengths of these files; switch all others off."""
        for path, layers in self._layers.items():
            for layer in layers:
                layer.strength = strengths.get(path, 0.0)

    def _put(self, path: Path, name: str, place: str, halvings: int, tensors: Mapping[str, Tensor]) -> AppliedControl:
        try:
            # `mid` reads the image's embedding and the output of `down`, so the former's width is the difference.
            sizes = tensors["mid.0.weight"].shape[1] - len(tensors["down.0.weight"]), len(tensors["down.0.weight"])
            layer: Any = self._denoiser.get_submodule(place)
            plain = layer  # several files may change one layer: unwrap it to read its size
            while isinstance(plain, AppliedControl):
                plain = plain.layer
            control = AppliedControl(plain, halvings, sizes, 0.0)
            trained = {key: value for key, value in tensors.items() if key.partition(".")[0] in TENSOR_GROUPS}
            missing = control.load_state_dict(trained, strict=False).missing_keys
            if absent := [key for key in missing if not key.startswith("layer.")]:
                raise KeyError(absent[0])
        except (KeyError, RuntimeError, IndexError) as e:
            raise ConfigError(
                "{path}: {name} has another size than this model's layer: it is for another model", path=path, name=name
            ) from e
        control.layer = layer
        for part in TENSOR_GROUPS:
            # Not frozen, as frozen layers of the model would be stored in 8 bits.
            getattr(control, part).requires_grad_(True)
        control.picture = self._picture or ControlPicture()
        parent, _, child = place.rpartition(".")
        setattr(self._denoiser.get_submodule(parent), child, control)
        return control


def is_control(names: set[str]) -> bool:
    return any(name.startswith(BEGINNING) for name in names)
