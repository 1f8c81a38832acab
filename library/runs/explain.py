"""Find the cause of a failure in the end of a log, as one sentence."""

import re
import tomllib
from pathlib import Path

from library.config.problems import Message, MessageLike, without_flags

_TABLES = tomllib.loads(Path(__file__).with_name("known_errors.toml").read_text(encoding="utf-8"))
# (pattern, advice) for exceptions, and for messages of processes that ended without one
KNOWN, ENDINGS = (
    [("|".join(error["patterns"]), str(error["advice"])) for error in _TABLES[name]] for name in ("known", "endings")
)
CONFIG_ERROR_TEXT = re.compile(r"^(?:[\w.]+\.)?ConfigError: (.+?)(?=^\S*Traceback|^\s*$|\Z)", re.M | re.S)
USAGE = re.compile(r"^[\w./\\-]+\.py: error:\s*(.+?)(?=^Traceback|^\s*$|\Z)", re.M | re.S)
SAID = re.compile(r"(?:^error: .+\n?)+", re.M)  # the format in which our scripts report problems
EXCEPTION = re.compile(r"^(?:[\w]+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b.*", re.M)
MAX_MESSAGE_LENGTH = 2000  # maximum characters of an exception's message
LAUNCHER = re.compile(r"CalledProcessError|ChildFailedError|torch\.distributed\.elastic")


def advice(error: MessageLike) -> MessageLike:
    """Return a run's error as the page shows it: its known cause or itself, with options named as in the form."""
    return cause(str(error)) or without_flags(error)


def cause(log: str) -> MessageLike | None:
    """Return the most likely cause of a failure in the end of a log, or None.

    The order: the trainer's own messages; well-known exceptions, the last first; endings without an exception; the last
    exception unchanged.
    """
    # The trainer's messages come first, as they contain advice. The launcher's error about its failed child is not the
    # cause.
    for pattern in (CONFIG_ERROR_TEXT, USAGE):
        if matches := pattern.findall(log):
            return matches[-1].strip()
    if matches := SAID.findall(log):
        return "\n".join(line.removeprefix("error: ") for line in matches[-1].splitlines())
    raised = [match for match in EXCEPTION.finditer(log) if not LAUNCHER.search(match.group())]
    texts = [(_whole(log, match), KNOWN) for match in reversed(raised)] or [(log, KNOWN)]
    for text, table in (*texts, (log, ENDINGS)):
        if advice := _explain_known(text, table):
            return advice
    return raised[-1].group().strip() if raised else None


def _whole(log: str, match: re.Match[str]) -> str:
    return log[match.start() : match.start() + MAX_MESSAGE_LENGTH].partition("\nTraceback")[0]


def _explain_known(text: str, table: list[tuple[str, str]]) -> MessageLike | None:
    for pattern, advice in table:
        if matches := list(re.finditer(pattern, text, re.M)):
            groups = [group for group in matches[-1].groups() if group]
            return Message(advice, what=groups[0]) if groups else advice
    return None
