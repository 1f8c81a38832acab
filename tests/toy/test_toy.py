"""A third family, made by the steps of CONTRIBUTING alone: a folder, its registry line, and two short scripts.

They are put into a copy of the tree, in which the contract of families and every room are then tried.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

from library import families
from tests.source import ROOT

HERE = ROOT / "tests" / "toy"
REGISTRY = "".join(f'    "{name}",\n' for name in families.FAMILIES)
OTHERS = " and ".join(f"not {name}" for name in (*families.FAMILIES, *(f"[{script}]" for script in families.RUNS)))
# That seeds and the optimizer do what they should is the trainer's affair, and shown with the families that are there.
TRAINERS = "not the_loss_falls and not the_same_seed"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The project with the toy in it."""
    tree = tmp_path_factory.mktemp("toy") / "tree"
    for folder in ("library", "kohya_gui", "sd-scripts", "presets", "docs/measured", "tests"):
        shutil.copytree(ROOT / folder, tree / folder)  # with the bytecode of what was imported here already
    shutil.copy(ROOT / "pyproject.toml", tree)
    shutil.copytree(HERE / "family", tree / "library/families/toy", ignore=shutil.ignore_patterns("__pycache__"))
    for script in (HERE / "scripts").glob("*.py"):
        shutil.copy(script, tree / "sd-scripts")
    registry = tree / "library/families/__init__.py"
    text = registry.read_text(encoding="utf-8")
    assert text.count(REGISTRY) == 1
    registry.write_text(text.replace(REGISTRY, f'{REGISTRY}    "toy",\n'), encoding="utf-8")
    return tree


def test_a_third_family_works_everywhere(tree, tmp_path):
    settings = {**os.environ, "PYTHONPATH": str(tree), "KOHYA_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    command += ["tests/toy/rooms.py", "-k", f"{OTHERS} and {TRAINERS}"]
    done = subprocess.run(command, cwd=tree, env=settings, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= 13, done.stdout
