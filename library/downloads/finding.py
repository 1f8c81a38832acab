"""Find models on this computer, recognised by their headers, not their names."""

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from library import families
from library.config.problems import ConfigError, MessageLike
from library.families import recognition
from library.families.shared import weights

MODEL_OPTION = "pretrained_model_name_or_path"
MAX_CHECKED_FILES = 3000  # maximum files to check
MAX_FOLDER_DEPTH = 7  # maximum folder depth
SEARCH_TIMEOUT = 4.0  # time limit in seconds for all folders
SHARD = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True)
class FoundModel:
    """A base model or a part of one."""

    path: Path
    size: int  # bytes
    words: MessageLike  # a description
    uses: Mapping[str, tuple[str, ...]]  # family -> options that accept it
    options: Mapping[str, str | bool]  # that training it requires


def find_models(folders: Iterable[Path], deepest: int = MAX_FOLDER_DEPTH) -> list[FoundModel]:
    """Return the models in these folders that a training can use, sorted by path, down to `deepest` levels.

    Only headers are read. Damaged files, single shards, and files beyond the limits above are skipped.
    """
    models = {}
    for path in _candidates(folders, deepest):
        try:
            status = path.stat()
            model = _recognise_model(path, status.st_mtime_ns, status.st_size)
        except (ConfigError, OSError):
            continue
        if model:
            models.setdefault(path.resolve(), model)
    return sorted(models.values(), key=lambda model: str(model.path).lower())


def _candidates(folders: Iterable[Path], max_depth: int) -> Iterator[Path]:
    """Checkpoints and folders of diffusers; links to folders are not followed, hidden folders are skipped."""
    deadline, remaining_files = time.monotonic() + SEARCH_TIMEOUT, MAX_CHECKED_FILES
    for top in dict.fromkeys(folders):
        for folder, subfolders, files in os.walk(top):
            folder_path = Path(folder)
            depth = len(folder_path.relative_to(top).parts)
            # Assigned in place, as os.walk descends into what is left in the list.
            subfolders[:] = sorted(name for name in subfolders if not name.startswith(".")) if depth < max_depth else []
            # A diffusers model; its parts are no models of their own.
            if not set(recognition.INDEXES).isdisjoint(files):
                subfolders[:] = []
                yield folder_path
                continue
            for name in sorted(files):
                if name.endswith(".safetensors") and name[0] != "." and not SHARD.search(Path(name).stem):
                    remaining_files -= 1
                    yield folder_path / name
            if remaining_files < 0 or time.monotonic() > deadline:
                return


@lru_cache(maxsize=4096)
def _recognise_model(path: Path, changed: int, size: int) -> FoundModel | None:
    """Return the model in a file, if a training can use it. `changed` and `size` are cache keys, so that a replaced
    file is read again."""
    recognised = recognition.recognise_file(path)
    uses = {recognised.family: (MODEL_OPTION,)} if recognised.family else {}
    if path.is_file() and not recognised.family:
        shapes = weights.header(path)
        options_by_family = {
            facts.name: tuple(o for o, fits in facts.part_options.items() if fits(shapes))
            for facts in families.all_families()
        }
        uses = {family: options for family, options in options_by_family.items() if options}
    total = size if path.is_file() else sum(file.stat().st_size for file in path.rglob("*.safetensors"))
    if not uses:
        return None
    return FoundModel(path, total, recognised.words, uses, recognition.proposed_options(path, recognised))


def usual_folders(roots: Iterable[Path]) -> list[Path]:
    """Return the usual locations of models: folders called `models` up to two levels below each root, and the hub's
    cache."""
    folders = []
    for root in roots:
        if root.name in ("hub", "models"):
            folders.append(root)
        try:
            subfolders = sorted(entry.path for entry in os.scandir(root) if entry.is_dir() and entry.name[0] != ".")
        except OSError:
            continue
        folders += [Path(subfolder) for subfolder in subfolders if os.path.basename(subfolder) == "models"]
        folders += [path for subfolder in subfolders if (path := Path(subfolder, "models")).is_dir()]
    return list(dict.fromkeys(folders))
