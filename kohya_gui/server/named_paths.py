"""Every path that a training names, wherever it stands: in options, their arguments, and files that these name."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from library.config import dataset
from library.config.hub_names import is_file_id
from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig
from library.config.schema import options, section_options, values
from library.config.sections import AdapterRun
from library.config.values import Option
from library.data import metadata
from library.families import network_args
from library.sampling import prompts

PATHS = ("file", "files", "folder")
ARGUMENTS = "_args"  # what the names of options of arguments, as key=value, end in
HUB_ID = re.compile(r"(?![.-])[\w.-]+(?<![.-])/(?![.-])[\w.-]+(?<![.-])")
OF_HUB_FILES = "base_weights"
MADE = ("output_dir", "logging_dir", "compile_cache_dir", "tokenizer_cache_dir", "console_log_file")  # by a training
# A text that can only be meant as a path; a backslash is one of Windows alone, elsewhere it is of a pattern.
LIKE_A_PATH = re.compile(r"~|/|\.{1,2}/|.*/\.\.(?:/|$)" + (r"|[A-Za-z]:|.*\\" if os.name == "nt" else ""))
MOST = 100_000  # folders of the images of one list; each is judged


class NamedPath(NamedTuple):
    """A path, and the option in or behind which it stands."""

    option: str
    path: str
    folder: str | None = None  # of an image list: where its images are, if it does not say that itself


def every(config: RunConfig, may: Callable[[NamedPath], bool]) -> None:
    """Show each path to `may`; the file that it is gets opened only if it answers true.

    Raises ConfigError for a list of images in more folders than can be judged.
    """
    for one in direct(config):
        if may(one) and (within := WITHIN.get(one.option)):
            for inner in dict.fromkeys(within(config, Path(one.path))):
                if may(inner) and inner.folder is not None:
                    for folder in _listed(one.option, Path(inner.path), inner.folder):
                        may(NamedPath(one.option, folder))


def is_hub_id(option: Option, text: str) -> bool:
    """Whether a value is an id on the Hugging Face Hub. Only parts of the model can be one, and the base weights a file
    there, as they are only read; in any other option, and where there is such a folder, the same text is a path."""
    if option.name == OF_HUB_FILES:
        return is_file_id(text)
    may_be = option.section == "model" and option.kind in PATHS and option.name not in MADE
    return may_be and bool(HUB_ID.fullmatch(text)) and not os.path.exists(text)


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
    for folder in _listed("in_json", path, str(config.data.train_data_dir or "")):
        yield NamedPath("in_json", folder)


def _in_prompts(config: RunConfig, path: Path) -> Iterator[NamedPath]:
    try:
        found = [image for prompt in prompts.read(path) for image in prompts.images(prompt)]
    except ConfigError:
        return
    yield from (NamedPath("sample_prompts", image) for image in found)


def _listed(option: str, path: Path, folder: str) -> tuple[str, ...]:
    """The folders of the images that a list names, and of their reference images."""
    try:
        about = os.stat(path)
    except OSError:
        return ()
    found = _folders(path, folder, about.st_mtime_ns, about.st_size)
    if len(found) > MOST:
        template = ": {path} names images in {count} folders, and at most {most} can be checked; use fewer folders"
        raise ConfigError(Problem(option, template, path=path, count=f"{len(found):,}", most=f"{MOST:,}"))
    return found


@lru_cache(maxsize=8)
def _folders(path: Path, folder: str, modified: int, size: int) -> tuple[str, ...]:
    try:
        entries = metadata.read(path, folder)  # as the training reads it: any format, any name of a column
    except ConfigError:  # the training says why, and reads none of it either
        return ()
    images = (image for entry in entries for image in (entry.path, *entry.controls))
    return tuple(dict.fromkeys(os.path.dirname(image) or "." for image in images))


WITHIN: dict[str, Callable[[RunConfig, Path], Iterator[NamedPath]]] = {
    "dataset_config": _in_dataset,
    "in_json": _in_list,
    "sample_prompts": _in_prompts,
}
