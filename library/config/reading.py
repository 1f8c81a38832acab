"""Values that are more than a number or a word: each function turns what a user may write into what is stored."""

import re
from collections.abc import Callable
from typing import Any

from library.config.values import WIDE, ConfigError, number, shown, whole, words

LARGEST = 65536  # pixels on a side; nothing is trained at more


def count(value: Any) -> int | None:
    """How many of something; 0 is how forms say "not set"."""
    result = whole(value)
    if result < 0:
        raise ConfigError(f"must be at least 1 (or 0 for not set), got {shown(value)}")
    return result or None


def count_or_off(value: Any) -> int | None:
    """The same, where sd-scripts reads a negative number as "not set" too."""
    return max(0, whole(value)) or None


def minutes(value: Any) -> float | None:
    """A time in minutes; 0 is how forms say "not set"."""
    result = number(value)
    if not 0 <= result < float("inf"):
        raise ConfigError(f"must be a number of minutes above 0 (or 0 for not set), got {shown(value)}")
    return result or None


def steps_or_share(value: Any) -> int | float:
    """Steps (100), or a share of the training (0.05, "5%")."""
    if isinstance(value, str) and value.translate(WIDE).strip().endswith("%"):
        result = number(value.strip()[:-1]) / 100
    else:
        result = number(value)
    if result < 0:
        raise ConfigError(f"must be at least 0, got {shown(value)}")
    return int(result) if result >= 1 else result if result else 0


def resolution(value: Any) -> str:
    """1024, "1024,768", "1024x768" or [1024, 768] -> "1024" or "1024,768"."""
    return ",".join(map(str, _sides(value)))


def positive_pair(value: Any) -> tuple[int, int]:
    """A resolution as (width, height); one number means a square."""
    sides = _sides(value)
    return sides[0], sides[-1]


def _sides(value: Any) -> list[int]:
    sides = _parts(value, whole, r"\s*[,xX×*\s]\s*")
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise ConfigError(f"must be one size in pixels or width,height (1024 or 1024,768), got {shown(value)}")
    if max(sides) > LARGEST:
        raise ConfigError(f"must be at most {LARGEST} pixels on a side, got {shown(value)}")
    return sides


def pair(value: Any) -> str:
    """Two numbers, the smaller first: "2.0,4.0" or [2.0, 4.0] -> "2.0,4.0"."""
    sides = _parts(value, number)
    if len(sides) != 2 or not 0 < sides[0] <= sides[1]:
        raise ConfigError(f"must be two numbers, the smaller first (2.0,4.0), got {shown(value)}")
    return f"{sides[0]},{sides[1]}"


def range_of_sizes(value: Any) -> tuple[float, float]:
    """Two numbers, the smaller first, as numbers."""
    low, high = pair(value).split(",")
    return float(low), float(high)


def numbers(value: Any) -> str:
    """Numbers at least 0, with commas between: "1e-5,0" or [1e-5, 0] -> "1e-05,0.0"."""
    found = _parts(value, number)
    if not found or min(found) < 0:
        raise ConfigError(f"must be numbers of at least 0 with commas between, got {shown(value)}")
    return ",".join(map(str, found))


def _parts(value: Any, read: Callable[[Any], Any], between: str = ",") -> list[Any]:
    """The parts of a list or of a text, each read; none when one of them cannot be."""
    try:
        parts = (
            list(value) if isinstance(value, list | tuple) else re.split(between, words(value).translate(WIDE).strip())
        )
        return [read(part) for part in parts]
    except ValueError:
        return []


def extension(value: Any) -> str:
    """The ending of a file's name, with its dot."""
    text = words(value).strip()
    return text if text.startswith(".") else "." + text


def token_length(value: Any) -> int | None:
    """75, 150 or 225 tokens; 75 is what "not set" means."""
    result = whole(value)
    return None if result == 75 else result


def switch(value: Any) -> str:
    """The words auto, true and false, also from a real boolean."""
    return str(value).strip().lower()
