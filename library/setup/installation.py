"""Is this installation whole? Asked by the installer before any package is there, and by `kohya doctor`.

Only the standard library, and what needs no more.
"""

import hashlib
import importlib.machinery
import importlib.metadata
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from library.config.problems import Message

ROOT = Path(__file__).resolve().parents[2]
OURS = "kohya-trainer"
LOCKS = ("build", "user", "dev", "triton-windows")  # files of locks/: exact versions with the hashes of their files
LOCKED = ("constraints.txt", "pyproject.toml", *(f"locks/{name}.txt" for name in LOCKS))


# Why: docs/decisions/2026-11-20-installation-marker-written-last.md
def fingerprint() -> str:
    """What an installation was made from. When this changes, the packages have to be looked at again."""
    found = hashlib.sha256(sys.version.encode())
    for name in LOCKED:
        found.update((ROOT / name).read_bytes())
    return found.hexdigest()[:16]


def lock_file(name: str) -> Path:
    """A file of locks/."""
    return ROOT / "locks" / f"{name}.txt"


def foreign() -> Iterator[Message]:
    """Whoever else brings a top-level package called `library`, a sentence with the remedy each."""
    for name in sorted(set(importlib.metadata.packages_distributions().get("library", [])) - {OURS}):
        yield Message(
            "the package {name} also brings one called library; remove it with: pip uninstall {name}", name=name
        )
    elsewhere = [place for place in sys.path if Path(place or ".").resolve() != ROOT]
    found = importlib.machinery.PathFinder.find_spec("library", elsewhere)
    for place in map(Path, (found.submodule_search_locations if found and found.origin else None) or []):
        if place.resolve() != ROOT / "library":
            template = "another package called library is found at {folder}; remove it, or take it out of PYTHONPATH"
            yield Message(template, folder=place)


def damaged() -> Iterator[str]:
    """Installed packages with files missing, as `name==version`: what an interrupted installation leaves."""
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"]
        files = package.files
        # Compiled .pyc files come and go; scripts may lie outside and be cleaned by the user.
        wanted = [f for f in files or () if f.suffix != ".pyc" and ".." not in f.parts]
        if name and name != OURS and (files is None or not all(Path(str(f.locate())).exists() for f in wanted)):
            yield f"{name}=={package.version}"


def headers() -> Iterator[str]:
    """What compiling needs of Python itself, when it is missing."""
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        yield f"the headers of Python {version} are missing"
