"""What benchmarks/presets.py compares: every preset of a size, and ways that a training could have."""

import pytest

from benchmarks import presets
from library import families
from library.config.schema import build, read_toml


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_every_preset_is_measured_beside_ways_that_a_config_accepts(family):
    found = presets.cases(family, None, "full")
    held = {f"{case.name}.toml": case for case in found if case.cap}
    # DreamBooth's hold the settings of the fine-tunes', and of Chroma's it is said that they are not measured.
    files = {path.name for path in (presets.ROOT / "presets" / family).glob("*.toml")}
    others = ("dreambooth-", "-chroma-", "-kontext-", "-fill-")
    assert files - set(held) == {name for name in files if any(word in name for word in others)}
    assert all(f"-{case.cap:.0f}gb" in name for name, case in held.items())
    for case in found:
        notes: list[str] = []
        build(families.config_class(case.script), case.values, notes=notes)
        assert notes == []
    ways = [case for case in found if not case.cap]
    profiles = [way for way in ways if " by " in way.name]
    assert {way.name.split(" by ")[1] for way in profiles} == {"debug", "fast_start", "low_vram", "max_speed"}
    assert len(ways) == len(profiles) + sum(len(ways) for kind, ways in presets.WAYS.items() if kind.startswith(family))
    assert all(way.values not in [case.values for case in held.values()] for way in ways if way not in profiles)


def test_one_measurement_is_of_the_fine_tune_and_of_dreambooth():
    for path in (presets.ROOT / "presets").glob("*/dreambooth-*.toml"):
        assert read_toml(path) == read_toml(path.with_name(path.name.replace("dreambooth", "finetune")))


def test_graphs_are_made_once_for_cases_that_share_them():
    by_name = {case.name: case for case in presets.cases("flux", None, "full")}
    assert by_name["lora-8gb"].graphs == by_name["lora-12gb"].graphs != by_name["lora-24gb"].graphs
    assert by_name["lora-80gb"].graphs != by_name["finetune-80gb"].graphs


def test_a_preset_can_be_measured_with_other_values_under_its_own_memory():
    every = presets.cases("flux", None, "full")
    as_shipped = presets.chosen(every, "flux lora-12gb")
    changed = presets.chosen(every, "flux lora-12gb blocks_to_swap=20 compile_mode='reduce-overhead'")
    assert as_shipped in every and changed.cap == as_shipped.cap and changed.title != as_shipped.title
    assert changed.values == as_shipped.values | {"blocks_to_swap": 20, "compile_mode": "reduce-overhead"}
    with pytest.raises(ValueError, match="'flux lora-13gb' is not a preset"):
        presets.chosen(every, "flux lora-13gb")
