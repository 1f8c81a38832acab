"""The files of a demo: created once, kept if complete, and never overwriting anything else."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from library.demo import configs, images
from library.families import owner, random_module
from library.files import write_atomic

RECORD = "demo.json"


@dataclass(frozen=True)
class Demo:
    """The paths of one demo."""

    folder: Path
    images: Path
    models: Mapping[str, Mapping[str, Path]]  # family, or a relative of one -> which file -> path
    configs: Mapping[str, Path]  # script, of a relative <relative>_<script> -> its TOML


def prepare_demo(folder: Path, families: Iterable[str], compiled: bool = False) -> Demo:
    """Create missing files of a demo in `folder`, or in `folder-2` and so on if that contains something else.

    `families` may include variants, which have their own models and TOML files; new ones are set to `compiled`.
    """
    folder = _free_demo_folder(folder)
    if not (folder / RECORD).exists():
        write_atomic(folder / RECORD, json.dumps({"demo": fingerprint_demo()}) + "\n")
    pictures = folder / "images"
    _once(pictures, images.draw_images)
    _once(folder / "references", lambda place: images.write_references(pictures, place))
    for family in families:
        _once(folder / "models" / family, lambda place, family=family: _write_demo_model(family, place))
    models = {known.parent.name: _demo_file_paths(known) for known in sorted((folder / "models").glob("*/files.json"))}
    written = configs.write_demo_configs(folder, models, pictures, folder / "output", compiled)
    return Demo(folder, pictures, models, written)


def fingerprint_demo() -> str:
    """Return what the files of a demo depend on; a change makes an older demo's files obsolete."""
    here = Path(__file__).resolve().parent
    sources = [
        here / "images.py",
        here / "configs.py",
        *here.parent.glob("families/**/random*.py"),
    ]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()[:16]


def _free_demo_folder(folder: Path) -> Path:
    """The first of folder, folder-2, ... that is new, empty, or a demo made by this version."""
    number, candidate = 1, folder
    while not _fits(candidate):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    if candidate != folder:
        print(f"{folder} holds other files, or the demo of another version; using {candidate}")
    return candidate


def _fits(folder: Path) -> bool:
    if not folder.exists():
        return True
    if not folder.is_dir():
        return False
    if (folder / RECORD).exists():
        try:
            return json.loads((folder / RECORD).read_text(encoding="utf-8")).get("demo") == fingerprint_demo()
        except (ValueError, AttributeError):
            return False
    return not any(folder.iterdir())


def _once(folder: Path, fill: Callable[[Path], object]) -> None:
    """Fill a folder under another name and rename it."""
    # An existing folder is then always complete.
    if folder.exists():
        return
    print(f"making {folder}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by an interrupted demo
    unfinished.mkdir()
    fill(unfinished)
    os.replace(unfinished, folder)


def _write_demo_model(family: str, place: Path) -> None:
    """Create a tiny checkpoint of a family or variant, and a list of its files."""
    module = random_module(owner(family))
    made = module.write(place, sizes=module.VARIANTS[family]) if family != owner(family) else module.write(place)
    files = made if isinstance(made, Mapping) else {family: made}
    relative = {name: Path(path).relative_to(place).as_posix() for name, path in files.items()}
    write_atomic(place / "files.json", json.dumps(relative, indent=1) + "\n")


def _demo_file_paths(known: Path) -> dict[str, Path]:
    return {name: known.parent / path for name, path in json.loads(known.read_text(encoding="utf-8")).items()}
