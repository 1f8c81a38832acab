"""Samples of a preset take less than 5 % of its steps' time where the GPU is busy all the time: docs/recipes.md.

In passes through the denoiser at the training's size: a LoRA's step is two (three with checkpointing), a fine-tune's
three (four). Samples are counted as not compiled, which takes 1.5 times as long per pass (FLUX.1 with checkpointing on
an H200: 0.748 instead of 0.490 s per step).
"""

import math

import pytest

from library import families
from library.check import preview_time
from library.config.building import build_config
from library.config.schema import changed, flatten_sections
from library.recipes import preset_files, recipe_files
from library.sampling import caption_prompts
from library.train.step.clock import Clock
from tests.recipes.test_recipes import PRESETS, config_of

EAGER, TEXT, TOKEN = 1.5, {"sdxl": 0}, 16
TRAINED = 1024


def images_steps(config):
    """How many training steps a sample image takes as long as."""
    defaults = families.family_for(config).sample_defaults
    few = caption_prompts.with_few_steps(defaults)["sample_steps"]
    passes = few * (2 if float(defaults.get("scale") or 1) > 1 else 1)
    text = TEXT.get(config.family, families.facts_of(config.family).text_tokens)
    shown = (TRAINED // TOKEN) ** 2 * min(config.control_images.least, 1)
    size = ((caption_prompts.MAX_SAMPLE_SIDE // TOKEN) ** 2 + text + shown) / ((TRAINED // TOKEN) ** 2 + text + shown)
    step = (3 if config.kind == "finetune" else 2) + config.memory.gradient_checkpointing
    return passes * size * EAGER / step


def share(config):
    total, every = config.steps.max_train_steps, config.sample.sample_every_n_steps
    rounds = 1 + math.ceil(total / every)  # at first, at each interval and at the end
    return rounds * (config.sample.sample_from_captions + 1) * images_steps(config) / total


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.id)
def test_the_check_counts_about_the_same(preset):
    config = config_of(preset)
    total = config.steps.max_train_steps
    counted = preview_time.preview_time(config, Clock(total, total, 1), (TRAINED, TRAINED))
    assert counted.times == 1 + math.ceil(total / config.sample.sample_every_n_steps)
    assert counted.images == config.sample.sample_from_captions + 1
    assert share(config) / 2.5 < counted.share < 1.5 * share(config)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.id)
def test_every_preset_samples_at_first_and_in_little_time(preset, monkeypatch):
    assert preset.path.parent != preset_files.PRESETS_FOLDER
    plain = config_of(preset)
    configs = [plain] + [
        build_config(type(plain), {**flatten_sections(changed(plain)), **recipe.options}, notes=[])
        for recipe in recipe_files.fitting_recipes(plain)
    ]
    for config in configs:
        assert config.sample.sample_images and config.sample.sample_at_first and config.sample.sample_from_captions
        assert share(config) < 0.05, (preset.id, share(config))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.id)
@pytest.mark.parametrize("images", [1, 12, 100, 2000])
def test_a_training_of_any_proposed_length_shows_halfway_what_it_learns(preset, images):
    """Samples of the shortest trainings may take more of their time, so that there is something to see."""
    plain = config_of(preset)
    for recipe in recipe_files.fitting_recipes(plain):
        values = {**flatten_sections(changed(plain)), **recipe.options}
        proposal = recipe_files.proposed_steps(recipe, images)
        config = build_config(type(plain), values | recipe_files.options_of_length(proposal, values), notes=[])
        assert config.steps.max_train_steps == proposal.steps
        assert config.sample.sample_every_n_steps <= min(proposal.steps / 2, values["sample_every_n_steps"])
        assert share(config) < (0.12 if proposal.steps < 1000 else 0.06), (preset.id, recipe.purpose, share(config))
