"""lycoris-lora's layer presets by name: its own with our classes, and those in the user's files."""

import contextlib
import importlib
from collections.abc import Iterator

from torch import nn

from library.config.json_types import JsonObject
from library.config.outside_files import load_toml
from library.config.pasted import pasted_path
from library.config.problems import ConfigError
from library.families import network_args
from library.families.shared.network_args import wrong_argument

OF_ATTENTION = "attn-only"  # finds attention by sd-scripts' class names, which differ here


@contextlib.contextmanager
def known_presets(preset: str, denoiser: nn.Module) -> Iterator[None]:
    """Register a preset file under its name within the context. Raises ConfigError if it is unreadable or no preset."""
    # The package would otherwise open the file itself, with a parser without limits.
    presets = importlib.import_module("lycoris.config").PRESET
    attention_classes = {
        type(module).__name__ for module in denoiser.modules() if type(module).__name__.endswith("Attention")
    }
    original = dict(presets)
    classes = presets[OF_ATTENTION].get("unet_target_module", [])
    presets[OF_ATTENTION] = {**presets[OF_ATTENTION], "unet_target_module": [*classes, *sorted(attention_classes)]}
    if preset not in (*network_args.LAYER_PRESETS, network_args.UNMATCHED):
        presets[preset] = _preset_of_file(preset)
    try:
        yield
    finally:
        presets.clear()
        presets.update(original)


def _preset_of_file(preset: str) -> JsonObject:
    try:
        toml = load_toml(pasted_path(preset))
    except ConfigError as e:
        raise ConfigError(*(wrong_argument("preset", ": {why}", why=why) for why in e.problems)) from e
    try:
        return importlib.import_module("lycoris.config_sdk").PresetConfig.from_dict(toml).to_dict()
    except ImportError:  # older versions of the package accept the table directly
        return toml
    except (ValueError, TypeError, AttributeError) as e:
        raise ConfigError(
            wrong_argument("preset", ": {path} is not a preset of LyCORIS: {why}", path=preset, why=e)
        ) from e
