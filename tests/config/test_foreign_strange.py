"""Files of the importers whose values are not what they should be: a report or a sentence, and never a traceback."""

import json
import tomllib
from pathlib import Path

import pytest

from library import importers
from library.config.formats import to_toml
from library.config.ineffective import ineffective_options
from library.config.problems import ConfigError
from library.config.schema import option_values, options_of
from tests.config.arriving import CONFIGS
from tests.config.test_foreign_metadata import SDXL
from tests.config.test_foreign_scripts import EASY, LORA_SCRIPTS

FOLDER = Path(__file__).parent / "foreign"
FILES = {
    "SimpleTuner": json.loads((FOLDER / "simpletuner.json").read_text(encoding="utf-8")),
    "diffusion-pipe": tomllib.loads((FOLDER / "diffusion_pipe.toml").read_text(encoding="utf-8")),
    "lora-scripts": LORA_SCRIPTS,
    "LoRA_Easy_Training_Scripts": EASY,
    "LoRA metadata": {"__metadata__": SDXL, "lora_te1": {}},
}
WEIRD = [None, "", "nan", float("inf"), -1, 0, 1e30, "x", True, [], [1, "a"], [[]], [{}], {}, {"a": [1]}]


def changed(settings, value, inside=False):
    """Copies of a file, each with one value replaced, also within its tables."""
    for key, old in settings.items():
        yield {**settings, key: value}
        if isinstance(old, dict) and not inside:
            yield from ({**settings, key: new} for new in changed(old, value, inside=True))


@pytest.mark.parametrize("program", FILES)
def test_no_value_whatever_breaks_the_import(program):
    """Each key with a few strange values, others for every key, so that all are tried with most."""
    settings = FILES[program]
    for number, value in enumerate(WEIRD):
        for place, one in enumerate(changed(settings, value)):
            if (place + number) % 4:
                continue
            try:
                imported = importers.import_content(one, CONFIGS)
            except ConfigError:
                continue
            assert imported.report() and to_toml(imported.config) is not None and imported.account()


def test_a_value_of_its_page_that_is_gone_is_none():
    arguments = {"args": {"v_parameterization": {"is_dataset": False}}}
    assert importers.import_content({**FILES["LoRA_Easy_Training_Scripts"], "extra_args": arguments}, CONFIGS).report()


@pytest.mark.parametrize("program", FILES)
def test_kept_and_renamed_keys_act_in_the_training(program):
    """What the option table says of the config, with the files beside it; a key without effect is called that."""
    imported = importers.import_content(FILES[program], CONFIGS)
    config = imported.with_files(dict.fromkeys(imported.texts, "beside")).config
    idle, options = ineffective_options(config), options_of(type(config))
    set_here = {name for name, value in option_values(config).items() if value != options[name].default}
    for outcome in imported.outcomes:
        option = {"kept": outcome.key, "renamed": str(outcome.text)}.get(outcome.kind, "")
        assert option not in idle or option not in set_here, outcome


def test_every_importer_is_among_these_or_has_tests_of_its_own():
    tested = {*FILES, "ai-toolkit", "OneTrainer", "musubi-tuner", "kohya_ss", "sd-scripts"}
    assert tested == set(importers.files.PROGRAMS)
