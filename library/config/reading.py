"""Parsers of values beyond a number or a word, from what a user may write to what is stored."""

import re
from collections.abc import Callable
from typing import Any

from library.config.problems import ConfigError
from library.config.values import WIDE_CHARACTERS, parse_finite, quoted, to_int, to_str

MAX_SIDE = 65536  # maximum pixels of a side
# Maximum rank of an adapter. No layer has so many rows, but LoKr reads a rank above them, usually 100000, as "whole
# matrices".
LARGEST_RANK = 1_000_000
MAX_SIZES_PER_TRAINING = 16  # maximum number of sizes per training
ONE_SIZE = "must be one size in pixels or width,height (1024 or 1024,768), got {value}"
OF_RESOLUTION = (
    "must be one size in pixels or width,height (1024 or 1024,768), or several sizes with ; between them (512;1024), "
    "got {value}"
)


def parse_count(value: Any) -> int | None:
    """Parse a count; forms write "not set" as 0."""
    result = to_int(value)
    if result < 0:
        raise ConfigError("must be at least 1 (or 0 for not set), got {value}", value=quoted(value))
    return result or None


def seed_or_random(value: Any) -> int | None:
    """Parse a seed; -1 is a random one, as other programs write it."""
    result = to_int(value)
    return None if result == -1 else result


def count_or_off(value: Any) -> int | None:
    return max(0, to_int(value)) or None


def positive_or_off(value: Any) -> float | None:
    """Parse a number above 0; forms write "not set" as 0."""
    result = parse_finite(value)
    if result < 0:
        raise ConfigError("must be above 0 (or 0 for not set), got {value}", value=quoted(value))
    return result or None


def minutes(value: Any) -> float | None:
    """Parse a time in minutes; forms write "not set" as 0."""
    result = parse_finite(value)
    if not 0 <= result < float("inf"):
        raise ConfigError("must be a number of minutes above 0 (or 0 for not set), got {value}", value=quoted(value))
    return result or None


def steps_or_share(value: Any) -> int | float:
    """Parse steps (100), or a share of the training (0.05, "5%"), which is a float: 1.0 is all of it, 1 one step."""
    text = str(value).translate(WIDE_CHARACTERS).strip()
    if text.endswith("%"):
        result = parse_finite(text[:-1]) / 100
        if result > 1:
            raise ConfigError("must be at most {ceiling}, got {value}", ceiling="100%", value=quoted(value))
        return result or 0
    result = parse_finite(value)
    if result > 1 and result % 1:
        raise ConfigError("must be whole steps, or a share of at most 1, got {value}", value=quoted(value))
    is_all = result == 1 and "." in text
    return int(result) if (result >= 1 or not result) and not is_all else result


def resolution(value: Any) -> str:
    parse_resolution(value)  # raises for invalid combinations
    return ";".join(",".join(map(str, _parse_sides(part, OF_RESOLUTION))) for part in _size_parts(value))


# sd-scripts reads two numbers as width and height, others as two squares; only a semicolon is unambiguous.
# Why: docs/decisions/2026-11-27-several-sizes.md
def parse_resolution(value: Any) -> tuple[tuple[int, int], ...]:
    """Return the sizes of a resolution as (width, height), one number being a square.

    Two numbers are width and height of one size, as in sd-scripts; three or more are squares. Semicolons separate
    sizes, "512;1024,768", as does a list of lists.
    """
    parts = _size_parts(value)
    if len(parts) > MAX_SIZES_PER_TRAINING:
        raise ConfigError("must be at most {most} sizes, got {count}", most=MAX_SIZES_PER_TRAINING, count=len(parts))
    resolution = [(sides[0], sides[-1]) for sides in (_parse_sides(part, OF_RESOLUTION) for part in parts)]
    if duplicate := next((size for size in resolution if resolution.count(size) > 1), None):
        shown = ",".join(map(str, dict.fromkeys(duplicate)))
        raise ConfigError("names the size {size} more than once: write each size once", size=shown)
    return tuple(resolution)


def _size_parts(value: Any) -> list[Any]:
    """Return the parts of a value that describe one size each."""
    if isinstance(value, list | tuple):
        are_sides = all(isinstance(part, int | float) or str(part).strip().isdigit() for part in value)
        return [value] if len(value) <= 2 and are_sides else list(value)
    if not isinstance(value, str):
        return [value]
    text = value.translate(WIDE_CHARACTERS).strip().rstrip(";")
    if ";" in text:
        return text.split(";")
    if "," in text and re.search(r"\d\s*[xX×*]\s*\d", text):  # 512x512,1024x768
        return text.split(",")
    sides = re.split(r"\s*[,\s]\s*", text)
    return sides if len(sides) > 2 and all(map(str.isdigit, sides)) else [text]


def positive_pair(value: Any) -> tuple[int, int]:
    sides = _parse_sides(value)
    return sides[0], sides[-1]


def _parse_sides(value: Any, expected: str = ONE_SIZE) -> list[int]:
    sides = _read_parts(value, to_int, r"\s*[,xX×*\s]\s*")
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise ConfigError(expected, value=quoted(value))
    if max(sides) > MAX_SIDE:
        raise ConfigError(
            "must be at most {largest} pixels on a side, got {value}", largest=MAX_SIDE, value=quoted(value)
        )
    return sides


def parse_pair(value: Any) -> str:
    """Parse two numbers, the smaller first: "2.0,4.0" or [2.0, 4.0] -> "2.0,4.0"."""
    sides = _read_parts(value, parse_finite)
    if len(sides) != 2 or not 0 < sides[0] <= sides[1]:
        raise ConfigError("must be two numbers, the smaller first (2.0,4.0), got {value}", value=quoted(value))
    return f"{sides[0]},{sides[1]}"


def range_of_sizes(value: Any) -> tuple[float, float]:
    low, high = parse_pair(value).split(",")
    return float(low), float(high)


def parse_numbers(value: Any) -> str:
    """Numbers at least 0, with commas between: "1e-5,0" or [1e-5, 0] -> "1e-05,0.0"."""
    parts = _read_parts(value, parse_finite)
    if not parts or min(parts) < 0:
        raise ConfigError("must be numbers of at least 0, separated by commas, got {value}", value=quoted(value))
    return ",".join(map(str, parts))


def _read_parts(value: Any, read: Callable[[Any], Any], delimiter: str = ",") -> list[Any]:
    """Parse each part of a list or text; empty if one fails."""
    try:
        if not isinstance(value, list | tuple):
            value = re.split(delimiter, to_str(value).translate(WIDE_CHARACTERS).strip())
        return [read(part) for part in value]
    except ValueError:
        return []


def parse_extension(value: Any) -> str:
    """Parse a file name's extension, with its dot."""
    text = to_str(value).strip()
    if not text.strip(".") or set(text) & set("/\\\0"):
        raise ConfigError("must be a file extension such as .txt, got {value}", value=quoted(text))
    return text if text.startswith(".") else "." + text


def separator(value: Any) -> str:
    return to_str(value) or ","


def token_length(value: Any) -> int | None:
    result = to_int(value)
    return None if result == 75 else result


def switch(value: Any) -> str:
    return str(value).strip().lower()
