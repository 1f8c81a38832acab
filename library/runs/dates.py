"""Dates and times in sentences: their order and the names of months depend on the language's catalogue."""

import time

from library.config.problems import Message
from library.runs.durations import local_time

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def moment(at: float, clock: str = "%H:%M") -> Message:
    """Day and time: 23 Nov 21:40. `clock` is the format of the time of day."""
    then = local_time(at)
    month = Message(MONTHS[then.tm_mon - 1])
    return Message("{day} {month} {clock}", day=then.tm_mday, month=month, clock=time.strftime(clock, then))


def date(at: float) -> Message:
    then = local_time(at)
    return Message("{day} {month} {year}", day=then.tm_mday, month=Message(MONTHS[then.tm_mon - 1]), year=then.tm_year)
