"""Read a dataset file (TOML or JSON) as tables of a form, and write them back; the rest of the file is preserved.

A table holds texts by option; inherited options are "". Comments, order, spaces, and keys that the form does not show
are preserved.
"""

import contextlib
import json
import re
import tomllib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT

from library.config.dataset import DATASET_KEYS, SUBSET_KEYS, DatasetConfig, SubsetConfig
from library.config.formats import toml_value
from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import load_json, load_toml, read_outside_text
from library.config.problems import ConfigError, Problem, raise_if_any
from library.config.reading import parse_resolution

# The options of a data set, and of each of its folders, in a form.
OF_DATASET = (
    "resolution",
    "batch_size",
    "enable_bucket",
    "bucket_no_upscale",
    "min_bucket_reso",
    "max_bucket_reso",
    "bucket_reso_steps",
    "validation_split",
)
OF_FOLDER = (
    "image_dir",
    "num_repeats",
    "is_reg",
    "class_tokens",
    "caption_extension",
    "caption_prefix",
    "caption_suffix",
    "shuffle_caption",
    "keep_tokens",
    "caption_dropout_rate",
    "caption_tag_dropout_rate",
    "flip_aug",
    "color_aug",
    "random_crop",
    "alpha_mask",
    "conditioning_data_dir",
    "control_directory",
    "metadata_file",
)
KNOWN = {name: DATASET_KEYS[name] for name in OF_DATASET} | {name: SUBSET_KEYS[name] for name in OF_FOLDER}
HEADER = re.compile(r"^[ \t]*\[{1,2}\s*(?P<name>[\w.\s-]+?)\s*\]{1,2}\s*(#.*)?$", re.M)
COMMENT = "# The data sets of a training: [[datasets]] with their folders, [[datasets.subsets]].\n"


@dataclass
class FolderTable:
    """A folder of a data set: its texts by option, and the index of its table in the file."""

    texts: dict[str, str]
    at: int | None = None


@dataclass
class DatasetTable:
    """A data set with its folders."""

    texts: dict[str, str]
    folders: list[FolderTable]
    at: int | None = None


def read_dataset_tables(path: Path) -> list[DatasetTable]:
    """Read the data sets of a file. Raises ConfigError when it cannot be read as tables."""
    return [
        DatasetTable(
            _field_texts(table, OF_DATASET),
            [
                FolderTable(_field_texts(inner, OF_FOLDER), i)
                for i, inner in enumerate(_inner_tables(table, "subsets", path))
            ],
            at,
        )
        for at, table in enumerate(_inner_tables(_load_any_tables(path), "datasets", path))
    ]


def tables_of_datasets(datasets: Sequence[DatasetConfig]) -> list[DatasetTable]:
    """Return the tables of data sets that are in no file, with only the options that tell their folders apart."""
    return [
        DatasetTable({}, [FolderTable(_subset_texts(subset)) for subset in dataset.subsets]) for dataset in datasets
    ]


def _subset_texts(subset: SubsetConfig) -> dict[str, str]:
    texts = {name: getattr(subset, name) for name in ("image_dir", "metadata_file", "num_repeats", "class_tokens")}
    texts["is_reg"] = subset.is_reg or None
    return {name: SUBSET_KEYS[name].text(value) for name, value in texts.items() if value is not None}


def inherited(config: DatasetConfig | SubsetConfig, texts: Mapping[str, str]) -> dict[str, str]:
    """Return the inherited values of a table, by option."""
    names = OF_DATASET if isinstance(config, DatasetConfig) else OF_FOLDER
    values = {name: getattr(config, name) for name in names if not texts.get(name)}
    if isinstance(config, DatasetConfig) and "resolution" in values:
        values["resolution"] = config.sizes  # this data set may be one of several sizes
    return {name: _field_text(name, value) for name, value in values.items()}


def written(path: Path, tables: Sequence[DatasetTable]) -> str:
    """Return the text of a file with these data sets, based on the existing file if there is one.

    Raises ConfigError with each invalid value, and for a file whose format cannot be preserved.
    """
    expected = _load_any_tables(path) if path.exists() else {}
    problems: list[Problem] = []
    _apply_tables(expected, tables, dict, problems)
    raise_if_any(problems)
    if path.suffix.lower() == ".json":
        return json.dumps(expected, indent=2, ensure_ascii=False) + "\n"
    text = read_outside_text(path) if path.exists() else COMMENT
    is_windows = path.exists() and b"\r\n" in path.read_bytes()
    # The edited text must parse to what was requested; otherwise the file is left alone.
    try:
        toml_text = _dataset_toml(text, tables)
        is_preserved = tomllib.loads(toml_text) == expected
    except (TOMLKitError, tomllib.TOMLDecodeError, TypeError, AttributeError, KeyError, IndexError, ValueError):
        is_preserved, toml_text = False, ""
    if not is_preserved:
        raise ConfigError(
            Problem(
                "dataset_config",
                ": {path} is written in a way that cannot be changed here; change it in a text editor",
                path=path,
            )
        )
    return toml_text.replace("\n", "\r\n") if is_windows else toml_text


def _dataset_toml(text: str, tables: Sequence[DatasetTable]) -> str:
    """Return a TOML file with these data sets.

    Tables are added and removed as text; only values are changed by tomlkit, which attributes the comments above a
    table to the previous table, and would remove them with it."""
    with contextlib.suppress(tomllib.TOMLDecodeError, KeyError):  # inline tables; tomlkit changes these
        rearranged = _rearrange_tables(text, tables)
        subset_counts = [len(table.get("subsets", [])) for table in tomllib.loads(rearranged).get("datasets", [])]
        if subset_counts == [len(table.folders) for table in tables]:
            text = rearranged
            tables = [
                replace(table, at=at, folders=[replace(folder, at=i) for i, folder in enumerate(table.folders)])
                for at, table in enumerate(tables)
            ]
    document = tomlkit.parse(text)
    _apply_tables(document, tables, tomlkit.table, [])
    return tomlkit.dumps(document)


def _rearrange_tables(text: str, new_tables: Sequence[DatasetTable]) -> str:
    """Return the text with the new tables and options, without removed tables. Comments belong to the table below
    them."""
    old_tables = tomllib.loads(text).get("datasets", [])
    before, *blocks = _split_blocks(text)
    parts, at, folder, ends = [before], -1, -1, {-1: 0}  # ends: the last block of each data set
    for block in blocks:
        name = HEADER.search(block)
        kind = name["name"].replace(" ", "") if name else ""
        if kind == "datasets":
            at, folder = at + 1, -1
        elif kind == "datasets.subsets":
            folder += 1
        table = next((candidate for candidate in new_tables if candidate.at == at), None)
        inner = next((inner for inner in table.folders if inner.at == folder), None) if table else None
        if kind == "datasets" and table:
            block = _extend_block(block, _new_option_lines(table.texts, OF_DATASET, old_tables[at]))
        elif kind == "datasets.subsets" and inner:
            block = _extend_block(block, _new_option_lines(inner.texts, OF_FOLDER, old_tables[at]["subsets"][folder]))
        if not kind.startswith("datasets") or (table and (inner or folder < 0)):
            parts.append(block)
        if kind.startswith("datasets"):
            ends[at] = len(parts) - 1
    for table in new_tables:  # in their order, as a new data set and a new folder may go after the same block
        last = max(ends.values()) if table.at is None else ends[table.at]
        added = [
            line
            for inner in table.folders
            if inner.at is None
            for line in ("", "[[datasets.subsets]]", *_new_option_lines(inner.texts, OF_FOLDER, {}))
        ]
        if table.at is None:
            added = ["", "[[datasets]]", *_new_option_lines(table.texts, OF_DATASET, {}), *added]
        parts[last] = _extend_block(parts[last], added)
    return "".join(parts)


def _new_option_lines(texts: Mapping[str, str], names: Sequence[str], table: JsonMapping) -> list[str]:
    new = {name: text.strip() for name in names if name not in table and (text := texts.get(name, "")).strip()}
    return [f"{name} = {toml_value(_literal(name, KNOWN[name].read(text)))}" for name, text in new.items()]


def _extend_block(block: str, lines: Sequence[str]) -> str:
    """Add lines to a block, after its last line that is neither blank nor a comment, and indented like it."""
    old_lines = block.splitlines()
    ends = (n for n in range(len(old_lines), 0, -1) if old_lines[n - 1].strip() and old_lines[n - 1].strip()[0] != "#")
    end = next(ends, len(old_lines))
    last_line = old_lines[end - 1] if end else ""
    # A header or the end of a multi-line array says nothing about the indentation of options.
    margin = "" if last_line.strip()[:1] in "]#" else last_line[: len(last_line) - len(last_line.lstrip())]
    new = (margin + line if line else "" for line in lines)
    return "".join(f"{line}\n" for line in (*old_lines[:end], *new, *old_lines[end:]))


def _split_blocks(text: str) -> list[str]:
    """Split into the text before the first table, and each table with the comments directly above it."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for at, line in enumerate(lines):
        if not HEADER.match(line):
            continue
        while at > starts[-1] and lines[at - 1].lstrip().startswith("#"):
            at -= 1
        starts.append(at)
    return ["".join(lines[a:b]) for a, b in pairwise([*starts, len(lines)])]


def _load_any_tables(path: Path) -> JsonObject:
    tables = load_json(path) if path.suffix.lower() == ".json" else load_toml(path)
    if not isinstance(tables, dict):
        raise ConfigError(Problem("dataset_config", ": {path} holds no tables", path=path))
    return tables


def _inner_tables(table: JsonMapping, key: str, path: Path) -> list[JsonObject]:
    tables = table.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(inner, dict) for inner in tables):
        raise ConfigError(Problem("dataset_config", ": {key} in {path} are no tables", key=key, path=path))
    return tables


def _field_texts(table: JsonMapping, names: Sequence[str]) -> dict[str, str]:
    return {name: _field_text(name, table[name]) for name in names if name in table}


def _field_text(name: str, value: Any) -> str:
    """Return a value as the text of its field; also an invalid one, so that it can be corrected."""
    if name == "resolution" and value:
        with contextlib.suppress(ConfigError):
            return ";".join(",".join(map(str, dict.fromkeys(size))) for size in parse_resolution(value))
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return KNOWN[name].text(value)


def _apply_tables(
    document: MutableMapping[str, Any], tables: Sequence[DatasetTable], make: Callable[[], Any], problems: list[Problem]
) -> None:
    """Replace the tables of a document by the wanted ones; `make` returns an empty table of its type."""
    datasets = _sync_tables(document, "datasets", tables, make)
    for number, (table, new_table) in enumerate(zip(datasets, tables, strict=True), start=1):
        place = f"in data set {number}: "
        _write_options(table, new_table.texts, OF_DATASET, place, problems)
        for inner, folder in zip(
            _sync_tables(table, "subsets", new_table.folders, make), new_table.folders, strict=True
        ):
            name = folder.texts.get("image_dir") or folder.texts.get("metadata_file") or ""
            _write_options(inner, folder.texts, OF_FOLDER, f"{place}{name} ", problems)


def _sync_tables(
    holder: MutableMapping[str, Any],
    key: str,
    new_tables: Sequence[DatasetTable | FolderTable],
    make: Callable[[], Any],
) -> Any:
    """Return the list of tables under a key, after deleting removed tables and appending empty ones for new tables."""
    is_toml = make is tomlkit.table
    if key not in holder:
        holder[key] = tomlkit.aot() if is_toml else []
    tables = holder[key]
    kept_positions = [table.at for table in new_tables if table.at is not None]
    # A position twice, out of order or beyond the end cannot come from the form.
    if kept_positions != sorted(set(kept_positions)) or kept_positions[-1:] > [len(tables) - 1]:
        raise ConfigError("This is not what the page sends: load it again.")
    for at in reversed(range(len(tables))):
        if at not in kept_positions:
            del tables[at]
    for _ in range(len(new_tables) - len(kept_positions)):
        tables.append(make() if isinstance(tables, AoT) or not is_toml else tomlkit.inline_table())
    return tables


def _write_options(
    table: MutableMapping[str, Any], texts: Mapping[str, str], names: Sequence[str], place: str, problems: list[Problem]
) -> None:
    """Write the options that differ, and remove those that are empty."""
    for name in names:
        before, text = _field_text(name, table[name]) if name in table else "", texts.get(name, "").strip()
        if text == before.strip():
            continue
        if not text:
            del table[name]
            continue
        try:
            value = KNOWN[name].read(text)
        except ConfigError as error:
            problems += [problem.replaced(option=name, place=place) for problem in error.problems]
            continue
        table[name] = _literal(name, value)


def _literal(name: str, value: Any) -> Any:
    """Return a value as it is written to a file: a square resolution as one number, several sizes as text, Windows
    paths in single quotes, which need no escapes."""
    if name == "resolution" and len(value) > 1:
        return _field_text(name, value)
    if name == "resolution":
        ((width, height),) = value
        return width if width == height else [width, height]
    if isinstance(value, str) and "\\" in value and "'" not in value:
        return tomlkit.string(value, literal=True)
    return value
