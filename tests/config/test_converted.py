"""Options of sd-scripts that became others: read as those, with a note."""

import pytest

from library import families
from library.cli import train_script
from library.config import building
from library.config.problems import ConfigError


@pytest.mark.parametrize("script", ["flux_train_network", "flux_train"])
@pytest.mark.parametrize(
    ("old", "expected", "words"),
    [
        ({"split_mode": True}, 18, "split_mode is read as blocks_to_swap = 18"),
        ({"split_mode": True, "blocks_to_swap": 4}, 4, "split_mode has no effect: blocks_to_swap is set"),
        ({"split_mode": True, "blocks_to_swap": 0}, 0, "split_mode has no effect: blocks_to_swap is set"),
        ({"double_blocks_to_swap": "6"}, 6, "read as blocks_to_swap = 6"),
        ({"single_blocks_to_swap": 9, "double_blocks_to_swap": 2}, 6, "are read as blocks_to_swap = 6"),
        ({"single_blocks_to_swap": 1}, None, "less than one"),
        ({"single_blocks_to_swap": 0, "double_blocks_to_swap": "", "split_mode": False}, None, ""),
    ],
)
def test_old_options_of_swapping_are_converted_with_a_note(script, old, expected, words):
    notes: list[str] = []
    config = building.build_config(families.config_class(script), old, notes=notes)
    assert config.memory.blocks_to_swap == expected
    assert [note for note in notes if "blocks_to_swap" in str(note) and words in str(note)] if words else not notes


def test_flags_of_swapping_are_converted_over_those_of_a_file(tmp_path):
    file = tmp_path / "old.toml"
    file.write_text("split_mode = true\n", encoding="utf-8")
    lora = families.config_class("flux_train_network")
    assert train_script.read_command_line(lora, ["--config_file", str(file)]).config.memory.blocks_to_swap == 18
    flags_too = train_script.read_command_line(lora, ["--config_file", str(file), "--blocks_to_swap", "2"])
    assert flags_too.config.memory.blocks_to_swap == 2
    full = families.config_class("flux_train")
    assert train_script.read_command_line(full, ["--double_blocks_to_swap", "3"]).config.memory.blocks_to_swap == 3


@pytest.mark.parametrize(
    ("old", "words"),
    [
        ({"double_blocks_to_swap": 40}, "at most 35"),
        ({"double_blocks_to_swap": -1}, "at least 0"),
        ({"split_mode": 7}, "true"),
    ],
)
def test_old_options_of_swapping_with_a_wrong_value_are_named(old, words):
    with pytest.raises(ConfigError) as caught:
        building.build_config(families.config_class("flux_train"), old, notes=[])
    assert words in str(caught.value) and next(iter(old)) in str(caught.value)
