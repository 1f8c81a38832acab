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
    """The models in these folders that a training can use, in the order of their paths, down to `deepest` levels.

    Only headers are read. Damaged files, single shards, and files beyond the limits above are skipped.
    """
    found = {}
    for path in _candidates(folders, deepest):
        try:
            state = path.stat()
            model = _looked(path, state.st_mtime_ns, state.st_size)
        except (ConfigError, OSError):
            continue
        if model:
            found.setdefault(path.resolve(), model)
    return sorted(found.values(), key=lambda model: str(model.path).lower())


def _candidates(folders: Iterable[Path], deepest: int) -> Iterator[Path]:
    """Checkpoints and folders of diffusers; links to folders are not followed, hidden folders are skipped."""
    end, left = time.monotonic() + SEARCH_TIMEOUT, MAX_CHECKED_FILES
    for top in dict.fromkeys(folders):
        for folder, inside, files in os.walk(top):
            here = Path(folder)
            deep = len(here.relative_to(top).parts)
            inside[:] = sorted(name for name in inside if not name.startswith(".")) if deep < deepest else []
            if not set(recognition.INDEXES).isdisjoint(files):
                inside[:] = []
                yield here
                continue
            for name in sorted(files):
                if name.endswith(".safetensors") and name[0] != "." and not SHARD.search(Path(name).stem):
                    left -= 1
                    yield here / name
            if left < 0 or time.monotonic() > end:
                return


@lru_cache(maxsize=4096)
def _looked(path: Path, changed: int, size: int) -> FoundModel | None:
    """The model in a file, if a training can use it. `changed` (modification time) is part of the key of the cache."""
    about = recognition.recognise_file(path)
    uses = {about.family: (MODEL_OPTION,)} if about.family else {}
    if path.is_file() and not about.family:
        shapes = weights.header(path)
        every = {
            facts.name: tuple(o for o, fits in facts.part_options.items() if fits(shapes))
            for facts in families.all_families()
        }
        uses = {family: options for family, options in every.items() if options}
    total = size if path.is_file() else sum(one.stat().st_size for one in path.rglob("*.safetensors"))
    return FoundModel(path, total, about.words, uses, recognition.proposed_options(path, about)) if uses else None


def usual_folders(roots: Iterable[Path]) -> list[Path]:
    """Usual locations of models: folders called models at or one level below each root, and the cache of the hub."""
    found = []
    for root in roots:
        if root.name in ("hub", "models"):
            found.append(root)
        try:
            inside = sorted(entry.path for entry in os.scandir(root) if entry.is_dir() and entry.name[0] != ".")
        except OSError:
            continue
        found += [Path(one) for one in inside if os.path.basename(one) == "models"]
        found += [path for one in inside if (path := Path(one, "models")).is_dir()]
    return list(dict.fromkeys(found))
