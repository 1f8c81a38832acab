"""The one guard for every path that a browser sends: configs are read and written below chosen folders only."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from library.config.schema import ConfigError

LONGEST = 2000
LARGEST = 1_000_000  # bytes of a config; a real one has a few thousand
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.I)  # devices that Windows has in every folder


def roots(given: Sequence[str | Path] = ()) -> tuple[Path, ...]:
    """The folders below which configs may lie: the user's home, the current folder, and those given at the start."""
    wanted = [Path.home(), Path.cwd(), *(Path(folder).expanduser() for folder in given)]
    return tuple(dict.fromkeys(folder.resolve() for folder in wanted))


def config_file(text: Any, allowed: Sequence[Path], endings: Sequence[str] = (".toml",)) -> Path:
    """A path from a browser -> the file it really means, with symbolic links followed, or ConfigError.

    Only files with one of `endings` below one of `allowed`, and nothing in hidden folders: those hold other programs'
    settings and keys.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError("config file: write where it is, such as ~/kohya/cat.toml")
    text = text.strip()
    if len(text) > LONGEST or not text.isprintable() or _is_network(text):
        raise ConfigError("config file: this is not a path to a file on this computer")
    try:
        path = Path(text).expanduser().resolve()
    except (OSError, RuntimeError, ValueError):
        raise ConfigError("config file: this is not a path to a file on this computer") from None
    if path.suffix.lower() not in endings:
        raise ConfigError(f"config file: {path.name or text} must end in {' or '.join(endings)}")
    below = next((path.relative_to(root) for root in allowed if path.is_relative_to(root)), None)
    if below is None:
        places = ", ".join(map(str, allowed))
        raise ConfigError(
            f"config file: {path} is outside of {places}; start the page with --root FOLDER to allow more"
        )
    if any(part.startswith(".") or RESERVED.fullmatch(part) or ":" in part for part in below.parts):
        raise ConfigError(f"config file: {below} is hidden or reserved; choose another place")
    return path


def readable(text: Any, allowed: Sequence[Path], endings: Sequence[str] = (".toml",)) -> Path:
    """Like `config_file`, for a file that must be there and be of a config's size."""
    path = config_file(text, allowed, endings)
    if not path.is_file():
        raise ConfigError(f"config file: {path} does not exist")
    if path.stat().st_size > LARGEST:
        raise ConfigError(f"config file: {path} is far too large to be a config")
    return path


def _is_network(text: str) -> bool:
    """Whether merely looking at this path would make Windows log in somewhere."""
    return os.name == "nt" and text.replace("/", "\\").startswith("\\\\")
