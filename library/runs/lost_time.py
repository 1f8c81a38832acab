"""The time that a run lost besides its steps, as a sentence."""

from typing import Any

from library.config.problems import Message, MessageLike, join_messages

BESIDES = "{seconds} s went to other work since the first step: {causes}"


def lost_time_sentence(entries: Any) -> MessageLike:
    """Describe the fact `lost_seconds`, "" without one. A record may be damaged."""
    sound = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    lost = [(entry.get("cause"), entry.get("seconds")) for entry in sound]
    spent = [(cause, float(seconds)) for cause, seconds in lost if cause and isinstance(seconds, int | float)]
    if not spent:
        return ""
    parts = [Message("{cause} {seconds} s", cause=_cause(cause), seconds=f"{seconds:.1f}") for cause, seconds in spent]
    return Message(BESIDES, seconds=f"{sum(seconds for _, seconds in spent):.1f}", causes=join_messages(parts))


def _cause(recorded: Any) -> Message:
    # Plain text in a record; a message makes it translatable.
    return recorded if isinstance(recorded, Message) else Message(str(recorded))
