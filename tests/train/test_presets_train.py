"""Every preset, applied as the page does it, on the demo's tiny model of its family: a step on a CPU.

What belongs to the size of real images is scaled down. Compiling takes most of a minute each on a CPU, so presets train
eagerly here, and the profiles, which are about nothing else, trace and check their graphs without generating code.
"""

import math

import pytest
import torch

from kohya_gui.form import presets
from library import packages
from library.check import preflight
from library.config.building import build_config
from library.config.formats import read_toml
from library.config.schema import option_values, options_of
from library.families import RUNS, config_class
from library.families.shared import joint_layers
from library.recipes import preset_files
from tests.packages import eight_bit, hide
from tests.preset_models import asked, base_of, relatives, script_of, with_data  # noqa: F401
from tests.training import short_captions, train  # noqa: F401

EVERY = {preset.id: preset for preset in preset_files.all_presets()}
SMALL = {
    "resolution": "64",
    "min_bucket_reso": 64,
    "max_bucket_reso": 256,
    "t5xxl_max_token_length": 32,
    "max_train_steps": 1,
    "max_train_epochs": None,
    "sample_images": False,
}
TRACED = {"compile_backend": "aot_eager", "compile_mode": "default", "compile_blocks": "single:all"}
# What a preset asks of a GPU, and what a training on a CPU says of it.
NEEDS_GPU = {"fp8_compute": "this machine can store weights in 8 bits, but not multiply them"}
# Of what a check says here. The last is a remark of a distilled model, whose assistant is on the hub.
EXPECTED = (*NEEDS_GPU.values(), "no GPU was found that can record CUDA graphs", "is distilled to need no guidance")


# One of those that ask for the same, such as with other numbers of blocks to swap.
DIFFERENT = {asked(preset): preset for preset in EVERY.values()}


@pytest.fixture
def start(demo, relatives, squares, tmp_path, monkeypatch):  # noqa: F811
    """Apply a preset to a form in which only the paths are filled in, and train; the outcome, and what was told."""

    monkeypatch.setattr(joint_layers, "JOINED_ON", {"cpu"})  # as on a GPU

    def run(preset):
        script = "flux_train_network" if preset.is_profile else script_of(preset)
        config = config_class(script)
        now = with_data(base_of(demo, relatives, preset, script), script, squares, tmp_path)
        masks = {"alpha_mask": now.pop("alpha_mask")} if "alpha_mask" in now else {}  # no path, so the preset resets it
        now = build_config(config, now, notes=[])
        told: list[str] = []
        applied = presets.apply(preset, config, option_values(now), told)
        small = SMALL | masks | (TRACED if preset.is_profile else {"compile": False})
        small |= {"lr_warmup_steps": 1} if applied.optim.lr_warmup_steps else {}
        small = {name: value for name, value in small.items() if name in options_of(config)}
        return train(build_config(config, option_values(applied) | small, notes=[])), told

    return run


@pytest.mark.parametrize("preset", DIFFERENT.values(), ids=lambda preset: preset.id)
def test_a_preset_trains(preset, start):
    outcome, told = start(preset)
    assert told == [] and len(outcome.losses) == 1 and all(map(math.isfinite, outcome.losses))
    assert outcome.file.is_file() and outcome.facts["state"] == "finished"
    wanted = read_toml(preset.path)
    assert outcome.facts["config"]["optim"].get("optimizer_type", "") == wanted.get("optimizer_type", "AdamW")
    if not torch.cuda.is_available():
        said = [event["text"] for event in outcome.events("warning")]
        for words in (words for name, words in NEEDS_GPU.items() if wanted.get(name)):
            assert any(words in str(text) for text in said), said


@pytest.mark.parametrize("script", RUNS)
def test_no_preset_needs_a_package_that_may_be_missing(script, demo, relatives, squares, tmp_path, monkeypatch):  # noqa: F811
    hide(monkeypatch, *packages.PACKAGE_NAMES, "xformers", "wandb")
    config = config_class(script)
    small = SMALL | {"max_train_steps": 200, "save_every_n_steps": 100}  # longer than any warm-up
    small |= {"sample_images": True, "sample_every_n_steps": 100}
    small = {name: value for name, value in small.items() if name in options_of(config)}
    for preset in preset_files.presets_of_kind(config.kind):
        if preset.family == config.family:  # as its TOML is, without the page
            paths = with_data(base_of(demo, relatives, preset, script), script, squares, tmp_path)
            masks = {"alpha_mask": paths.pop("alpha_mask")} if "alpha_mask" in paths else {}
            ours = {name: value for name, value in paths.items() if presets.is_own(options_of(config)[name])} | masks
            remarks = preflight.check_before_training(
                build_config(config, read_toml(preset.path) | ours | small, notes=[])
            )
            assert [said for said in remarks if not any(words in str(said) for words in EXPECTED)] == [], preset.id


def test_a_preset_trains_without_the_package_of_its_optimizer(start, tmp_path, monkeypatch):
    hide(monkeypatch, "bitsandbytes")
    outcome, told = start(eight_bit(tmp_path))
    assert len(outcome.losses) == 1 and outcome.facts["config"]["optim"]["optimizer_type"] == "AdamW"
    assert len(told) == 1 and "optimizer_type is AdamW here, as AdamW8bit needs a package" in str(told[0])
