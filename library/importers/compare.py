"""What differs between two configs."""

from typing import Any

from library.config.run_config import RunConfig
from library.config.schema import options, values


def differences(first: Any, second: Any) -> list[tuple[str, str, str]]:
    """The options that differ, each with both values as text; "-" where one kind of training has no such option."""
    one, two = _texts(first), _texts(second)
    return [(name, a, b) for name in {**one, **two} if (a := one.get(name, "-")) != (b := two.get(name, "-"))]


def _texts(config: RunConfig) -> dict[str, str]:
    known = options(type(config))
    return {
        name: "(set)" if value and known[name].kind == "secret" else known[name].text(value) or "not set"
        for name, value in values(config).items()
    }
