"""One line of the doctor's report."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MachineFinding:
    """One line of the report. `verdict` is "ok", "hint" (works, but could be better) or "bad" (must be fixed)."""

    topic: str
    verdict: str
    text: str
    data: dict[str, Any]


def ok(topic: str, text: str, **data: Any) -> MachineFinding:
    """All is well."""
    return MachineFinding(topic, "ok", text, data)


def hint(topic: str, text: str, **data: Any) -> MachineFinding:
    """Works, but could be better."""
    return MachineFinding(topic, "hint", text, data)


def bad(topic: str, text: str, **data: Any) -> MachineFinding:
    """Keeps a training from running."""
    return MachineFinding(topic, "bad", text, data)
