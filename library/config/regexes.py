"""Limits for regular expressions from a config, some of which would take forever on a name of 40 letters."""

import re

from library.config.problems import ConfigError
from library.config.values import quoted

MAX_REPEATED_PARTS = 6  # n repeats may take (letters of a name)^n steps
REPEATED = re.compile(r"[*+]|\{\d*(?:,\d*)?\}")
ANY = re.compile(r"[*+?]|\{\d*(?:,\d*)?\}")
PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?:P<\w+>|P=\w+|<?[=!]|>|[aiLmsux-]*:|[aiLmsux]+))?|.", re.S)


def refuse_endless(pattern: str) -> None:
    """Raise ConfigError for a valid pattern that could take forever to match."""
    if _is_endless(pattern):
        template = "{pattern} can take forever to match; write it without repeating a group that varies in length"
        raise ConfigError(template, pattern=quoted(pattern))


def _is_endless(text: str) -> bool:
    """Return whether a repeated group repeats or alternates inside, such as (a+)+, or very many parts are repeated."""
    groups, position, repeats = [False], 0, 0  # per open group, whether it can match in several ways
    # A scan of the pattern part by part: an escape, a class in brackets, an opening of a group, or one character.
    while match := PART.match(text, position):
        part, position = match[0], match.end()
        varies = False
        if part.startswith("("):
            groups.append(False)
            continue
        if part == "|":
            groups[-1] = True
            continue
        if part == ")" and len(groups) > 1:
            varies = groups.pop()
        repeated, any_number = REPEATED.match(text, position), ANY.match(text, position)
        if repeated and varies:
            return True
        repeats += bool(repeated)
        groups[-1] = groups[-1] or varies or bool(any_number)
        position = any_number.end() if any_number else position
        position += text[position : position + 1] in ("?", "+") if any_number else 0  # lazy and possessive: *?, *+
    return repeats > MAX_REPEATED_PARTS
