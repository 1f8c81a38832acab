"""How text files of users are written."""

import codecs
from pathlib import Path

from library.config.problems import ConfigError


def encoding_of(path: str | Path) -> str:
    """Windows' editor marks UTF-16 at the beginning of a file; all else is UTF-8, with a mark or without."""
    with open(path, "rb") as file:
        is_marked = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return "utf-16" if is_marked else "utf-8-sig"


def read_text(path: str | Path) -> str:
    """The text of a file. Raises ConfigError when it is absent or not text."""
    try:
        return Path(path).read_text(encoding=encoding_of(path))
    except FileNotFoundError:
        raise ConfigError("{path} does not exist", path=path) from None
    except OSError as e:
        raise ConfigError("{path} cannot be read: {why}", path=path, why=e.strerror or e) from None
    except UnicodeError:
        raise ConfigError("{path} is not a text file in UTF-8: save it with that encoding", path=path) from None
