"""Dates, times and durations in sentences: their order and the names of months depend on the language's catalogue."""

import time

from library.config.problems import Message

LAST_TIME = 32_500_000_000.0  # seconds since 1970: the year 2999, the last one that Windows converts
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def local_time(at: float) -> time.struct_time:
    """Return a record's time as local time, limited to what Windows converts, as people edit records."""
    return time.localtime(min(max(at, 0.0), LAST_TIME))


def moment(at: float, clock: str = "%H:%M") -> Message:
    """Day and time: 23 Nov 21:40. `clock` is the format of the time of day."""
    then = local_time(at)
    month = Message(MONTHS[then.tm_mon - 1])
    return Message("{day} {month} {clock}", day=then.tm_mday, month=month, clock=time.strftime(clock, then))


def date(at: float) -> Message:
    then = local_time(at)
    return Message("{day} {month} {year}", day=then.tm_mday, month=Message(MONTHS[then.tm_mon - 1]), year=then.tm_year)


def duration_in_words(seconds: float) -> Message:
    """Return seconds in words: 45 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return Message("{count} s", count=max(0, round(seconds)))
    minutes = round(seconds / 60)
    if minutes < 90:
        return Message("{count} min", count=minutes)
    return Message("{hours} h {minutes} min", hours=minutes // 60, minutes=minutes % 60)
