"""What a file says twice is refused, since neither can be known to be meant."""

import json

import pytest

from library.config import dataset
from library.config.building import Layer, read_layers
from library.config.formats import read_toml
from library.config.problems import ConfigError
from library.config.schema import options_of
from library.families import config_class
from library.importers import files

SDXL = config_class("sdxl_train_network")


def test_an_option_in_two_tables_is_refused_and_all_places_are_named(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("seed = 1\n[steps]\nseed = 42\n[other]\nseed = 7\n[more]\nclip_skip = 1\n[last]\nclip_skip = 2\n")
    with pytest.raises(ConfigError) as refused:
        read_toml(path)
    assert [str(problem) for problem in refused.value.problems] == [
        "in run.toml: seed is in both the part above all tables and [steps]: keep one of the two",
        "in run.toml: seed is in both [steps] and [other]: keep one of the two",
        "in run.toml: clip_skip is in both [more] and [last]: keep one of the two",
    ]
    with pytest.raises(ConfigError, match="seed is in both"):
        files.import_file(path, {"sdxl_train_network": SDXL})


def test_an_option_by_its_old_and_its_new_name_is_refused():
    for old, new in SDXL.aliases.items():
        if new in options_of(SDXL):
            reading = read_layers(SDXL, [Layer({old: 1, new: 2}, "a.toml")])
            wanted = f"in a.toml: {new} and {old} are the same option: keep one of the two"
            assert wanted in [str(problem) for problem in reading.problems], old
            separate = read_layers(SDXL, [Layer({old: 1}, "a.toml"), Layer({new: 2}, "--")])  # a flag wins
            assert "the same option" not in " ".join(str(problem) for problem in separate.problems)


def test_a_data_set_file_says_each_thing_once(tmp_path):
    (tmp_path / "a.toml").write_text("[general]\nresolution = 512\n[general]\nresolution = 1024\n")
    (tmp_path / "b.toml").write_text("[general]\nresolution = 512\nresolution = 1024\n")
    (tmp_path / "c.json").write_text('{"general": {"resolution": 512, "resolution": 1024}}')
    for name in ("a.toml", "b.toml", "c.json"):
        with pytest.raises(ConfigError, match=f"{name}.*(Cannot|twice)"):
            dataset.read_tables(tmp_path / name)
    (tmp_path / "d.json").write_text(json.dumps({"general": {"resolution": 512}, "datasets": [{"resolution": 1024}]}))
    assert dataset.read_tables(tmp_path / "d.json")  # a table below another says it anew
