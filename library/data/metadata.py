"""Image lists in files: the metadata of fine-tuning data sets (JSON, JSONL), and metadata_cache.json of cache_info."""

import csv
import io
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from library.config.json_types import JsonObject
from library.config.outside_files import LIST, load_json, parse_json, read_text
from library.config.problems import ConfigError
from library.config.values import quoted
from library.files import json_text, write_atomic

CACHE_NAME = "metadata_cache.json"
CONTROL = re.compile(r"control_path_[0-9]{1,6}")  # keys of several reference images in musubi-tuner


class MetadataEntry(NamedTuple):
    """One image of a metadata file: path, caption, tags, and (width, height) and reference images if it has them."""

    path: str
    caption: str
    tags: str
    size: tuple[int, int] | None
    controls: tuple[str, ...] = ()


def read(metadata_file: str | Path, image_dir: str | Path | None) -> list[MetadataEntry]:
    """Read a metadata file: {key: {"caption", "tags", "image_size"}}, lines of {"image_path", ...}, or the .jsonl and
    .csv files of data sets of the Hugging Face Hub, with file_name and text.

    Keys are absolute paths, or paths inside `image_dir`; file names of the Hub are beside their file where that is not
    given. Raises ConfigError for any other content.
    """
    text, found, problems = read_text(metadata_file, LIST), [], []
    ending = Path(metadata_file).suffix.lower()
    if ending in (".jsonl", ".csv"):
        listed = _objects(text, metadata_file) if ending == ".jsonl" else _table(text, metadata_file)
        rows = [_row(number, about, image_dir, metadata_file) for number, about in listed]
    else:
        rows = _entries(parse_json(text, metadata_file), metadata_file)
    for key, about in rows:
        try:
            found.append(_entry(key, about, image_dir, metadata_file))
        except ConfigError as e:
            problems += e.problems
    if problems:
        raise ConfigError(*problems)
    return found


def read_cache(folder: Path) -> JsonObject:
    """Read the file of cache_info in a folder: {path: {"caption", "resolution"}}; {} when there is none."""
    try:
        found = load_json(folder / CACHE_NAME, LIST)
    except ConfigError:
        return {}
    return found if isinstance(found, dict) else {}


class RememberedFacts:
    """Sizes and captions from a folder's metadata_cache.json, of files that have not changed since it was written."""

    def __init__(self, folder: Path | None) -> None:
        """Read the cache of a folder; without a folder it is empty."""
        found = read_cache(folder) if folder else {}
        self._about: dict[str, JsonObject] = {path: about for path, about in found.items() if isinstance(about, dict)}
        self._modified = (folder / CACHE_NAME).stat().st_mtime_ns if folder and self._about else 0

    def size(self, path: str, changed: int) -> tuple[int, int] | None:
        """Width and height of an image whose last change was at this time (in ns), if they are cached."""
        return _size(self._about.get(path, {}).get("resolution")) if changed <= self._modified else None

    def caption(self, path: str, file: str) -> str | None:
        """The caption of an image from this file, if it is cached and the file has not changed."""
        if path not in self._about or (file and os.stat(file).st_mtime_ns > self._modified):
            return None
        words = self._about[path].get("caption")
        return words if file and isinstance(words, str) else None

    def unread(self, path: str) -> int:
        """The number of unused lines of the caption file."""
        lines = self._about.get(path, {}).get("unread_lines", 0)
        return lines if isinstance(lines, int) else 0


def write_cache(folder: Path, known: Mapping[str, tuple[str, tuple[int, int], int]]) -> None:
    """Write captions, sizes and numbers of unused lines of a folder's images by path; an equal file is kept."""
    content: dict[str, JsonObject] = {}
    for path, (caption, size, unread) in known.items():
        content[path] = {"caption": caption, "resolution": list(size)} | ({"unread_lines": unread} if unread else {})
    if content != read_cache(folder):
        write_atomic(folder / CACHE_NAME, json_text(content, indent=2))


def _objects(text: str, source: str | Path) -> Iterator[tuple[int, Any]]:
    """The objects of a .jsonl file, with their lines."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield number, parse_json(line, source)


def _table(text: str, source: str | Path) -> Iterator[tuple[int, Any]]:
    """The rows of a .csv file, with their lines."""
    reader = csv.DictReader(io.StringIO(text), strict=True)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as e:
        raise ConfigError("metadata file {source} is not valid CSV: {why}", source=source, why=e) from None


def _row(number: int, about: Any, image_dir: str | Path | None, source: str | Path) -> tuple[str, Any]:
    """The path and the facts of an image in a line of a file."""
    place = about.get("image_path") if isinstance(about, dict) else None
    if isinstance(place, str):
        return place, about
    name = about.get("file_name") if isinstance(about, dict) else None
    if not isinstance(name, str) or not name:
        template = "metadata file {source}, line {number}: it must have image_path, or file_name and text"
        raise ConfigError(template, source=source, number=number)
    beside = name if image_dir else os.path.join(os.path.dirname(os.path.abspath(source)), name)
    return beside, {"caption": about.get("text"), **about}


def _entries(content: Any, source: str | Path) -> list[tuple[str, Any]]:
    if not isinstance(content, dict):
        raise ConfigError(
            "metadata file {source} must hold one object, with the paths of images as its keys", source=source
        )
    return list(content.items())


def _entry(key: str, about: Any, image_dir: str | Path | None, source: str | Path) -> MetadataEntry:
    if not isinstance(about, Mapping):
        raise ConfigError("metadata file {source}: {key} must be an object with caption or tags, got {value}",
            source=source, key=quoted(key), value=quoted(about))  # fmt: skip
    numbered = sorted((name for name in about if CONTROL.fullmatch(name)), key=lambda name: int(name.split("_")[2]))
    second = [str(about[name]) for name in ("control_path", *numbered) if about.get(name)]
    paths = [key, *second]
    for path in paths:
        if not os.path.isabs(path) and not image_dir:
            raise ConfigError(
                "metadata file {source}: {key} is a relative path, so image_dir must be given",
                source=source, key=quoted(path))  # fmt: skip
    path, *controls = (os.path.join(image_dir or "", path) for path in paths)
    words, tags = str(about.get("caption") or ""), _tags(about.get("tags"))
    return MetadataEntry(path, words, tags, _size(about.get("image_size")), tuple(controls))


def _tags(tags: Any) -> str:
    return ", ".join(map(str, tags)) if isinstance(tags, list) else str(tags or "")


def _size(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    return (value[0], value[1]) if all(isinstance(side, int) and side > 0 for side in value) else None
