"""Limits for regular expressions from a config, some of which would take forever on a name of 40 letters."""

import re

from library.config.problems import ConfigError
from library.config.values import quoted

MOST_REPEATS = 6  # n repeats may take (letters of a name)^n steps
REPEATED = re.compile(r"[*+]|\{\d*(?:,\d*)?\}")
ANY = re.compile(r"[*+?]|\{\d*(?:,\d*)?\}")
PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?:P<\w+>|P=\w+|<?[=!]|>|[aiLmsux-]*:|[aiLmsux]+))?|.", re.S)


def refuse_endless(pattern: str) -> None:
    """Raise ConfigError for a valid pattern that could take forever to match."""
    if _is_endless(pattern):
        template = "{pattern} can take forever to match; write it without repeating a group that varies in length"
        raise ConfigError(template, pattern=quoted(pattern))


def _is_endless(text: str) -> bool:
    """Return whether a repeated group repeats or alternates inside, or very many parts are repeated."""
    groups, at, repeats = [False], 0, 0  # per open group, whether it can match in several ways
    while match := PART.match(text, at):
        part, at = match[0], match.end()
        varies = False
        if part.startswith("("):
            groups.append(False)
            continue
        if part == "|":
            groups[-1] = True
            continue
        if part == ")" and len(groups) > 1:
            varies = groups.pop()
        repeated, any_number = REPEATED.match(text, at), ANY.match(text, at)
        if repeated and varies:
            return True
        repeats += bool(repeated)
        groups[-1] = groups[-1] or varies or bool(any_number)
        at = any_number.end() if any_number else at
        at += text[at : at + 1] in ("?", "+") if any_number else 0
    return repeats > MOST_REPEATS
