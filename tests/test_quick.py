"""`./setup.sh test --quick` chooses tests of every room, and the tables of what is left out name what is there."""

import re
from collections import Counter

import pytest

from tests import exhaustive, quick, source

TESTS = source.ROOT / "tests"
# Every test in them trains or is a process.
WITHOUT = {"contract", "toy"}
EMPTY_FILES = 10  # at most so many files have exhaustive tests alone


def folder_of(item):
    return item.path.parent.relative_to(TESTS).as_posix()


def is_quick(item):
    return not any(map(item.get_closest_marker, ("slow", "browser", "gpu")))


def test_every_room_has_quick_tests(request):
    folders = {path.parent.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    if folders - WITHOUT - {folder_of(item) for item in request.session.items}:
        pytest.skip("only a part of the tests was collected")
    chosen = Counter(folder_of(item) for item in request.session.items if is_quick(item))
    assert chosen.keys() == folders - WITHOUT


def test_the_tables_name_files_that_are_there():
    tables = (*quick.SLOW_FILES.items(), *quick.QUICK_FILES.items())
    named = {f"{folder}/{stem}.py".lstrip("/") for folder, stems in tables for stem in stems}
    assert [name for name in sorted(named) if not (TESTS / name).is_file()] == []


def test_the_table_of_exhaustive_tests_names_each_one_and_every_run_has_those_of_its_patterns(request):
    names = set(exhaustive.TESTED_ALWAYS)
    defined = Counter(
        name
        for path in TESTS.rglob("test_*.py")
        for function in re.findall(r"^def (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        for name in names & {function, f"{path.stem}::{function}"}
    )
    assert [name for name in names if defined[name] != 1] == []
    kept = [item for item in request.session.items if not item.get_closest_marker("exhaustive")]
    chosen = {name for item in kept for name in (item.originalname, f"{item.path.stem}::{item.originalname}")}
    if len({item.path for item in request.session.items}) < len(list(TESTS.rglob("test_*.py"))) - EMPTY_FILES:
        pytest.skip("only a part of the tests was collected")
    assert [name for name, patterns in exhaustive.TESTED_ALWAYS.items() if patterns and name not in chosen] == []
