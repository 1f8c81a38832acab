"""Recipes: valid on top of every preset, kept by presets, and what they advise for a model and a number of images."""

import pytest

from library import families
from library.config.building import build_config, draft
from library.config.formats import read_toml
from library.config.schema import changed, flatten_sections, option_values, options_of
from library.families import RUNS, config_class
from library.recipes import preset_files, recipe_files

PRESETS = [preset for preset in preset_files.all_presets() if not preset.is_profile]
ADVISED = [preset for preset in PRESETS if preset.kind in ("lora", "finetune")]
FAMILIES = sorted(families.FAMILIES)


def kind_of(preset):
    return next(made for made in map(config_class, RUNS) if (made.family, made.kind) == (preset.family, preset.kind))


def config_of(preset, **options):
    return build_config(kind_of(preset), {**read_toml(preset.path), **options}, notes=[])


@pytest.mark.parametrize("preset", ADVISED, ids=lambda preset: preset.id)
def test_a_preset_by_itself_is_the_recipe_for_its_first_purpose(preset):
    config = config_of(preset)
    recipe = recipe_files.choose_recipe(config)
    now = option_values(config)
    assert {name: now[name] for name in recipe.options} == dict(recipe.options)


@pytest.mark.parametrize("preset", ADVISED, ids=lambda preset: preset.id)
def test_every_recipe_that_fits_goes_together_with_every_preset(preset):
    config = config_of(preset)
    for recipe in recipe_files.fitting_recipes(config):
        notes = []
        built = build_config(type(config), {**flatten_sections(changed(config)), **recipe.options}, notes=notes)
        assert notes == [] and built.save == config.save and built.memory == config.memory
        assert recipe.least_steps <= built.steps.max_train_steps <= recipe.most_steps
        assert 0 < recipe.images[0] < recipe.images[1] and recipe.steps_per_image > 0


MEASURED = ("network_dim", "train_batch_size", "resolution")  # what decides about the figures of a preset


@pytest.mark.parametrize(("rank", "alpha"), [(16, 16.0), (32, 32.0), (64, 64.0)])
def test_alpha_follows_the_rank_where_a_recipe_names_its_own(rank, alpha):
    preset = next(preset for preset in PRESETS if preset.id == "krea_2/lora-12gb")
    recipes = recipe_files.fitting_recipes(config_of(preset, network_dim=rank))
    assert {recipe.options["network_alpha"] for recipe in recipes} == {alpha}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_recipes_that_change_nothing_that_was_measured(family):
    recipes, models = recipe_files.of_family(family)
    purposes = {recipe.purpose for recipe in recipes if recipe.kind == "lora"}
    assert purposes >= {"character", "style"}, f"write presets/recipes/{family}.toml"
    config = config_class(families.lora_script(family))
    for case in (*recipes, *models):
        options = options_of(
            config_class(next(s for s in RUNS if (config_class(s).family, config_class(s).kind) == (family, case.kind)))
        )
        assert case.options.keys() <= options.keys() and case.options.keys().isdisjoint(MEASURED)
        for name, wanted in case.when.items():
            assert set(wanted) <= {str(choice) for choice in options_of(config)[name].choices}


@pytest.mark.parametrize(
    ("family", "options", "purposes"),
    [
        ("sdxl", {}, ["character", "style"]),
        ("flux", {}, ["character", "style"]),
        ("flux", {"model_type": "kontext"}, ["edit"]),
        ("flux_2", {}, ["character", "style", "edit"]),
        ("qwen_image", {"model_version": "original"}, ["character", "style"]),
        ("qwen_image", {"model_version": "edit-2509"}, ["edit"]),
        ("zimage", {"model_version": "turbo"}, ["character", "style"]),
    ],
)
def test_purposes_are_those_that_the_model_can_learn(family, options, purposes):
    config = draft(config_class(families.lora_script(family)), options)
    assert [recipe.purpose for recipe in recipe_files.fitting_recipes(config)] == purposes
    assert recipe_files.choose_recipe(config, "nonsense").purpose == purposes[0]


def test_what_a_model_requires_comes_on_top_and_never_shortens_a_training():
    klein = draft(config_class("flux_2_train_network"), {"model_version": "klein-base-9b"})
    style, edit = recipe_files.choose_recipe(klein, "style"), recipe_files.choose_recipe(klein, "edit")
    assert style.options["learning_rate"] == 1e-4 and style.options["max_train_steps"] == 1000
    assert (style.least_steps, style.most_steps, edit.most_steps) == (1000, 2000, 3000)
    turbo = recipe_files.choose_recipe(draft(config_class("zimage_train_network"), {"model_version": "turbo"}))
    assert turbo.options["assistant_lora"].startswith("ostris/zimage_turbo_training_adapter/")
    assert recipe_files.of_family("none") == ((), ())


@pytest.mark.parametrize(
    ("images", "at_once", "steps", "words"),
    [
        (30, 1, 3000, "30 images, each seen about 100 times: 3,000 steps."),
        (1, 1, 2000, "1 image, each seen about 2,000 times: 2,000 steps, as fewer teach too little."),
        (200, 1, 5000, "200 images, each seen about 25 times: 5,000 steps, as more are rarely needed."),
        (30, 8, 400, "30 images, each seen about 107 times: 400 steps."),
        (30, 10**6, 50, "50 steps"),
        (5000, 1, 5000, "5,000 images, each seen about 1 time: 5,000 steps, as more are rarely needed."),
        (9000, 1, 5000, "9,000 images, of which some are not seen: 5,000 steps, as more are rarely needed."),
    ],
)
def test_steps_follow_images_within_limits(images, at_once, steps, words):
    recipe = recipe_files.choose_recipe(config_class("sdxl_train_network")())
    proposal = recipe_files.proposed_steps(recipe, images, at_once)
    assert proposal.steps == steps and words in str(proposal.reason)


def test_presets_of_earlier_versions_are_found_by_their_names(tmp_path):
    assert preset_files.by_id("flux/dreambooth-chroma-24gb").id == "flux/finetune-chroma-24gb"
    assert preset_files.by_id("flux/lora-24gb").id == "flux/lora-24gb" and preset_files.by_id("flux/none") is None
    old = preset_files.PRESETS_FOLDER / "zimage" / "dreambooth-16gb.toml"
    assert preset_files.path_today(old).name == "finetune-16gb.toml"
    own = tmp_path / "dreambooth-mine.toml"
    assert preset_files.path_today(own) == own  # no preset of ours
    (tmp_path / "finetune-mine.toml").write_text("")
    own.write_text("")
    assert preset_files.path_today(own) == own
