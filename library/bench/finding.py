"""One line of the doctor's report."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One line of the report. `verdict` is "ok", "hint" (works, but could be better) or "bad" (must be fixed)."""

    topic: str
    verdict: str
    text: str
    data: dict[str, Any]


def ok(topic: str, text: str, **data: Any) -> Finding:
    """All is well."""
    return Finding(topic, "ok", text, data)


def hint(topic: str, text: str, **data: Any) -> Finding:
    """Works, but could be better."""
    return Finding(topic, "hint", text, data)


def bad(topic: str, text: str, **data: Any) -> Finding:
    """Keeps a training from running."""
    return Finding(topic, "bad", text, data)
