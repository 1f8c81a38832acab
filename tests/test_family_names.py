"""A family is known to its own folder only: whatever else is asked about it is a fact that it states."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from library import families
from tests import source

# A family's name as a word or part of one, and what people call it.
NAMES = re.compile(
    "|".join(
        rf"{re.escape(word)}(?!t(?:ion|e))" for facts in families.all_families() for word in (facts.name, facts.title)
    ),
    re.I,
)  # but "animation"
# Where families may be named: their own folders, other trainers' files and flags, translations of their texts.
OWN = (
    *(f"library/families/{name}/" for name in families.FAMILIES),
    "library/importers/",
    "kohya_gui/i18n/words/",
    "library/config/names.py",
)
REGISTRY = "library/families/__init__.py"


# What the folder of a family has, and its module of random networks.
FILES = ("__init__", "facts", "family", "keys", "model", "options", "random")
RANDOM_NAMES = ("TINY", "FULL", "make_networks", "input_shapes", "write_random_model", "demo_tables")
RANDOM_NAMES += ("convert_for_diffusers",)


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every string constant of a module that is no docstring, and of the modules that it imports."""
    tree = source.tree(path)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""


def named(text: str) -> bool:
    return bool(NAMES.search(text))


def test_nobody_else_names_a_family():
    wrong = []
    for folder in source.OURS:
        for path in sorted((source.ROOT / folder).rglob("*")):
            name = path.relative_to(source.ROOT).as_posix()
            if name.startswith(OWN) or path.suffix not in (".py", ".js", ".css", ".html"):
                continue
            lines = strings(path) if path.suffix == ".py" else enumerate(path.read_text("utf-8").splitlines(), 1)
            wrong += [f"{name}:{line}: {text.strip()[:80]}" for line, text in lines if named(text) and name != REGISTRY]
    assert not wrong, "let the family state it in its facts: " + "; ".join(wrong)


def test_nobody_asks_for_a_family_by_its_name():
    """A comparison of `family` with a constant is such a question."""
    asked = re.compile(r"(?<!asked)\.family (==|!=|in|not in) [\"'(\[]")
    files = [path for path in source.files() if not path.relative_to(source.ROOT).as_posix().startswith(OWN)]
    assert [path.name for path in files if asked.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_folder_is_complete(family):
    folder = source.ROOT / "library" / "families" / family
    missing = [name for name in FILES if not (folder / f"{name}.py").is_file()]
    assert not missing, f"library/families/{family} lacks {missing}: see 'The places of a family' in CONTRIBUTING.md"
    module = families.random_module(family)
    missing = [name for name in RANDOM_NAMES if not hasattr(module, name)]
    assert not missing, f"define {missing} in {module.__name__}, as families.random_module describes them"
    scripts = families.facts_of(family).scripts
    scripts = [name for name in scripts if not (source.ROOT / "sd-scripts" / f"{name}.py").is_file()]
    assert not scripts, f"write {scripts} in sd-scripts, short as the others"


def test_a_name_is_seen():
    assert named("networks.lora_flux") and named("a FLUX.1 transformer") and named("only-sdxl")
    assert named("flux_shift") and not named("sigmoid or shift")
