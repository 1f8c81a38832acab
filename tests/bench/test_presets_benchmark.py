"""What benchmarks/presets.py compares: every preset of a size, and ways that a training could have."""

import pytest

from benchmarks import preset_cases as presets
from library import families
from library.config.building import build_config


@pytest.mark.parametrize("family", presets.LEAST)
def test_every_preset_is_measured_beside_ways_that_a_config_accepts(family):
    cases = presets.preset_cases(family, None, "full")
    held = {f"{case.name}.toml": case for case in cases if case.cap}
    assert held and all(f"-{case.cap:.0f}gb" in name for name, case in held.items())
    for case in cases:
        notes: list[str] = []
        build_config(families.config_class(case.script), case.values, notes=notes)
        assert notes == [], case.title
    ways = [case for case in cases if not case.cap]
    profiles = [way for way in ways if " by " in way.name]
    if family in presets.PROFILED:
        assert {way.name.split(" by ")[1] for way in profiles} == {"debug", "fast_start", "low_vram", "max_speed"}
    ways_of_family = [way for kind, ways in presets.TABLES["ways"].items() if kind.split()[0] == family for way in ways]
    assert ways_of_family and len(ways) == len(profiles) + len(ways_of_family)
    assert all(way.values not in [case.values for case in held.values()] for way in ways if way not in profiles)


def test_every_preset_of_every_family_is_a_case():
    files = {
        path.relative_to(presets.PROJECT_ROOT / "presets")
        for path in (presets.PROJECT_ROOT / "presets").glob("*/*-*gb.toml")
    }
    measured = {
        (presets.preset_folder(case.family), case.name)
        for family in presets.LEAST
        for case in presets.preset_cases(family, None, "full")
        if case.cap
    }
    capped = {(file.parent.name, file.stem) for file in files if file.stem.startswith(presets.PRESET_KINDS)}
    assert measured == capped, f"correct benchmarks/presets.toml: {sorted(measured ^ capped)}"
    with_presets = {file.parent.name for file in files}
    assert {presets.preset_folder(family) for family in presets.LEAST} == with_presets <= {*families.FAMILIES}


def test_graphs_are_made_once_for_cases_that_share_them():
    by_name = {case.name: case for case in presets.preset_cases("flux", None, "full")}
    assert by_name["lora-8gb"].graphs == by_name["lora-12gb"].graphs != by_name["lora-24gb"].graphs
    assert by_name["lora-80gb"].graphs != by_name["finetune-80gb"].graphs


def test_a_preset_can_be_measured_with_other_values_under_its_own_memory():
    every = presets.preset_cases("flux", None, "full")
    as_shipped = presets.choose_case(every, "flux lora-12gb")
    changed = presets.choose_case(every, "flux lora-12gb blocks_to_swap=20 compile_mode='reduce-overhead'")
    assert as_shipped in every and changed.cap == as_shipped.cap and changed.title != as_shipped.title
    assert changed.values == as_shipped.values | {"blocks_to_swap": 20, "compile_mode": "reduce-overhead"}
    with pytest.raises(ValueError, match="'flux lora-13gb' is neither a preset"):
        presets.choose_case(every, "flux lora-13gb")
