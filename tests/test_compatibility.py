"""docs/dev/flags.md: each flag that people use has a test that sees its effect, and that test exists."""

import ast
import csv
import re
from collections import defaultdict

from tests.source import ROOT

PAGE = ROOT / "docs" / "dev" / "flags.md"
TITLES = {
    "sdxl_train_network": "SDXL LoRA",
    "sdxl_train": "SDXL",
    "flux_train_network": "FLUX.1 LoRA",
    "flux_train": "FLUX.1",
}
OTHERS = {
    "sdxl_train_textual_inversion": "SDXL textual inversion",  # which have nearly all flags of these, and a few
    "sdxl_train_control_net_lllite": "SDXL LLLite",
}
ROW = re.compile(r"\| `(\w+)` \| (core|often) \| ([^|]+) \| `([^`]+)::(\w+)` \|")


def in_use():
    """Flags of sd-scripts that people use -> (how often, scripts)."""
    scripts, often = defaultdict(set), {}
    with open(ROOT / "tests" / "golden" / "sd_scripts_flags.csv", encoding="utf-8", newline="") as f:
        for row in csv.DictReader(f):
            if row["common"]:
                name = row["flag"].removeprefix("--")
                scripts[name] |= set(row["scripts"].split(";"))
                often[name] = row["common"]
    return {name: (often[name], scripts[name]) for name in often}


def test_every_flag_in_use_has_a_test_that_exists_and_speaks_of_it():
    rows = {name: rest for name, *rest in ROW.findall(PAGE.read_text(encoding="utf-8"))}
    flags = in_use()
    assert rows.keys() == flags.keys()
    for name, (often, where, file, test) in rows.items():
        assert often == flags[name][0], name
        scripts = flags[name][1]
        titles = TITLES if scripts & TITLES.keys() else OTHERS
        shown = ", ".join(title for script, title in titles.items() if script in scripts)
        assert where == ("all" if scripts >= TITLES.keys() else shown), name
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        tests = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
        assert test in tests and test.startswith("test_"), f"{name}: {file} has no {test}"
        assert re.search(rf"\b{name}\b", text), f"{name} is not mentioned in {file}"
