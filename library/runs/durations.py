"""Durations in words."""

from library.config.problems import Message


def duration_in_words(seconds: float) -> Message:
    """Seconds in words: 45 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return Message("{count} s", count=max(0, round(seconds)))
    minutes = round(seconds / 60)
    return (
        Message("{count} min", count=minutes)
        if minutes < 90
        else Message("{hours} h {minutes} min", hours=minutes // 60, minutes=minutes % 60)
    )
