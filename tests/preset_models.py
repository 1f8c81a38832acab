"""The tiny models on which tests train presets, and which presets ask for the same."""

from typing import Any

import pytest

from library.config.building import build_config
from library.config.formats import read_toml
from library.demo import files
from library.families import all_families, config_class, facts_of
from library.recipes.preset_files import Preset
from tests.training import references

RELATIVES = {"edit-2511": "qwen_image_edit"}  # what a preset says of its model -> the demo's name of that, if another


@pytest.fixture(scope="module")
def relatives(tmp_path_factory: Any) -> Any:
    """Tiny models of the relatives that presets are for."""
    names = [name for family in all_families() for name in family.demo_variants]
    return files.prepare_demo(tmp_path_factory.mktemp("relatives") / "demo", names, compiled=True)


def base_of(demo: Any, relatives: Any, preset: Preset, script: str) -> Any:
    """The demo's config of the model that a preset is for."""
    table = read_toml(preset.path)
    named = table.get("model_type") or table.get("model_version") or ""
    relative = RELATIVES.get(named, named)
    return read_toml(relatives.configs[f"{relative}_{script}"] if relative else demo.configs[script])


def with_data(base: Any, script: str, images: Any, folder: Any) -> Any:
    """A config with these images, and with the references and masks that its model needs."""
    values = base | {"train_data_dir": str(images), "output_dir": str(folder / "out")}
    use = build_config(config_class(script), base, notes=[]).control_images
    values |= {"control_directory": references(images, folder)} if use.least else {}
    values |= {"conditioning_data_dir": references(images, folder)} if use.guided else {}
    return values | ({"alpha_mask": True} if use.inpaints else {})


def script_of(preset: Preset) -> str:
    return next(name for name in facts_of(preset.family).scripts if config_class(name).kind == preset.kind)


def asked(preset: Preset) -> Any:
    """What a preset asks for, whatever its numbers, which are for the size of real images; of a profile, all of it."""
    if preset.is_profile:
        return preset.id
    alike = {
        name: bool(value) if type(value) in (int, float) else str(value)
        for name, value in read_toml(preset.path).items()
    }
    return preset.family, *sorted(alike.items(), key=str)
