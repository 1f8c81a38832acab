"""Every flag of sd-scripts is an equal option here, or names.py says what became of it."""

import csv
from pathlib import Path

import pytest

from library import families
from library.config.names import FOREIGN, OPTION_ALIASES, RETIRED
from library.config.schema import options_of

GOLDEN = Path(__file__).parents[1] / "golden" / "sd_scripts_flags.csv"
TYPES = {"str": str, "int": int, "float": float, "flag": bool, "int_or_float": float, "Path": Path}
MORE_CHOICES = {
    "model_type": {"krea", "kontext", "fill"}
}  # relatives of FLUX.1 that sd-scripts does not train, or takes for dev
OWN = {"config_file", "output_config"}  # of the command line itself


def upstream():
    with open(GOLDEN, encoding="utf-8", newline="") as f:
        for row in csv.DictReader(f):
            for script in row["scripts"].split(";"):
                yield script, row["flag"].removeprefix("--"), row


FLAGS = [pytest.param(s, n, r, id=f"{s}-{n}") for s, n, r in upstream() if n not in OWN]


@pytest.mark.parametrize(("script", "name", "row"), FLAGS)
def test_flag_is_equal_or_accounted_for(script, name, row):
    known = options_of(families.config_class(script))
    if name not in known:
        answer = (
            name in families.config_class(script).old
            or RETIRED.get(name)
            or FOREIGN.get(name)
            or OPTION_ALIASES.get(name)
        )
        assert answer, f"{name} is neither an option of {script} nor in names.py"
        return
    option, kind = known[name], row["type"].split()[0]
    assert option.many == ("nargs" in row["type"])
    if row["choices"]:
        added = MORE_CHOICES.get(name, set())
        assert {str(c) for c in option.choices} == set(row["choices"].split("|")) - {"None"} | added
        assert not option.open
    else:
        assert option.open or not option.choices
        assert option.type is TYPES[kind]
    assert option.default == default(row, option)


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
    assert every & (set(OPTION_ALIASES) | set(RETIRED) | set(FOREIGN)) == {"conditioning_data_dir"}
