"""The small trained models that come with the program: which files, whether they are whole, and copies of them."""

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from library import families
from library.config.problems import ConfigError
from library.families.facts import SmallModel
from library.files import write_atomic

SMALL_MODELS_FOLDER = Path(__file__).with_name("small_models")
KNOWN_PICTURES = "known"  # the folder of regularization pictures: what the models were trained on
CHECKSUMS = "checksums.json"  # SHA-256 by path below the folder


def small_model_of(family: str) -> SmallModel | None:
    """Return the facts of a family's small trained model; None without one, and for a relative of a family."""
    if family not in families.FAMILIES:
        return None
    return getattr(families.random_module(family), "SMALL_MODEL", None)


# Why: docs/decisions/2026-11-27-small-trained-models.md
def copy_small_model(family: str, folder: Path) -> None:
    """Copy a family's small model with its tokenizers into a folder. Raises ConfigError for files that are missing or
    damaged."""
    for name, source in _whole(family).items():
        target = folder / Path(name).relative_to(family)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def copy_known_pictures(parent: Path) -> None:
    """Copy the regularization pictures and their captions into a `N_name` folder below `parent`. Raises ConfigError for
    files that are missing or damaged."""
    folder = parent / "1_emoji"
    folder.mkdir(parents=True)
    for source in whole_files(KNOWN_PICTURES):
        shutil.copyfile(source, folder / source.name)


def whole_files(family: str) -> list[Path]:
    """Return the files of a family's small model, or the known pictures. Raises ConfigError that names missing and
    damaged ones."""
    return [*_whole(family).values()]


def _whole(family: str) -> dict[str, Path]:
    """Return the files of `whole_files` by their listed names. Of files with the same content, such as tokenizers, the
    program has the first."""
    listed, first = checksums(), dict[str, str]()
    for name, digest in listed.items():
        first.setdefault(digest, name)
    sources = {name: first[digest] for name, digest in listed.items() if name.split("/")[0] == family}
    wrong = [source for name, source in sources.items() if _digest(SMALL_MODELS_FOLDER / source) != listed[name]]
    if wrong or not sources:
        raise ConfigError(
            "the demo's small model is not whole: {files} in {folder} is missing or damaged; download the program "
            "again, or restore the folder with git checkout",
            files=", ".join(wrong) or f"{family}/",
            folder=SMALL_MODELS_FOLDER,
        )
    return {name: SMALL_MODELS_FOLDER / source for name, source in sources.items()}


def checksums() -> dict[str, str]:
    """Return the published SHA-256 of each file; none if the list is missing or damaged."""
    try:
        listed = json.loads((SMALL_MODELS_FOLDER / CHECKSUMS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return listed if isinstance(listed, dict) else {}


def write_checksums(names: Iterable[str]) -> Path:
    """Write the list, after the files of these families were replaced; other entries stay."""
    entries = {name: digest for name, digest in checksums().items() if name.split("/")[0] not in names}
    files = (path for name in names for path in sorted((SMALL_MODELS_FOLDER / name).rglob("*")) if path.is_file())
    entries |= {path.relative_to(SMALL_MODELS_FOLDER).as_posix(): _digest(path) for path in files}
    return write_atomic(SMALL_MODELS_FOLDER / CHECKSUMS, json.dumps(entries, indent=1, sort_keys=True) + "\n")


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
