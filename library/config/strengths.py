"""The strength of a LoRA file, and how an option names both: FILE:0.8."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from library.config.pasted import lines_of, pasted_path, strip_pasted
from library.config.problems import ConfigError, Problem
from library.config.values import join_words, parse_finite, quoted, split_strength, split_words

MAX_STRENGTH = 10  # of a LoRA, in both directions
WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")  # endings of the files of LoRAs
NUMERIC = " :=0123456789.,-+"  # what a strength without a file is made of


def split_files(text: str) -> list[str]:
    """Split text with several FILE:0.8 at line ends and blanks; a file whose name holds blanks or a quote needs no
    quotes if nothing else is in its line.
    """
    if len(lines := lines_of(text)) > 1:
        return [file for line in lines for file in split_files(line)]
    with contextlib.suppress(ConfigError):
        words = split_words(text)
        is_quoted = '"' in text and join_words(words) == text.strip()  # as forms write names with blanks
        are_files = all(split_strength(word)[0].lower().endswith(WEIGHT_FILES) for word in words)
        if len(words) == 1 or is_quoted or are_files:
            return words
    return [strip_pasted(text)]


def is_number(text: str) -> bool:
    """Return whether a text is a finite number."""
    with contextlib.suppress(ValueError):
        return math.isfinite(parse_finite(text))
    return False


def weighted_file(text: str) -> tuple[str, float]:
    """Split FILE=0.8, as commands take it, into file and strength, by default 1. A file name may contain "=".

    Raises ConfigError for a strength that is no number, or that follows a colon.
    """
    text = str(pasted_path(text))
    name, separator, weight = text.rpartition("=")
    before, _, after = text.rpartition(":")
    if before.lower().endswith(WEIGHT_FILES):  # as in options
        right = f"{before}={after if is_number(after) else 0.8}"
        raise ConfigError("{text}: the strength follows an equals sign here: write {right}", text=text, right=right)
    if not separator or Path(text).exists():
        return text, 1.0
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        template = "the weight of {path} is {weight}, which is not a number: write {example}"
        raise ConfigError(template, path=name, weight=repr(weight), example=f"{name}=0.5")
    return name, number


def strength_notes(option: str, value: str | None) -> Iterator[Problem]:
    """Remark on a file at a strength of 0, which changes nothing."""
    file, strength = split_strength(value or "")
    if file and not strength:
        template = "has a strength of 0, so {file} changes nothing; write {file}:1, or leave it out"
        yield Problem(option, template, file=file)


def repeated_files(option: str, values: Iterable[str]) -> Iterator[Problem]:
    """Yield the problem of a file that is named more than once, maybe at different strengths."""
    files = [split_strength(value)[0] for value in values]
    for file in dict.fromkeys(file for file in files if files.count(file) > 1):
        yield Problem(option, "names {file} twice; name each file once", file=file)


def strength_problems(option: str, value: str | None) -> Iterator[Problem]:
    """Yield the problem of FILE:STRENGTH without a file, or with a strength after "=", out of range or no number."""
    file, strength = split_strength(value or "")
    path, _, written = file.rpartition(":")
    name, _, after = file.rpartition("=")
    if file and not file.strip(NUMERIC) and not Path(file).is_file():
        yield Problem(option, "names no file, only a strength; write FILE:0.8")
    elif name.lower().endswith(WEIGHT_FILES) and not Path(file).is_file():
        right = f"{name}:{after if is_number(after) else 0.8}"
        yield Problem(option, "takes the strength after a colon: write {right}", right=right, fix={option: right})
    elif path.lower().endswith(WEIGHT_FILES) and is_number(written):
        right = f"{path}:{written.strip()}"
        yield Problem(option, "has two strengths; write {right}", right=right, fix={option: right})
    elif path.lower().endswith(WEIGHT_FILES):
        template = "has the strength {written}, which is not a number; write {path}:0.8"
        yield Problem(option, template, written=quoted(written), path=path)
    elif abs(strength) > MAX_STRENGTH:
        yield Problem(
            option,
            "has the strength {strength}; strengths are numbers from -{most} to {most}",
            strength=f"{strength:g}",
            most=MAX_STRENGTH,
        )
