"""Half of a character, which JSON can carry and nothing can store, is refused by its option, whichever door it took."""

import json
import tomllib

import pytest

from library import families, importers
from library.config.building import build_config
from library.config.formats import to_toml
from library.config.problems import ConfigError
from library.config.schema import options_of
from library.families import config_class

SCRIPTS = [next(iter(facts.scripts)) for facts in families.all_families()]
PATHS = ("file", "files", "folder")
HALF, BYTE = "a\ud800b", "a\udc80b"  # the second is how Python keeps a byte of a file's name


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_option_takes_half_of_a_character(script):
    cls = config_class(script)
    for name, option in options_of(cls).items():
        if option.type is dict:
            continue
        for text in (HALF,) if option.kind in PATHS else (HALF, BYTE):
            for value in ([text], ["a", text]) if option.many else (text,):
                with pytest.raises(ConfigError) as refused:
                    build_config(cls, {name: value}, notes=[])
                assert f"{name} holds half of a character (\\ud" in str(refused.value)


def test_a_path_that_is_not_utf_8_is_one_but_no_config_holds_it():
    cls = config_class("sdxl_train_network")
    for name, option in options_of(cls).items():
        if option.kind in PATHS and name != "in_json":
            config = build_config(cls, {name: [BYTE] if option.many else BYTE}, notes=[])
            with pytest.raises(ConfigError) as refused:
                to_toml(config)
            assert str(refused.value) == f"{name}: the name a\\x80b is not UTF-8, and no config can hold it; rename it"


@pytest.mark.parametrize(
    "text", ["\U0001f600", "é", "\u202e", "\u2028", "\x00", "\x7f", "\ufeff", "\uffff", "'''", '"""']
)
def test_every_whole_character_comes_back_from_a_config(text):
    config = build_config(config_class("sdxl_train_network"), {"training_comment": f"a{text}b"}, notes=[])
    stored = tomllib.loads(to_toml(config))
    assert [part["training_comment"] for part in stored.values()] == [f"a{text}b"]


@pytest.mark.parametrize("name", ["training_comment", "metadata_title", "sample_prompts", "network_args"])
@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_an_imported_file_with_half_of_a_character_is_refused(tmp_path, name, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_text(json.dumps({"pretrained_model_name_or_path": "x", name: HALF}))
    with pytest.raises(ConfigError, match="half of a character|not valid YAML"):
        importers.parse_file(path)
