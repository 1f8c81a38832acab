"""How long files and functions may be. A reader's patience is a budget like any other."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests import source

# Why: docs/decisions/2026-11-23-no-budget-for-all-lines.md
FILE_LINES = 400
FUNCTION_LINES = 60
LAYOUT_EXCEPTIONS = 20  # code that ruff may not lay out: a table whose columns carry meaning, and little else
ANY_PER_100 = 6.6  # annotations that say nothing, of 100: values of other packages, and what a file may hold

# Longer functions, each with the reason why cutting it would make it worse.
EXCEPTIONS: dict[str, str] = {}


class Found(NamedTuple):
    """What a file defines, kept without its syntax tree: all tests of this file read every source."""

    functions: list[tuple[str, int]]  # with their lines
    outer: list[str]  # functions of the module
    classes: list[tuple[str, int]]  # with the line
    annotations: list[str]


@cache
def looked_at(path: Path) -> Found:
    tree = source.tree(path)
    code_facts = Found([], [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], [], [])
    for node in source.nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            code_facts.functions.append((node.name, (node.end_lineno or node.lineno) - node.lineno + 1))
        elif isinstance(node, ast.ClassDef):
            code_facts.classes.append((node.name, node.lineno))
        said = [getattr(node, name, None) for name in ("annotation", "returns")]
        code_facts.annotations.extend(ast.unparse(annotation) for annotation in said if isinstance(annotation, ast.AST))
    return code_facts


def test_files_are_short():
    scripts = [path for path in (source.ROOT / "kohya_gui").rglob("*.js") if "vendor" not in path.parts]
    files = [*source.files(), *scripts]
    lengths = {str(p.relative_to(source.ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in files}
    long = {name: lines for name, lines in lengths.items() if lines > FILE_LINES}
    assert not long, f"over {FILE_LINES} lines, each is probably two things: {long}"


def test_functions_are_short():
    long = {}
    for path in source.files():
        for name, lines in looked_at(path).functions:
            name = f"{source.module(path)}.{name}"
            if lines > FUNCTION_LINES and name not in EXCEPTIONS:
                long[name] = lines
    assert not long, f"over {FUNCTION_LINES} lines: {long}"


def test_the_formatter_lays_out_nearly_all_code():
    """Lines under `fmt: skip` or `fmt: off` are as long as somebody likes, which hides how long a file really is."""
    pattern = re.compile(r"#\s*(?:fmt|yapf):\s*(?:skip|off|disable)\b")
    places = [
        f"{path.relative_to(source.ROOT)}:{number}"
        for path in sorted(source.ROOT.rglob("*.py"))
        if not {"node_modules", ".venv"} & {*path.relative_to(source.ROOT).parts}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert len(places) <= LAYOUT_EXCEPTIONS, "let ruff format them: " + ", ".join(places)


def test_few_annotations_are_any():
    every = [text for path in source.files() for text in looked_at(path).annotations]
    unsaid = [text for text in every if re.search(r"\bAny\b", text)]
    assert len(unsaid) / len(every) * 100 <= ANY_PER_100, f"{len(unsaid)} of {len(every)} annotations say Any"


def test_the_types_of_all_rooms_are_checked():
    config = tomllib.loads((source.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pyrefly"]
    assert config.pop("project-includes") == ["library", "kohya_gui", "benchmarks"]
    assert config == {"preset": "default", "errors": {"missing-import": "warn"}}, "nothing is left out"


def test_a_class_name_exists_once():
    """A name in a log, a record or an error is of one thing. LyCORIS finds layers by such names, so that what has the
    name of another model's layer is that layer, shared."""
    name_counts: dict[str, list[str]] = {}
    for path in [*source.files(), *sorted((source.ROOT / "benchmarks").rglob("*.py"))]:
        for name, line in looked_at(path).classes:
            name_counts.setdefault(name, []).append(f"{source.module(path)}:{line}")
    twice = {name: places for name, places in name_counts.items() if len(places) > 1}
    assert not twice, f"name them after what they are, or share the class: {twice}"


def test_functions_are_named_after_what_they_do():
    """A verb or a noun that can be searched for, and no word that fits anything."""
    vague = [
        f"{source.module(path)}.{name}"
        for path in [*source.files(), *sorted((source.ROOT / "benchmarks").rglob("*.py"))]
        for name in looked_at(path).outer
        if name.strip("_") in ("of", "told", "made", "odd")
    ]
    assert not vague
