"""Models that are folders, such as captioners and segmentation models: local, or downloaded by a Hugging Face id."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from library.config.outside_files import MAX_SETTINGS_BYTES, read_regular
from library.config.pasted import pasted_path
from library.config.problems import ConfigError, Message, Report, either
from library.downloads import hub
from library.files import need_space, write_atomic

COMPLETE = "downloaded.json"  # marks a complete folder; holds the files and the commit
TEXT_LIMIT = 100_000_000  # bytes; three times the largest tokenizers


@dataclass(frozen=True)
class FolderFiles:
    """The files of a repository to download: by extension, with the weights that match one of the patterns.

    The first pattern with a match applies. No file is code.
    """

    endings: tuple[str, ...]
    weights: tuple[str, ...]

    def chosen(self, files: Sequence[hub.RemoteFile]) -> list[hub.RemoteFile]:
        """Select the files to download; none when the repository has no matching weights."""
        top = [file for file in files if "/" not in file.path]
        for pattern in self.weights:
            if weights := [file for file in top if re.fullmatch(pattern, file.name)]:
                # Weights under other names are left out: the same ones in another precision, or of another framework.
                ending = weights[0].name[weights[0].name.rindex(".") :]
                other_files = [f for f in top if not f.name.endswith(ending) and f.size <= TEXT_LIMIT]
                return [*other_files, *weights]
        return []


TRANSFORMERS = FolderFiles(
    (".safetensors", ".json", ".txt", ".model", ".jinja"), (r"model-\d+-of-\d+\.safetensors", r"model\.safetensors")
)
TAGGER = FolderFiles((".onnx", ".csv"), (r"model\.onnx",))


def is_repository(text: str) -> bool:
    return hub.is_repository(text) and not pasted_path(text).exists()


def find_model_folder(text: str, kind: FolderFiles, into: Path, report: Report) -> Path:
    """Return the folder of a model: a local path, or one below `into`, downloaded once by its id.

    Raises ConfigError when the hub does not have it, it needs code or other weights, or the disk is full.
    """
    if not is_repository(text):
        return pasted_path(text)
    folder = into / text.rpartition("/")[2]
    if _is_complete(folder, text):
        return folder
    report(Message("asking the hub"), 0, 1)
    repository = hub.repository(text, kind.endings)
    if repository.closed:
        raise ConfigError(hub.licence(text))
    files = kind.chosen(list(repository.files.values()))
    if not files:
        names = either([re.sub(r"\\(.)", r"\1", pattern).replace("d+", "N") for pattern in kind.weights])
        raise ConfigError(
            "{name} has no {names}: other weights may hold code and are not downloaded", name=text, names=names
        )
    targets = [hub.target_path(into, file, kind.endings) for file in files]
    need_space(into, sum(hub.still_needed(path, file) for path, file in zip(targets, files, strict=True)))
    for path, file in zip(targets, files, strict=True):
        hub.download_file(file, path, report)
    marker = {"repository": text, "commit": files[0].commit, "files": {file.name: file.size for file in files}}
    write_atomic(folder / COMPLETE, json.dumps(marker, indent=1))
    return folder


def _is_complete(folder: Path, name: str) -> bool:
    try:
        marker = json.loads(read_regular(folder / COMPLETE, MAX_SETTINGS_BYTES))
        sizes = marker["files"].items() if marker["repository"] == name else ()
        return bool(sizes) and all((folder / file).stat().st_size == size for file, size in sizes)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False
