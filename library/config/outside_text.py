"""Decode settings files that do not state their encoding: UTF-8, UTF-16, or the certain part of a code page."""

import codecs
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from library.config.problems import ConfigError

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
NO_TEXT = "{path} is not a text file in UTF-8: save it with that encoding"
# The most common code page. Its five unassigned bytes become private-use characters, as YAML allows no control
# characters.
_WESTERN = {
    byte: letter if (letter := bytes([byte]).decode("cp1252", "ignore")) else chr(0xF700 + byte)
    for byte in range(0x80, 0xA0)
}
LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
HALF_IN_PATH = re.compile(r"[\ud800-\udc7f\udd00-\udfff]")
_CODE_PAGE = re.compile(rb"^[ \t]*@?chcp(?:\.com)?[ \t]+(\d{3,5})\b", re.M | re.I)  # of Windows, in a batch file


class SettingsText(NamedTuple):
    """A file's text, and whether its characters beyond ASCII are certain."""

    text: str
    is_certain: bool = True

    def refuse_unclear(self, read: Any, path: str | Path) -> None:
        """Raise ConfigError if a value read from the text has uncertain characters. Comments may have them."""
        if not self.is_certain and (unclear := next(_beyond_ascii(read), "")):
            start = re.match(r"[\x00-\x7f]*", unclear)
            template = (
                "{path} is not in UTF-8, so the characters after {text} are uncertain: save it as UTF-8, in Notepad "
                "under Save as"
            )
            raise ConfigError(template, path=path, text=repr(start[0][-40:] if start else ""))


def settings_text(data: bytes, path: str | Path) -> SettingsText:
    """Decode a settings file. Raises ConfigError unless it is UTF-8, UTF-16 or in a code page."""
    data = _unmarked_utf_16(data[:4096]) + data
    try:
        return SettingsText(with_line_feeds(decode_text(data)))
    except UnicodeError:
        if b"\0" in data or data.startswith(UTF_16):
            raise ConfigError(NO_TEXT, path=path) from None
    if code_page := _CODE_PAGE.search(data):
        with contextlib.suppress(UnicodeError, LookupError):
            return SettingsText(with_line_feeds(data.decode(f"cp{int(code_page[1])}")))
    return SettingsText(with_line_feeds(data.decode("latin-1").translate(_WESTERN)), is_certain=False)


def _beyond_ascii(value: Any) -> Iterator[str]:
    """Yield the strings with characters beyond ASCII in a value, whose depth the parser limits."""
    if isinstance(value, str):
        yield from () if value.isascii() else (value,)
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _beyond_ascii(pair)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _beyond_ascii(inner)


def refuse_half_characters(text: str, in_path: bool) -> None:
    """Raise ConfigError for a lone surrogate, which JSON may contain, but no TOML. In paths, U+DC80 to U+DCFF are bytes
    of names that are not UTF-8.
    """
    if text.isascii():
        return
    if match := (HALF_IN_PATH if in_path else LONE_SURROGATE).search(text):
        template = "holds half of a character ({half}) after {text}; delete it or write it whole"
        before = text[max(0, match.start() - 20) : match.start()]
        raise ConfigError(template, half=f"\\u{ord(match[0]):04x}", text=repr(before))


def with_line_feeds(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def decode_text(data: bytes) -> str:
    """Decode a file's bytes as UTF-8, or as UTF-16 marked by Windows' editor.

    Raises UnicodeDecodeError, also for NUL, which unmarked UTF-16 contains.
    """
    encoding = "utf-16" if data.startswith(UTF_16) else "utf-8-sig"
    text = data.decode(encoding)
    if (at := text.find("\0")) >= 0:
        raise UnicodeDecodeError(encoding, data, at, at + 1, "NUL is not text")
    return text


def _unmarked_utf_16(beginning: bytes) -> bytes:
    """Return the byte order mark that UTF-16 lacks: in ASCII text, one byte of most pairs is zero, the other never."""
    first, second = beginning[::2].count(0), beginning[1::2].count(0)
    if beginning.startswith(UTF_16) or (first and second) or max(first, second) <= len(beginning) // 8:
        return b""
    return codecs.BOM_UTF16_BE if first else codecs.BOM_UTF16_LE
