"""Profiles of compiling: each fits all four scripts, holds no default, and changes nothing but what it is about."""

import pytest

from kohya_gui.form import presets
from library import families
from library.config.schema import build, changed, flat, options, read_toml

PROFILES = [preset for preset in presets.presets(adapters=True) if preset.is_profile]
NAMES = ["balanced", "debug", "fast_start", "low_vram", "max_speed"]


def test_both_tabs_offer_the_same_profiles():
    assert [p.path.stem for p in PROFILES] == NAMES
    assert [p for p in presets.presets(adapters=False) if p.is_profile] == PROFILES


@pytest.mark.parametrize("script", families.RUNS)
@pytest.mark.parametrize("profile", PROFILES, ids=NAMES)
def test_a_profile_builds_for_every_script_and_holds_no_default(profile, script):
    notes = []
    config = build(families.config_class(script), read_toml(profile.path), notes=notes)
    assert notes == []
    assert config.compile.compile
    assert set(read_toml(profile.path)) == set(flat(changed(config)))


@pytest.mark.parametrize("profile", PROFILES, ids=NAMES)
def test_a_profile_says_in_one_line_when_to_use_it(profile):
    assert profile.sentence.endswith(".") and profile.path.read_text(encoding="utf-8").count("#") == 1
    assert profile.title.startswith("Compile, ") and len(profile.title) < 45


def test_the_fast_start_compiles_as_little_as_there_is():
    """compile_dynamic = true serves all sizes as auto does, and takes two to three times as long to compile."""
    (fast,) = (preset for preset in PROFILES if preset.path.stem == "fast_start")
    chosen = build(families.config_class("flux_train"), read_toml(fast.path), notes=[]).compile
    assert chosen.dynamic is None and chosen.compile_mode == "default" and not chosen.ahead


@pytest.mark.parametrize("script", families.RUNS)
def test_one_profile_after_another_leaves_only_the_last(script):
    config_class = families.config_class(script)
    now = {"learning_rate": "3e-4", "resolution": "768", "compile_cache_dir": "/c", "output_dir": "/o", "foreign": "x"}
    for profile in (*PROFILES, PROFILES[0]):
        config = presets.apply(profile, config_class, now)
        now = {n: getattr(getattr(config, o.section), n) for n, o in options(config_class).items()}
        kept = {"learning_rate": 3e-4, "resolution": "768", "compile_cache_dir": "/c", "output_dir": "/o"}
        assert flat(changed(config)) == kept | read_toml(profile.path)
