"""Packages that are loaded at the first use of what only they have."""

import subprocess
import sys

import pytest

from tests.source import ROOT


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "whole"
    folder.mkdir()
    (folder / "__init__.py").write_text("print('package')\nfrom .part import value\nother = 2\n")
    (folder / "part.py").write_text("print('part')\nvalue = []\n")
    return tmp_path


def printed(folder, code):
    """What Python prints that defers the package `outer.whole`."""
    (folder / "outer").mkdir()
    (folder / "outer/__init__.py").write_text("")
    (folder / "whole").rename(folder / "outer/whole")
    setup = f"import sys\nsys.path.insert(0, {str(folder)!r})\nfrom library.deferred import defer_package, is_loaded\n"
    done = subprocess.run(
        [sys.executable, "-c", setup + code], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60
    )
    assert not done.returncode, done.stderr
    return done.stdout.split()


def test_a_module_is_loaded_without_its_package(package):
    code = """
defer_package("outer.whole", parts={})
from outer.whole.part import value
assert not is_loaded("outer.whole")
import outer.whole
assert outer.whole.other == 2 and is_loaded("outer.whole")
import outer.whole.part
assert outer.whole.part.value is outer.whole.value is value
"""
    assert printed(package, code) == ["part", "package"]


def test_a_name_is_taken_from_the_module_that_has_it(package):
    code = """
defer_package("outer.whole", parts={"value": "part"})
from outer.whole import value
assert not is_loaded("outer.whole")
"""
    assert printed(package, code) == ["part"]


def test_a_package_comes_before_its_modules(package):
    code = """
defer_package("outer.whole", {"other": 1}, then=lambda: print("then"))
from outer.whole import other
assert other == 1 and not is_loaded("outer.whole")
import outer.whole.part as part
assert part.__spec__.origin.endswith("part.py") and sys.modules["outer.whole"].other == 2
"""
    assert printed(package, code) == ["package", "part", "then"]


def test_what_is_loaded_or_missing_is_left_alone(package):
    code = """
import outer.whole
before = outer.whole
defer_package("outer.whole", {"other": 1})
defer_package("outer.missing", {"other": 1})
assert outer.whole is before and "outer.missing" not in sys.modules
"""
    assert printed(package, code) == ["package", "part"]
