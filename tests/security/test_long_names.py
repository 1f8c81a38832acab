"""However long a name or a value in an imported file is, no message repeats much of it."""

import copy
from pathlib import Path

import pytest

from library import importers
from library.config.problems import ConfigError
from tests.config.arriving import CONFIGS
from tests.config.test_foreign_metadata import SDXL

FOREIGN = Path(__file__).parents[1] / "config/foreign"
FILES = {path.name: path for path in sorted(FOREIGN.iterdir()) if path.suffix in (".json", ".toml", ".yaml", ".yml")}
LONG = "zorb" * 5000  # letters that no message has by itself


def places(table, path=()):
    """The path to each value in a table that is no table or list itself."""
    if isinstance(table, dict | list):
        for key, value in table.items() if isinstance(table, dict) else enumerate(table):
            yield from places(value, (*path, key))
    else:
        yield path


def with_value(table, path, value):
    changed = copy.deepcopy(table)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def messages(settings):
    try:
        imported = importers.import_content(settings, CONFIGS)
    except ConfigError as refused:
        return [str(refused)]
    outcomes = [f"{outcome.key}: {outcome.text}" for outcome in imported.outcomes]
    return [*map(str, imported.lines()), *outcomes]


def assert_short(settings, path):
    for text in messages(settings):
        assert LONG[:400] not in text, f"{path}: {text[:200]}"


@pytest.mark.parametrize("name", [*FILES, "metadata"])
def test_no_message_of_an_import_repeats_a_long_value(name):
    settings = {"__metadata__": SDXL, "lora_te1": 1} if name == "metadata" else importers.parse_file(FILES[name])
    for path in places(settings):
        assert_short(with_value(settings, path, LONG), path)
    for path in {path[:-1] for path in places(settings) if isinstance(path[-1], str)}:
        assert_short(with_value(settings, (*path, LONG), "1"), path)


@pytest.mark.parametrize("name", FILES)
def test_no_error_of_a_file_repeats_a_long_value(tmp_path, name):
    for content in (f"{LONG} = ", f'"{LONG}": ', f"[{LONG}", f"- {LONG}: *{LONG}"):
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(ConfigError) as refused:
            importers.parse_file(path)
        assert LONG[:400] not in str(refused.value)
