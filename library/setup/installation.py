"""Check whether this installation is complete, by the installer before any package exists, and by `kohya doctor`.

Uses only the standard library.
"""

import csv
import hashlib
import importlib.machinery
import importlib.metadata
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from library.config.problems import Message

PROJECT_ROOT = Path(__file__).resolve().parents[2]
PROJECT_NAME = "kohya-trainer"
# PowerShell starts nothing of the current folder without the ".".
SETUP = r".\setup.bat" if os.name == "nt" else "./setup.sh"
# Files of locks/: exact versions with the hashes of their files. "dev" has what is added to "user".
LOCKS = ("build", "user", "dev", "triton-windows")
LOCKED = ("constraints.txt", "pyproject.toml", *(f"locks/{name}.txt" for name in LOCKS))


# A missing or different marker means that an installation is unfinished or outdated.
# Why: docs/decisions/2026-11-20-installation-marker-written-last.md
def fingerprint_installation() -> str:
    """Return what an installation was made from. A change means that packages must be checked again."""
    digest = hashlib.sha256(sys.version.encode())
    for name in LOCKED:
        digest.update((PROJECT_ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


def lock_file(name: str) -> Path:
    return PROJECT_ROOT / "locks" / f"{name}.txt"


def foreign() -> Iterator[Message]:
    """Yield other top-level packages called `library`, a sentence with the remedy for each."""
    for name in sorted(set(importlib.metadata.packages_distributions().get("library", [])) - {PROJECT_NAME}):
        yield Message(
            "the package {name} also brings one called library; remove it with: pip uninstall {name}", name=name
        )
    elsewhere = [place for place in sys.path if Path(place or ".").resolve() != PROJECT_ROOT]
    spec = importlib.machinery.PathFinder.find_spec("library", elsewhere)
    for place in map(Path, (spec.submodule_search_locations if spec and spec.origin else None) or []):
        if place.resolve() != PROJECT_ROOT / "library":
            template = "another package called library is found at {folder}; remove it, or take it out of PYTHONPATH"
            yield Message(template, folder=place)


def damaged() -> Iterator[str]:
    """Return installed packages with missing files, as `name==version`, as left by an interrupted installation."""
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"]
        files = _recorded_files(package)
        # .pyc files come and go; scripts may be outside and removed by the user.
        needed_files = [file for file in files or () if file.suffix != ".pyc" and ".." not in file.parts]
        is_whole = files is not None and all(Path(str(package.locate_file(file))).exists() for file in needed_files)
        if name and name != PROJECT_NAME and not is_whole:
            yield f"{name}=={package.version}"


def _recorded_files(package: importlib.metadata.Distribution) -> Sequence[PurePosixPath] | None:
    """Return the files that a package was installed with; None without a list, which installers write last."""
    record = package.read_text("RECORD")
    if record is None:
        return package.files  # which leaves out missing files in newer versions of Python
    return [PurePosixPath(row[0]) for row in csv.reader(record.splitlines()) if row]


def headers() -> Iterator[str]:
    """Report missing Python headers, which compiling needs."""
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        yield f"the headers of Python {version} are missing"
