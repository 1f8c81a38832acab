"""Every preset on a GPU, on the demo's tiny model of its family: held to its memory, with previews, compiled or not.

On a CPU, tests/train/test_presets_train.py trains with them.
"""

import math

import pytest

from library.config.building import build_config
from library.config.formats import read_toml
from library.config.schema import options_of
from library.families import config_class
from library.recipes import preset_files
from tests.preset_models import asked, base_of, relatives, script_of, with_data  # noqa: F401
from tests.training import demo, squares, train  # noqa: F401 - fixtures, also without a conftest

pytestmark = pytest.mark.gpu
PRESETS = {preset.id: preset for preset in preset_files.all_presets() if not preset.is_profile}
# What belongs to the size of real images and trainings, scaled down. SD 1.5 needs 256 for more than one token.
SMALL = {"resolution": "256", "min_bucket_reso": 64, "max_bucket_reso": 256, "t5xxl_max_token_length": 32}
SMALL |= {"max_train_steps": 4, "max_train_epochs": None, "lr_warmup_steps": 0, "lr_scheduler": "constant"}
SMALL |= {"sample_every_n_steps": 2, "save_every_n_steps": 2}


# Those that ask for the same, such as with other numbers of blocks to swap, compile the same.
DIFFERENT = {asked(preset): preset for preset in PRESETS.values()}


def train_with(preset, demo, relatives, folder, pictures, **more):  # noqa: F811
    script = script_of(preset)
    values = with_data(base_of(demo, relatives, preset, script), script, pictures, folder) | {"logging_dir": None}
    small = {name: value for name, value in SMALL.items() if name in options_of(config_class(script))}
    return train(build_config(config_class(script), values | read_toml(preset.path) | small | more, notes=[]))


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
