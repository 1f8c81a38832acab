"""Type names for data read from or written as JSON and TOML: files of runs and datasets, forms, requests, presets.

Values of objects are not typed, as the content of a file is known only after parsing: readers convert what they use.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, Union

JsonValue: TypeAlias = Union[None, bool, int, float, str, "Sequence[JsonValue]", "JsonMapping"]  # noqa: UP007
JsonObject: TypeAlias = dict[str, Any]  # a table: in memory it may hold paths and numbers that are converted on writing
JsonMapping: TypeAlias = Mapping[str, Any]  # the same, read-only


def as_float(value: object) -> float:
    """Return a number of a file; 0 for anything else, such as a missing one."""
    return float(value) if isinstance(value, int | float) else 0.0
