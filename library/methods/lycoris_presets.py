"""The choices of layers that lycoris-lora knows by name: its own with our classes, and those in files of the user's."""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from library.config.json_types import JsonObject
from library.config.outside_files import load_toml
from library.config.problems import ConfigError
from library.families import network_args
from library.families.shared.network_args import wrong_argument

OF_ATTENTION = "attn-only"  # looks for attention by the class names of sd-scripts' U-Net, which are others here


@contextlib.contextmanager
def known_presets(preset: str, denoiser: nn.Module) -> Iterator[None]:
    """Within the context, the package finds a preset's file as a preset of that name, and so never opens it: its parser
    has no limits. Raises ConfigError when that file cannot be read, or is no preset."""
    presets = importlib.import_module("lycoris.config").PRESET
    own = {type(module).__name__ for module in denoiser.modules() if type(module).__name__.endswith("Attention")}
    before = dict(presets)
    classes = presets[OF_ATTENTION].get("unet_target_module", [])
    presets[OF_ATTENTION] = {**presets[OF_ATTENTION], "unet_target_module": [*classes, *sorted(own)]}
    if preset not in (*network_args.LAYER_PRESETS, network_args.UNMATCHED):
        presets[preset] = _preset_of_file(preset)
    try:
        yield
    finally:
        presets.clear()
        presets.update(before)


def _preset_of_file(preset: str) -> JsonObject:
    try:
        toml = load_toml(Path(preset).expanduser())
    except ConfigError as e:
        raise ConfigError(*(wrong_argument("preset", ": {why}", why=why) for why in e.problems)) from e
    try:
        return importlib.import_module("lycoris.config_sdk").PresetConfig.from_dict(toml).to_dict()
    except ImportError:  # older versions of the package take the table as it is
        return toml
    except (ValueError, TypeError, AttributeError) as e:
        raise ConfigError(
            wrong_argument("preset", ": {path} is no preset of LyCORIS: {why}", path=preset, why=e)
        ) from e
