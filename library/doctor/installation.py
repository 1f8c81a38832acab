"""Is this installation whole? Asked by setup.sh before anything of ours can be imported, and by `kohya doctor`.

Only the standard library, so that setup.sh can run this file by its path in a fresh environment:

    python -P library/doctor/installation.py fingerprint | foreign | damaged | headers
"""

import hashlib
import importlib.metadata
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = "kohya-trainer"
LOCKED = ("constraints.txt", "pyproject.toml")


# Why: docs/decisions/2026-11-20-installation-marker-written-last.md
def fingerprint() -> str:
    """What an installation was made from. When this changes, the packages have to be looked at again."""
    found = hashlib.sha256(sys.version.encode())
    for name in LOCKED:
        found.update((ROOT / name).read_bytes())
    return found.hexdigest()[:16]


def foreign() -> Iterator[str]:
    """Whoever else brings a top-level package called `library`, a sentence with the remedy each."""
    for name in sorted(set(importlib.metadata.packages_distributions().get("library", [])) - {OURS}):
        yield f"the package {name} also brings one called library; remove it with: pip uninstall {name}"
    places = getattr(importlib.util.find_spec("library"), "submodule_search_locations", None) or []
    for place in map(Path, places):
        if place.resolve() != ROOT / "library":
            yield f"another package called library is found at {place}; remove it, or take it out of PYTHONPATH"


def damaged() -> Iterator[str]:
    """Installed packages with files missing, as `name==version`: what an interrupted pip leaves behind."""
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


def main(what: str) -> int:
    """Print what was asked for, a line each."""
    if what == "fingerprint":
        print(fingerprint())
        return 0
    for line in {"foreign": foreign, "damaged": damaged, "headers": headers}[what]():
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
