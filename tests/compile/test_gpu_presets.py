"""Every preset on a GPU, on the demo's tiny model of its family: held to its memory, with previews, compiled or not.

On a CPU, tests/train/test_presets_train.py trains with them.
"""

import math

import pytest

from library.config.building import build_config
from library.config.formats import read_toml
from library.config.schema import options_of
from library.demo import files
from library.families import all_families, config_class, facts_of
from library.recipes import preset_files
from tests.training import demo, references, squares, train  # noqa: F401 - fixtures, also without a conftest

pytestmark = pytest.mark.gpu
PRESETS = {preset.id: preset for preset in preset_files.all_presets() if not preset.is_profile}
RELATIVES = {"edit-2511": "qwen_image_edit"}  # what a preset says of its model -> the demo's name of that, if another
# What belongs to the size of real images and trainings, scaled down. SD 1.5 needs 256 for more than one token.
SMALL = {"resolution": "256", "min_bucket_reso": 64, "max_bucket_reso": 256, "t5xxl_max_token_length": 32}
SMALL |= {"max_train_steps": 4, "max_train_epochs": None, "lr_warmup_steps": 0, "lr_scheduler": "constant"}
SMALL |= {"sample_every_n_steps": 2, "save_every_n_steps": 2}


def values_of(table):
    """What a preset asks for, whatever its numbers, which are for the size of real images."""
    alike = {name: bool(value) if type(value) in (int, float) else str(value) for name, value in table.items()}
    return tuple(sorted(alike.items(), key=str))


# Those that ask for the same, such as with other numbers of blocks to swap, compile the same.
DIFFERENT = {(preset.family, values_of(read_toml(preset.path))): preset for preset in PRESETS.values()}


@pytest.fixture(scope="module")
def relatives(tmp_path_factory):
    """Tiny models of the relatives that presets are for."""
    folder = tmp_path_factory.mktemp("relatives") / "demo"
    return files.prepare_demo(folder, [name for family in all_families() for name in family.demo_variants])


def train_with(preset, demo, relatives, folder, pictures, **more):  # noqa: F811
    script = next(name for name in facts_of(preset.family).scripts if config_class(name).kind == preset.kind)
    config, wanted = config_class(script), read_toml(preset.path)
    named = wanted.get("model_type") or wanted.get("model_version") or ""
    relative = RELATIVES.get(named, named)
    base = read_toml(relatives.configs[f"{relative}_{script}"] if relative else demo.configs[script])
    values = base | {"train_data_dir": str(pictures), "output_dir": str(folder / "out"), "logging_dir": None}
    shown = build_config(config, values, notes=[])
    values |= {"control_directory": references(pictures, folder)} if shown.control_images.least else {}
    values |= {"conditioning_data_dir": references(pictures, folder)} if shown.control_images.guided else {}
    values |= {"alpha_mask": True} if shown.control_images.inpaints else {}
    small = {name: value for name, value in SMALL.items() if name in options_of(config)}
    return train(build_config(config, values | wanted | small | more, notes=[]))


def check(outcome):
    assert len(outcome.losses) == SMALL["max_train_steps"] and all(map(math.isfinite, outcome.losses))
    assert outcome.file.is_file() and outcome.facts["state"] == "finished"
    if outcome.facts["config"].get("sample", {}).get("sample_from_captions"):
        assert outcome.events("sample") and not outcome.events("sample_failed")


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_a_preset_trains_as_it_is(preset, demo, relatives, squares, tmp_path):  # noqa: F811
    check(train_with(preset, demo, relatives, tmp_path, squares))


@pytest.mark.parametrize("preset", DIFFERENT.values(), ids=lambda preset: preset.id)
def test_a_preset_trains_compiled_first(preset, demo, relatives, squares, tmp_path):  # noqa: F811
    if not read_toml(preset.path).get("compile"):
        pytest.skip("does not compile")
    outcome = train_with(preset, demo, relatives, tmp_path, squares, compile_warmup="true")
    check(outcome)
    assert not [event["text"] for event in outcome.events("warning") if "compil" in str(event["text"]).lower()]
