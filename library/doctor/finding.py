"""One line of the doctor's report."""

from dataclasses import dataclass
from typing import Any

from library.config.json_types import JsonObject
from library.config.problems import MessageLike


@dataclass(frozen=True)
class MachineFinding:
    """One line of the report. `verdict` is "ok", "hint" (works, but could be better) or "bad" (must be fixed)."""

    topic: str
    verdict: str
    text: MessageLike
    data: JsonObject


def ok(topic: str, text: MessageLike, **data: Any) -> MachineFinding:
    return MachineFinding(topic, "ok", text, data)


def hint(topic: str, text: MessageLike, **data: Any) -> MachineFinding:
    return MachineFinding(topic, "hint", text, data)


def bad(topic: str, text: MessageLike, **data: Any) -> MachineFinding:
    return MachineFinding(topic, "bad", text, data)
