"""Every path that a training names, wherever it stands: in options, their arguments, and files that these name."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from library.config import dataset
from library.config.outside_files import LIST, parse_json, read_text
from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.config.schema import options, section_options, values
from library.config.sections import AdapterRun
from library.families import network_args
from library.outputs import prompts

PATHS = ("file", "files", "folder")
ARGUMENTS = "_args"  # what the names of options of arguments, as key=value, end in
# A text that can only be meant as a path; a backslash is one of Windows alone, elsewhere it is of a pattern.
LIKE_A_PATH = re.compile(r"~|/|\.{1,2}/|.*/\.\.(?:/|$)" + (r"|[A-Za-z]:|.*\\" if os.name == "nt" else ""))
MOST = 10_000  # paths within one file that are looked at; of images their folders


class NamedPath(NamedTuple):
    """A path, and the option in or behind which it stands."""

    option: str
    path: str
    folder: str | None = None  # of an image list: where its images are, if it does not say that itself


def every(config: RunConfig, may: Callable[[NamedPath], bool]) -> None:
    """Show each path to `may`; the file that it is gets opened only if it answers true."""
    for one in direct(config):
        if may(one) and (within := WITHIN.get(one.option)):
            for inner in dict.fromkeys(within(config, Path(one.path))):
                if may(inner) and inner.folder is not None:
                    for image in _listed(Path(inner.path), inner.folder):
                        may(NamedPath(one.option, image))


def direct(config: RunConfig) -> Iterator[NamedPath]:
    """The paths in the values of options."""
    known = options(type(config))
    for name, value in values(config).items():
        if known[name].kind in PATHS:
            given: Iterable[Any] = [value] if isinstance(value, str | Path) else value or ()
            yield from (NamedPath(name, str(text)) for text in given if str(text))
        elif name.endswith(ARGUMENTS):
            yield from (NamedPath(name, path) for path in _in_arguments(config, name, value or ()))


def _in_arguments(config: RunConfig, option: str, pairs: Iterable[str]) -> Iterator[str]:
    cls = network_args.args_class(config) if isinstance(config, AdapterRun) and option == "network_args" else None
    known = section_options(cls) if cls else {}
    for pair in pairs:
        key, _, text = str(pair).partition("=")
        text = text.strip().strip("'\"")
        is_file = key.strip() in known and known[key.strip()].kind in PATHS
        if (is_file and text and text not in network_args.PRESETS) or LIKE_A_PATH.match(text):
            yield text


def _in_dataset(config: RunConfig, path: Path) -> Iterator[NamedPath]:
    """The files and folders of a data set file, at any level of it."""
    known = {**dataset.DATASET_KEYS, **dataset.SUBSET_KEYS}
    level: list[Any] = [_tables(path)]
    while level:
        table = level.pop()
        if isinstance(table, list):
            level += table
        elif isinstance(table, dict):
            level += table.values()
            for name, value in table.items():
                if name in known and known[name].kind in PATHS:
                    folder = str(table.get("image_dir") or "") if name == "metadata_file" else None
                    texts = value if isinstance(value, list) else [value]
                    yield from (NamedPath("dataset_config", str(text), folder) for text in texts if text)


def _tables(path: Path) -> Any:
    try:
        return dataset.tables(path)
    except ConfigError:  # whoever reads it for the training says why, and reads nothing of it either
        return {}


def _in_list(config: RunConfig, path: Path) -> Iterator[NamedPath]:
    yield from (NamedPath("in_json", one) for one in _listed(path, str(config.data.train_data_dir or "")))


def _in_prompts(config: RunConfig, path: Path) -> Iterator[NamedPath]:
    try:
        found = [image for prompt in prompts.read(path) for image in prompts.images(prompt)]
    except ConfigError:
        return
    yield from (NamedPath("sample_prompts", image) for image in found)


def _listed(path: Path, folder: str) -> tuple[str, ...]:
    """The folders of the images that a list names, and of their reference images."""
    try:
        about = os.stat(path)
    except OSError:
        return ()
    return _folders(path, folder, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=8)
def _folders(path: Path, folder: str, modified: int, size: int) -> tuple[str, ...]:
    found: dict[str, None] = {}
    try:
        text = read_text(path, LIST)
        lined = path.suffix.lower() == ".jsonl"
        rows = [parse_json(line, path) for line in text.splitlines() if line.strip()] if lined else None
        tables = parse_json(text, path) if rows is None else {}
    except ConfigError:
        return ()
    pairs = [(row.get("image_path"), row) for row in rows if isinstance(row, dict)] if rows else [*_items(tables)]
    for key, about in pairs:
        names = [key, *(value for name, value in _items(about) if str(name).startswith("control_path"))]
        for name in names:
            if isinstance(name, str):
                found[os.path.dirname(os.path.join(folder, name)) or "."] = None
    return tuple(found)[:MOST]


def _items(table: Any) -> Iterable[tuple[Any, Any]]:
    return table.items() if isinstance(table, dict) else ()


WITHIN: dict[str, Callable[[RunConfig, Path], Iterator[NamedPath]]] = {
    "dataset_config": _in_dataset,
    "in_json": _in_list,
    "sample_prompts": _in_prompts,
}
