"""Files to generate with that cannot be used, named before a model is loaded."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from library.adapter_files import fitting
from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig
from library.families.shared.weights import header_entries
from library.files import blocking_path
from library.methods.applied_controls import is_control


def unusable_folder(folder: Path) -> Iterator[Problem]:
    if blocking := blocking_path(folder):
        yield Problem("", "{folder} cannot be written to; choose another folder", folder=blocking)


def missing_files(paths: Iterable[Path]) -> Iterator[Problem]:
    """Yield each path once that is no file."""
    for path in dict.fromkeys(paths):
        if not path.is_file():
            yield Problem("", "{path} does not exist", path=path)


def unusable_files(config: RunConfig, paths: Iterable[Path]) -> Iterator[Problem]:
    """Yield files that are missing, damaged, no adapters or of another family, by their headers.

    Other formats than safetensors have no header and are only looked for.
    """
    for path in dict.fromkeys(paths):
        yield from missing_files([path])
        if path.is_file() and path.suffix == ".safetensors":
            try:
                stored = header_entries(path)
            except ConfigError as e:
                yield from e.problems
                continue
            why = None if is_control({*stored}) else fitting.misfit(path, stored, config.family)
            if why:
                yield Problem("", "{problem}", problem=why)
