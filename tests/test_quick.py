"""`./setup.sh test --quick` chooses tests of every room, and its tables name files that are there."""

from collections import Counter

import pytest

from tests import quick, source

TESTS = source.ROOT / "tests"
# Every test in them trains or is a process.
WITHOUT = {"contract", "toy"}


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
