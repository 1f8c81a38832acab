"""Names for what is read from or written as JSON and TOML: files of runs and datasets, forms, requests, presets.

What a file holds is known only once it was looked at, so the values of objects are not checked: a reader that uses
one turns it into a value of its own type.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, Union

JsonValue: TypeAlias = Union[None, bool, int, float, str, "Sequence[JsonValue]", "JsonMapping"]  # noqa: UP007
JsonObject: TypeAlias = dict[str, Any]  # a table: in memory it may hold paths and numbers that are converted on writing
JsonMapping: TypeAlias = Mapping[str, Any]  # the same, only read
