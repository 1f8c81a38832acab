"""Every path that a training names: in options, their arguments, and the files that these name."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from library.config import dataset
from library.config.hub_names import FILE, NAMES_ON_THE_HUB, is_file_id
from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig
from library.config.schema import option_values, options_of, section_options
from library.config.sections import AdapterRun
from library.config.values import Option
from library.data import metadata
from library.families import network_args
from library.sampling import prompts

PATHS = ("file", "files", "folder")
ARGUMENTS = "_args"  # the suffix of options that take key=value arguments
HUB_ID = re.compile(r"(?![.-])[\w.-]+(?<![.-])/(?![.-])[\w.-]+(?<![.-])")
# Options whose folder or file need not exist, as the training creates it.
CREATED_BY_TRAINING = (
    "output_dir",
    "logging_dir",
    "compile_cache_dir",
    "tokenizer_cache_dir",
    "console_log_file",
)
# A text that can only be a path. A backslash counts on Windows only, and there not in a pattern such as r".*\.attn":
# no path has an asterisk, unless a ".." behind it takes it away.
ON_POSIX = r"~|/|\.{1,2}/|.*/\.\.(?:/|$)"
ON_WINDOWS = ON_POSIX + r"""|[A-Za-z]:|\\|.*[\\/]\.\.[ .]*(?:[\\/]|$)|[^<>"|?*]*\\[^<>"|?*]*$"""
LIKE_A_PATH = re.compile(ON_WINDOWS if os.name == "nt" else ON_POSIX)
MAX_FOLDERS = 100_000  # folders in one image list; each is checked


class NamedPath(NamedTuple):
    """A path, and the option that names it, directly or through a file."""

    option: str
    path: str
    folder: str | None = None  # the folder of an image list's images, if the list does not name it


def visit_paths(config: RunConfig, may: Callable[[NamedPath], bool]) -> None:
    """Pass each path to `may`; a file is only opened if it returns true.

    Raises ConfigError for a list of images in more folders than can be checked.
    """
    for named_path in direct(config):
        if may(named_path) and (within := WITHIN.get(named_path.option)):
            for inner in dict.fromkeys(within(config, Path(named_path.path))):
                if may(inner) and inner.folder is not None:
                    for folder in _folders_in_list(named_path.option, Path(inner.path), inner.folder):
                        may(NamedPath(named_path.option, folder))


def is_hub_id(option: Option, text: str) -> bool:
    """Return whether a value is an id on the Hugging Face Hub. Only parts of the model can be one, and adapters that
    are only read a file there; in any other option, or if there is such a folder, the same text is a path."""
    if NAMES_ON_THE_HUB.get(option.name) == FILE:
        return is_file_id(text)
    may_be = option.section == "model" and option.kind in PATHS and option.name not in CREATED_BY_TRAINING
    return may_be and bool(HUB_ID.fullmatch(text)) and not os.path.exists(text)


def direct(config: RunConfig) -> Iterator[NamedPath]:
    """Yield the paths in the values of options."""
    options = options_of(type(config))
    for name, value in option_values(config).items():
        if options[name].kind in PATHS:
            texts: Iterable[Any] = [value] if isinstance(value, str | Path) else value or ()
            yield from (NamedPath(name, options[name].path_in(text)) for text in texts if str(text))
        elif name.endswith(ARGUMENTS):
            yield from (NamedPath(name, path) for path in _in_arguments(config, name, value or ()))


def _in_arguments(config: RunConfig, option: str, pairs: Iterable[str]) -> Iterator[str]:
    cls = network_args.args_class(config) if isinstance(config, AdapterRun) and option == "network_args" else None
    argument_options = section_options(cls) if cls else {}
    for pair in pairs:
        key, _, text = str(pair).partition("=")
        text = text.strip().strip("'\"")
        is_file = key.strip() in argument_options and argument_options[key.strip()].kind in PATHS
        if (is_file and text and text not in network_args.LAYER_PRESETS) or LIKE_A_PATH.match(text):
            yield text


def _in_dataset(config: RunConfig, path: Path) -> Iterator[NamedPath]:
    """Yield the files and folders of a dataset file, at any level."""
    keys = {**dataset.DATASET_KEYS, **dataset.SUBSET_KEYS}
    level: list[Any] = [_tables_if_readable(path)]
    while level:
        table = level.pop()
        if isinstance(table, list):
            level += table
        elif isinstance(table, dict):
            level += table.values()
            for name, value in table.items():
                if name in keys and keys[name].kind in PATHS:
                    folder = str(table.get("image_dir") or "") if name == "metadata_file" else None
                    texts = value if isinstance(value, list) else [value]
                    yield from (NamedPath("dataset_config", str(text), folder) for text in texts if text)


def _tables_if_readable(path: Path) -> Any:
    try:
        return dataset.read_tables(path)
    except ConfigError:  # the training reports why, and cannot read it either
        return {}


def _in_list(config: RunConfig, path: Path) -> Iterator[NamedPath]:
    for folder in _folders_in_list("in_json", path, str(config.data.train_data_dir or "")):
        yield NamedPath("in_json", folder)


def _in_prompts(config: RunConfig, path: Path) -> Iterator[NamedPath]:
    try:
        images = [image for prompt in prompts.read_prompts(path) for image in prompts.prompt_images(prompt)]
    except ConfigError:
        return
    yield from (NamedPath("sample_prompts", image) for image in images)


def _folders_in_list(option: str, path: Path, folder: str) -> tuple[str, ...]:
    """Return the folders of the images in an image list, and of their reference images."""
    try:
        about = os.stat(path)
    except OSError:
        return ()
    folders = _folders_in_metadata(path, folder, about.st_mtime_ns, about.st_size)
    if len(folders) > MAX_FOLDERS:
        template = ": {path} names images in {count} folders, and at most {most} can be checked; use fewer folders"
        raise ConfigError(Problem(option, template, path=path, count=f"{len(folders):,}", most=f"{MAX_FOLDERS:,}"))
    return folders


@lru_cache(maxsize=8)
def _folders_in_metadata(path: Path, folder: str, modified: int, size: int) -> tuple[str, ...]:
    try:
        entries = metadata.read_metadata_file(path, folder)  # like the training: any format, any name of a column
    except ConfigError:  # the training reports why, and cannot read it either
        return ()
    images = (image for entry in entries for image in (entry.path, *entry.controls))
    return tuple(dict.fromkeys(os.path.dirname(image) or "." for image in images))


WITHIN: dict[str, Callable[[RunConfig, Path], Iterator[NamedPath]]] = {
    "dataset_config": _in_dataset,
    "in_json": _in_list,
    "sample_prompts": _in_prompts,
}
