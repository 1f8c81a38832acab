"""The page's file picker: lists names in the folders that the page may use, without reading files."""

import os
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from kohya_gui.i18n.sentences import data
from kohya_gui.server import paths
from kohya_gui.server.hidden import MARKS_HIDDEN, is_hidden_name, is_marked_hidden
from kohya_gui.server.json_api import ApiRequest, Handler
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, Problem
from library.files import names_apart

LISTED_FOLDER_LABEL = "Folder"  # of the field in picker.js
MAX_ENTRIES = 2000  # maximum entries shown of a folder; typing finds the rest
DIGITS = re.compile(r"(\d+)")

# Training options whose file has a certain type; all others take any file.
SUFFIXES_BY_OPTION = {
    "dataset_config": ".toml .json",
    "in_json": ".json .jsonl .csv .tsv",
    "sample_prompts": ".txt .toml .json",
    "control_image_path": ".png .jpg .jpeg .webp .bmp",
    "controlnet_image": ".png .jpg .jpeg .webp .bmp",
    "weights": ".safetensors .pt .ckpt",
    "learned": ".safetensors .pt .ckpt",
    "control_image_mask_path": ".png .jpg .jpeg .webp .bmp",
    "log_tracker_config": ".toml",
    "thumbnail": ".png .jpg .jpeg .webp",
    "console_log_file": ".log .txt",
    "config": ".toml .json .yaml .yml",
}
MODEL_SUFFIX = ".safetensors"


def browse_button(name: str, label: str, kind: str, beside: str = "") -> str:
    """Return the button beside a path field: `kind` is "file", "files", "folder" or, for a file to be saved, "new";
    otherwise there is none.

    It fills the field in the same element; `beside` selects another one in the same row.
    """
    if kind not in ("file", "files", "folder", "new"):
        return ""
    endings = (
        "" if kind == "folder" else next((e for n, e in SUFFIXES_BY_OPTION.items() if name.endswith(n)), MODEL_SUFFIX)
    )
    other = f' data-beside="{escape(beside)}"' if beside else ""
    about = Message("Browse for {label}", label=label)
    return (
        f'<button type="button" class="pick" data-pick="{kind}" data-endings="{endings}" title="Browse"{other}'
        f' aria-label="{escape(str(about))}"{data(about)}></button>'
    )


# Why: docs/decisions/2026-11-22-one-picker-for-paths.md
class Picker:
    """Folders and files below the roots, and nothing else."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots

    @property
    def handlers(self) -> dict[str, Handler]:
        return {"list": self.list}

    def list(self, request: ApiRequest) -> JsonObject:
        """Return the folders and files in a folder; for a missing path, in its nearest existing parent."""
        endings = tuple(end.lower() for end in request.text("endings").split())
        where, part = self._nearest(request.text("folder")), request.text("filter").lower()
        names = names_apart(self.roots)
        places = [
            {"name": _root_title(root, name), "path": str(root)} for root, name in zip(self.roots, names, strict=True)
        ]
        try:
            entries = sorted(self._entries(where, endings, request.text("kind") == "folder"), key=_order)
        except OSError as error:
            raise ConfigError("{folder} cannot be listed: {why}", folder=where, why=error.strerror or error) from None
        entries = [entry for entry in entries if part in entry["name"].lower()]
        up = next((str(where.parent) for root in self.roots if where != root and where.is_relative_to(root)), "")
        return {
            "folder": str(where),
            "up": up,
            "places": places,
            "separator": os.sep,
            "entries": [_with_bytes(where, entry) for entry in entries[:MAX_ENTRIES]],
            "more": max(0, len(entries) - MAX_ENTRIES),
        }

    def _nearest(self, text: str) -> Path:
        """Return the folder to list: the first root for an empty path, else the path or its nearest existing parent."""
        if not text.strip():
            return next((root for root in self.roots if root.is_dir()), self.roots[0])
        path = paths.allowed_path(text, self.roots, LISTED_FOLDER_LABEL)
        while not path.is_dir():
            if path in self.roots or path == path.parent:
                raise ConfigError(Problem(LISTED_FOLDER_LABEL, ": {path} does not exist", path=path))
            path = path.parent
        return path

    def _is_listed(self, entry: os.DirEntry[str]) -> bool:
        """Return whether `paths` would allow it: no hidden or reserved name, and no link that leads out of the
        roots."""
        if is_hidden_name(entry.name) or not entry.name.isprintable():
            return False
        try:
            if MARKS_HIDDEN and is_marked_hidden(entry.stat(follow_symlinks=False)):
                return False
            # Checking each of twenty thousand files with the guard takes seconds; only links can lead out.
            if entry.is_symlink() or getattr(entry, "is_junction", bool)():
                paths.allowed_path(entry.path, self.roots)
        except (ConfigError, OSError):
            return False
        return True

    def _entries(self, where: Path, endings: tuple[str, ...], only_folders: bool) -> Iterator[JsonObject]:
        with os.scandir(where) as entries:
            for entry in entries:
                if not self._is_listed(entry):
                    continue
                if entry.is_dir():
                    yield {"name": entry.name, "folder": True}
                elif not only_folders and (not endings or entry.name.lower().endswith(endings)) and entry.is_file():
                    yield {"name": entry.name, "folder": False}


def _with_bytes(where: Path, entry: JsonObject) -> JsonObject:
    """Return an entry with its bytes, if it is a file."""
    try:
        return entry if entry["folder"] else entry | {"size": (where / entry["name"]).stat().st_size}
    except OSError:  # deleted since it was listed
        return entry | {"size": 0}


def _order(entry: JsonObject) -> tuple[bool, list[tuple[int, str]]]:
    parts = DIGITS.split(entry["name"].lower())
    return not entry["folder"], [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _root_title(root: Path, name: str) -> str:
    return "Home" if root == Path.home().resolve() else name
