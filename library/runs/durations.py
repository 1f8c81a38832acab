"""Durations in words, and times of day."""

import time

from library.config.problems import Message

LAST_TIME = 32_500_000_000.0  # seconds since 1970: the year 2999, the last one that Windows converts


def local_time(moment: float) -> time.struct_time:
    """Return a record's time as local time, limited to what Windows converts, as people edit records."""
    return time.localtime(min(max(moment, 0.0), LAST_TIME))


def duration_in_words(seconds: float) -> Message:
    """Return seconds in words: 45 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return Message("{count} s", count=max(0, round(seconds)))
    minutes = round(seconds / 60)
    if minutes < 90:
        return Message("{count} min", count=minutes)
    return Message("{hours} h {minutes} min", hours=minutes // 60, minutes=minutes % 60)
