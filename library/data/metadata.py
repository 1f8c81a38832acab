"""Image lists in files: the metadata of data sets (JSON, JSONL, CSV), and metadata_cache.json of cache_info."""

import csv
import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from library.config.json_types import JsonObject
from library.config.outside_files import LIST, load_json, parse_json, read_outside_text
from library.config.problems import ConfigError, Message, Problem, raise_if_any
from library.config.values import quoted
from library.data.captions import join_tags
from library.files import json_text, write_atomic

CACHE_NAME = "metadata_cache.json"
HUB = "file_name"  # column of the Hugging Face Hub: an image beside the file
PATHS = ("image_path", HUB, "image", "path")
CAPTION_KEYS = ("caption", "text", "prompt")
TABLE_SUFFIXES = (".csv", ".tsv")
AUTOMATIC = ("metadata.jsonl", "metadata.csv", "metadata.parquet")  # files that the Hub reads by default
CONTROL = re.compile(r"control_path_[0-9]{1,6}")  # keys of several reference images in musubi-tuner


class MetadataEntry(NamedTuple):
    """One image of a metadata file: path, caption, tags, and (width, height) and reference images if it has them."""

    path: str
    caption: str
    tags: str
    size: tuple[int, int] | None
    controls: tuple[str, ...] = ()


class Row(NamedTuple):
    """One image of the file: its position in the file, its path as written, and the rest."""

    where: Message
    key: str
    about: Any


def read_metadata_file(
    metadata_file: str | Path, image_dir: str | Path | None, separator: str = ","
) -> list[MetadataEntry]:
    """Read a metadata file: {key: {"caption", "tags", "image_size"}}, a list or lines of {"image_path", ...} or
    {"file_name", "text"} as on the Hugging Face Hub, or a table of these columns (CSV, TSV).

    Keys are absolute paths, or paths inside `image_dir`; a file_name may be beside the file. Lists of tags are joined
    by `separator`. Raises ConfigError for any other content.
    """
    source, entries, problems = Path(metadata_file), [], []
    if source.suffix.lower() == ".parquet":
        raise ConfigError(
            "{path} is a Parquet file, which is not read here: save it as metadata.jsonl, with a line like {example} "
            "for each image",
            path=source,
            example='{"file_name": "0001.png", "text": "a cat"}',
        )
    rows = _rows(read_outside_text(source, LIST), source, problems)
    folder = _folder_of(rows, source, image_dir)
    for row in rows:
        try:
            entries.append(_metadata_entry(row, folder, source, separator))
        except ConfigError as e:
            problems += e.problems
    raise_if_any(problems)
    return entries


def read_cache(folder: Path) -> JsonObject:
    """Read the file of cache_info in a folder: {path: {"caption", "resolution"}}; {} if there is none."""
    try:
        json = load_json(folder / CACHE_NAME, LIST)
    except ConfigError:
        return {}
    return json if isinstance(json, dict) else {}


class RememberedFacts:
    """Sizes and captions from a folder's metadata_cache.json, for files unchanged since it was written."""

    def __init__(self, folder: Path | None) -> None:
        """Read the cache of a folder; None gives an empty one."""
        cache = read_cache(folder) if folder else {}
        self._about: dict[str, JsonObject] = {path: about for path, about in cache.items() if isinstance(about, dict)}
        self._modified = (folder / CACHE_NAME).stat().st_mtime_ns if folder and self._about else 0

    def size(self, path: str, changed: int) -> tuple[int, int] | None:
        # Width and height of an image that was last changed at this time in ns.
        return _valid_size(self._about.get(path, {}).get("resolution")) if changed <= self._modified else None

    def caption(self, path: str, file: str, all_lines: bool) -> str | None:
        """Return the caption of an image from this file, if it is cached and the file has not changed.

        `all_lines`: all lines of the file, as for wildcards, instead of the first.
        """
        about = self._about.get(path, {})
        words = about.get("caption")
        if not file or not isinstance(words, str) or about.get("caption_file") != os.path.basename(file):
            return None
        if self.unread(path) if all_lines else "\n" in words:  # cached with the other setting
            return None
        status = os.stat(file)
        return words if max(status.st_mtime_ns, status.st_ctime_ns) <= self._modified else None

    def unread(self, path: str) -> int:
        lines = self._about.get(path, {}).get("unread_lines", 0)
        return lines if isinstance(lines, int) else 0


class Remembered(NamedTuple):
    """An image's entry in metadata_cache.json: stored size, caption, the name of its file and its unused lines."""

    size: tuple[int, int]
    caption: str
    file: str
    unread: int


def write_cache(folder: Path, entries: Mapping[str, Remembered]) -> None:
    """Write the facts of a folder's images by path; an equal file is kept."""
    content: dict[str, JsonObject] = {}
    for path, entry in entries.items():
        content[path] = {"caption": entry.caption, "resolution": list(entry.size)}
        content[path] |= {"caption_file": entry.file} if entry.file else {}
        content[path] |= {"unread_lines": entry.unread} if entry.unread else {}
    if content != read_cache(folder):
        write_atomic(folder / CACHE_NAME, json_text(content, indent=2))


def _rows(text: str, source: Path, problems: list[Problem]) -> list[Row]:
    """Yield all images of a file. Lines that name none are appended to `problems`."""
    suffix = source.suffix.lower()
    if suffix in TABLE_SUFFIXES:
        listed = _parse_table(text, source, problems)
    elif suffix == ".jsonl":
        listed = _parse_jsonl(text, source, problems)
    else:
        content = parse_json(text, source)
        if isinstance(content, dict):
            return [Row(Message(quoted(key)), key, about) for key, about in content.items()]
        if not isinstance(content, list):
            raise ConfigError(
                "metadata file {source} must hold one object, with the paths of images as its keys", source=source
            )
        listed = list(enumerate(content, 1))
    rows: list[Row] = []
    for number, about in listed:
        key = next((about[name] for name in PATHS if about.get(name)), None) if isinstance(about, dict) else None
        if isinstance(key, str):
            rows.append(Row(Message("line {number}", number=number), key, about))
        else:
            problems.append(
                Problem(
                    "",
                    "metadata file {source}, line {number}: it must have image_path, or file_name and text",
                    source=source,
                    number=number,
                )
            )
    names = sorted({str(name) for row in rows for name in row.about})
    if not {*PATHS}.issuperset(names) and {*CAPTION_KEYS, "tags"}.isdisjoint(names):
        problems.append(
            Problem(
                "",
                "metadata file {source} has no captions: of {names} none is caption, text, prompt or tags",
                source=source,
                names=", ".join(names),
            )
        )
    return rows


def _parse_jsonl(text: str, source: Path, problems: list[Problem]) -> list[tuple[int, Any]]:
    """Yield the objects of a JSONL file with their line numbers. Invalid JSON is appended to `problems`."""
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                lines.append((number, parse_json(line, Message("{path}, line {number},", path=source, number=number))))
            except ConfigError as e:
                problems += e.problems
    return lines


def _parse_table(text: str, source: Path, problems: list[Problem]) -> list[tuple[int, JsonObject]]:
    """Yield the rows of a table with their line numbers."""
    header = text.partition("\n")[0]
    comma = ";" if ";" in header and "," not in header else ","
    comma = "\t" if source.suffix.lower() == ".tsv" else comma
    reader = csv.DictReader(io.StringIO(text), delimiter=comma, strict=True, skipinitialspace=True)
    rows: list[tuple[int, JsonObject]] = []
    try:
        columns = reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
        if {*PATHS}.isdisjoint(columns):
            raise ConfigError(
                "metadata file {source}: its first line must name the columns, such as file_name,text", source=source
            )
        if twice := sorted({name for name in columns if name and columns.count(name) > 1}):
            raise ConfigError(
                "metadata file {source}: its first line names {columns} twice; rename one of them",
                source=source,
                columns=", ".join(twice),
            )
        for row in reader:
            if None in row:
                problems.append(
                    Problem(
                        "",
                        "metadata file {source}, line {number}: more columns than in the first line; put captions with "
                        "commas in double quotes",
                        source=source,
                        number=reader.line_num,
                    )
                )
            else:
                rows.append((reader.line_num, {name: value for name, value in row.items() if value}))
    except csv.Error as e:
        raise ConfigError("metadata file {source} is not valid CSV: {why}", source=source, why=e) from None
    return rows


def _folder_of(rows: Sequence[Row], source: Path, image_dir: str | Path | None) -> str | Path | None:
    """Return the folder of relative paths: the file's own if it has a file_name there, as on the Hub, else
    `image_dir`.
    """
    first = next((row.key for row in rows if isinstance(row.about, dict) and row.about.get(HUB) == row.key), None)
    if first is not None and (not image_dir or os.path.lexists(source.parent / first)):
        return source.parent
    return image_dir


def _metadata_entry(row: Row, folder: str | Path | None, source: Path, separator: str) -> MetadataEntry:
    about = row.about
    if not isinstance(about, Mapping):
        raise ConfigError(
            "metadata file {source}: {key} must be an object with caption or tags, got {value}",
            source=source,
            key=quoted(row.key),
            value=quoted(about),
        )
    numbered = sorted((name for name in about if CONTROL.fullmatch(name)), key=lambda name: int(name.split("_")[2]))
    second = [str(about[name]) for name in ("control_path", *numbered) if about.get(name)]
    paths = [row.key, *second]
    for path in paths:
        if not os.path.isabs(path) and not folder:
            raise ConfigError(
                "metadata file {source}: {key} is a relative path, so image_dir must be given",
                source=source,
                key=quoted(path),
            )
    path, *controls = (os.fspath(Path(folder or "", path)) for path in paths)  # spelled as in listings of folders
    words = next((about[name] for name in CAPTION_KEYS if about.get(name)), "")
    if not isinstance(words, str | int | float):
        raise ConfigError(
            "metadata file {source}, {where}: its caption must be text, got {value}",
            source=source,
            where=row.where,
            value=quoted(words),
        )
    tags = about.get("tags") or ""
    if not all(isinstance(tag, str | int | float) for tag in (tags if isinstance(tags, list) else [tags])):
        raise ConfigError(
            "metadata file {source}, {where}: its tags must be text or a list of texts, got {value}",
            source=source,
            where=row.where,
            value=quoted(tags),
        )
    listed = join_tags([str(tag) for tag in tags], separator) if isinstance(tags, list) else str(tags)
    return MetadataEntry(path, str(words), listed, _valid_size(about.get("image_size")), tuple(controls))


def _valid_size(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    return (value[0], value[1]) if all(isinstance(side, int) and side > 0 for side in value) else None
