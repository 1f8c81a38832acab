"""Every flag of sd-scripts is an equal option here, or names.py says what became of it."""

import csv
from pathlib import Path

import pytest

from library import families
from library.config import building
from library.config.names import FOREIGN, OPTION_ALIASES, RETIRED
from library.config.schema import options_of

GOLDEN = Path(__file__).parents[1] / "golden" / "sd_scripts_flags.csv"
TYPES = {"str": str, "int": int, "float": float, "flag": bool, "int_or_float": float, "Path": Path}
MORE_CHOICES = {
    "sample_sampler": {"lcm"},  # of LoRAs for few steps
    "model_type": {"krea", "kontext", "fill"},
}  # relatives of FLUX.1 that sd-scripts does not train, or takes for dev
OWN = {"config_file", "output_config"}  # of the command line itself


def upstream():
    with open(GOLDEN, encoding="utf-8", newline="") as f:
        for row in csv.DictReader(f):
            for script in row["scripts"].split(";"):
                yield script, row["flag"].removeprefix("--"), row


@pytest.mark.parametrize("script", sorted({script for script, _, _ in upstream()}))
def test_every_flag_is_equal_or_accounted_for(script):
    flags_of_script = options_of(families.config_class(script))
    rows = {name: row for other, name, row in upstream() if other == script and name not in OWN}
    wrong = {
        name: why for name, row in rows.items() if (why := difference(script, flags_of_script.get(name), name, row))
    }
    assert len(rows) > 100 and wrong == {}


def difference(script, option, name, row):
    """How an option is not what the flag was; nothing where it is the same, or names.py has an answer."""
    if not option:
        answered = name in building.understood(families.config_class(script))
        return "" if answered else "neither an option nor one that is answered with advice"
    kind, listed = row["type"].split()[0], set(row["choices"].split("|")) - {"None"} | MORE_CHOICES.get(name, set())
    if row["choices"]:
        same_values = {str(choice) for choice in option.choices} == listed and not option.open
    else:
        same_values = (option.open or not option.choices) and option.type is TYPES[kind]
    unlike = {
        "one value or many": option.many != ("nargs" in row["type"]),
        "type or choices": not same_values,
        "default": option.default != default(row, option),
    }
    return ", ".join(what for what, is_so in unlike.items() if is_so)


def default(row, option):
    text = row["default"]
    if text == "None":
        return () if option.many else None
    if text == "''":
        return ""
    return text == "True" if option.type is bool else option.read(text.strip('"'))


def test_advice_on_old_names_points_to_existing_options():
    every = {name for script in families.RUNS for name in options_of(families.config_class(script))}
    assert set(OPTION_ALIASES.values()) <= every
    # What one script has and others answer with advice.
    assert every & (set(OPTION_ALIASES) | set(RETIRED) | set(FOREIGN)) == {
        *("conditioning_data_dir", "learning_rate_te", "stop_text_encoder_training"),
    }
