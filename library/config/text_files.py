"""How text files of users are written: UTF-8, or the UTF-16 that Windows' editor marks at the beginning of a file."""

import codecs
from pathlib import Path

from library.config.problems import ConfigError

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def encoding_of(path: str | Path) -> str:
    """The encoding of a file."""
    with open(path, "rb") as file:
        return _encoding(file.read(2))


def decoded(data: bytes) -> str:
    """The text that the bytes of a file are. Raises UnicodeDecodeError, also for NUL, as in UTF-16 without its mark."""
    encoding = _encoding(data)
    text = data.decode(encoding)
    if (at := text.find("\0")) >= 0:
        raise UnicodeDecodeError(encoding, data, at, at + 1, "NUL is not text")
    return text


def _encoding(data: bytes) -> str:
    return "utf-16" if data.startswith(UTF_16) else "utf-8-sig"


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
