"""Profiles of compiling: each fits all four scripts and every preset, holds no default, and changes only compiling."""

import pytest

from kohya_gui.form import presets
from library import families
from library.config.building import build_config
from library.config.formats import read_toml
from library.config.problems import OptionName
from library.config.schema import changed, flatten_sections, option_values
from library.recipes import preset_files

PROFILES = preset_files.profiles()
NAMES = ["balanced", "debug", "fast_start", "low_vram", "max_speed"]


def test_both_tabs_offer_the_same_profiles():
    assert [p.path.stem for p in PROFILES] == NAMES
    assert [p for p in preset_files.presets_of_kind("finetune") if p.is_profile] == PROFILES


@pytest.mark.parametrize("script", families.RUNS)
@pytest.mark.parametrize("profile", PROFILES, ids=NAMES)
def test_a_profile_builds_for_every_script_and_holds_no_default(profile, script):
    notes = []
    config = build_config(families.config_class(script), read_toml(profile.path), notes=notes)
    assert notes == []
    assert config.compile.compile
    assert set(read_toml(profile.path)) == set(flatten_sections(changed(config)))


@pytest.mark.parametrize("profile", PROFILES, ids=NAMES)
def test_a_profile_says_in_one_line_when_to_use_it(profile):
    assert profile.sentence.endswith(".") and profile.path.read_text(encoding="utf-8").count("#") == 1
    assert str(profile.title).startswith("Compile, ") and len(str(profile.title)) < 45


def test_the_fast_start_compiles_as_little_as_there_is():
    """compile_dynamic = true serves all sizes as auto does, and takes two to three times as long to compile."""
    (fast,) = (preset for preset in PROFILES if preset.path.stem == "fast_start")
    chosen = build_config(families.config_class("flux_train"), read_toml(fast.path), notes=[]).compile
    assert chosen.dynamic is None and chosen.compile_mode == "default" and not chosen.ahead
    both = {"DoubleStreamBlock": None, "SingleStreamBlock": None}  # every block of FLUX.1 is a transformer's
    assert chosen.ranges() == both
    sdxl = build_config(families.config_class("sdxl_train"), read_toml(fast.path), notes=[]).compile
    assert sdxl.ranges() == {"BasicTransformerBlock": None}  # ResNet blocks are most of the compiling, and little else


@pytest.mark.parametrize("script", families.RUNS)
def test_one_profile_after_another_leaves_only_the_last(script):
    config_class = families.config_class(script)
    now = {"learning_rate": "3e-4", "resolution": "768", "compile_cache_dir": "/c", "output_dir": "/o", "foreign": "x"}
    for profile in (*PROFILES, PROFILES[0]):
        config = presets.apply(profile, config_class, now)
        now = option_values(config)
        options = {"learning_rate": 3e-4, "resolution": "768", "compile_cache_dir": "/c", "output_dir": "/o"}
        if profile.path.stem == "low_vram" or now["gradient_checkpointing"]:  # what saves memory stays
            options["gradient_checkpointing"] = True
        assert flatten_sections(changed(config)) == options | read_toml(profile.path)


@pytest.mark.parametrize("profile", PROFILES, ids=NAMES)
def test_a_profile_over_any_preset_keeps_what_saves_memory_and_says_what_it_leaves_out(profile):
    saving = "gradient_checkpointing compile_activation_budget blocks_to_swap fp8_base fp8_compute train_batch_size"
    for preset in preset_files.all_presets():
        if preset.is_profile:
            continue
        scripts = map(families.config_class, families.facts_of(preset.family).scripts)
        config_class = next(config for config in scripts if config.kind == preset.kind)
        before, notes = option_values(presets.apply(preset, config_class, {})), []
        after = option_values(presets.apply(profile, config_class, before, notes))
        for name in saving.split():
            assert after.get(name) == before.get(name) or profile.path.stem == "low_vram", (preset.id, name)
        options = read_toml(profile.path)
        left_out = {str(note).partition(" is left out: ")[0] for note in notes}
        assert {name for name in options if after[name] != options[name]} <= left_out


@pytest.mark.parametrize("profile", PROFILES, ids=NAMES)
def test_a_profile_keeps_the_share_of_activations_unless_they_wait_in_cpu_memory(profile):
    """Without it, steps of such a preset take up to half as long again, and without checkpoints more memory."""
    config_class, notes = families.config_class("flux_train_network"), []
    now = {"compile": True, "compile_activation_budget": 0.3, "gradient_checkpointing": True}
    config = presets.apply(profile, config_class, now, notes)
    if profile.path.stem == "low_vram":
        assert config.memory.cpu_offload_checkpointing and not config.compile.keeps_by_budget
        assert ["compile_activation_budget is left out" in str(note) for note in notes] == [True]
    else:
        assert config.compile.compile_activation_budget == 0.3 and not notes
        assert presets.chosen_profile(config) == profile.id


def test_little_memory_over_swapped_blocks_kept_attention_and_mistakes():
    (low,) = (preset for preset in PROFILES if preset.path.stem == "low_vram")
    config_class, notes = families.config_class("flux_train_network"), []
    swapped = presets.apply(low, config_class, {"blocks_to_swap": 20, "gradient_checkpointing": True}, notes)
    assert swapped.memory.blocks_to_swap == 20 and swapped.memory.cpu_offload_checkpointing and not notes
    options = {"gradient_checkpointing": True, "checkpoint_keep_attention": True}
    offloaded = presets.apply(low, config_class, options).memory
    assert offloaded.cpu_offload_checkpointing and not offloaded.checkpoint_keep_attention
    share = {"gradient_checkpointing": True, "compile": True, "compile_activation_budget": 0.5}
    without_share = presets.apply(low, config_class, share, notes)
    assert without_share.memory.cpu_offload_checkpointing and without_share.compile.compile_activation_budget == 1
    (note,) = notes  # the page shows both options by their labels
    assert isinstance(note.arguments["profile"], OptionName) and "cpu_offload_checkpointing" in str(note)
    assert isinstance(note.arguments["why"].arguments["other"], OptionName)
    mistaken = presets.apply(low, config_class, options | {"resolution": "128", "enable_bucket": True}).memory
    assert mistaken == offloaded  # that 128 is below min_bucket_reso is for the check to say
