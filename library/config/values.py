"""One option, and how its value is parsed from and shown as text.

A value may come from a command line (always text), from TOML or JSON (typed, but old files hold numbers as text), or
from a form. All pass through `Option.read`, so the same rules and messages apply.
"""

import contextlib
import dataclasses
import difflib
import math
import os
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from library.config.choice_words import word_of_choice
from library.config.common_names import COMMON_NAMES, DATASET_NAMES
from library.config.hub_names import about_secret
from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_text import refuse_half_characters
from library.config.pasted import expand_home, lines_of, meant_on_drive, strip_pasted
from library.config.problems import ConfigError, Message, MessageLike, Problem, raise_if_any

TYPE_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    dict: "a table",
    tuple: "two numbers",
}
TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
CODE = re.compile(r"[^\W\d][\w-]*(?:\.[^\W\d][\w-]*)*")  # the name of a class, a module or a backend
LONGEST_CODE = 200  # maximum characters of such a name
# Names of devices, which Windows reserves in every folder, whatever ending follows.
RESERVED = re.compile(r"(con|prn|aux|nul|com[\d¹²³]|lpt[\d¹²³])(\..*)?", re.I)
WINDOWS = os.name == "nt"
ABSOLUTE_ON_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|[\\/]{2}")
FORBIDDEN_ON_WINDOWS = re.compile(r'[<>"|?*]')  # in paths; the prefix for long ones has a question mark
LONGEST_FILE_NAME, LONGEST_PATH = 255, 4000  # bytes; characters of a name on Windows
MAX_WRONG = 10  # values of one option that are named as wrong; more are counted
MAX_NUMBER = 10**12  # larger numbers have no meaning in a training, and are infinite in half precision
LIMITS = "limits"  # problem code of a number beyond its limits
# Full-width characters of East Asian keyboards, and the typographic minus sign.
WIDE_CHARACTERS = {0x3000: " ", 0x2212: "-", **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}}


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option, resolved from its field, as used by shell, TOML reader, form and docs."""

    name: str
    section: str
    type: type
    many: bool  # takes any number of values; the value is a tuple
    optional: bool  # None is a value: "not set"
    choices: tuple[Any, ...]
    open: bool  # values besides the choices are allowed
    default: Any
    hints: JsonMapping

    @property
    def help(self) -> str:
        return self.hints["help"]

    @property
    def label(self) -> str:
        return self.hints.get("label") or self.name.replace("_", " ").capitalize()

    def word(self, value: Any) -> str:
        """Return a choice in words, any other value as its text."""
        text = self.text(value)
        return word_of_choice(text, self.hints.get("words", {})) if text in map(str, self.choices) else text

    @property
    def advanced(self) -> bool:
        return bool(self.hints.get("advanced"))

    @property
    def shown_with(self) -> Mapping[str, tuple[str, ...]]:
        return self.hints.get("shown_with", {})  # another option -> its values with which this one has an effect

    @property
    def kind(self) -> str:
        return self.hints.get("kind", "")  # see `schema.opt`; "" for a plain value

    def path_in(self, value: Any) -> str:
        return split_strength(str(value))[0] if self.hints.get("weighted") else str(value)

    @property
    def expects(self) -> Message:
        """Describe the expected value in words."""
        if self.choices and not self.open:
            if len(self.choices) == 1:  # otherwise nothing is set
                return Message("{choice} or left out", choice=self.choices[0])
            return Message("one of {choices}", choices=", ".join(map(str, self.choices)))
        single = Message(TYPE_WORDS[self.type])
        if self.choices and self.type in (int, float):
            return Message("{choices} or {one}", one=single, choices=", ".join(map(str, self.choices)))
        return Message("{one}, or several", one=single) if self.many else single

    def read(self, value: Any) -> Any:
        """Parse a value of any origin into the declared type. Raises ConfigError without the option's name.

        None and "" mean "not set": returns None, an empty tuple, or the default of a text option. Spaces mean the same
        except in free text, and so does a list of nothing else (`--text_encoder_lr=`).
        """
        if isinstance(value, str) and not self.many and self.kind in ("file", "folder", "secret"):
            value = strip_pasted(value)
        items = value if self.many and isinstance(value, list | tuple) and value else [value]
        if all(map(self._is_unset, items)):
            return self._unset()
        if self.many:
            return self._read_several(self._split_items(value))
        if isinstance(value, list | tuple) and not self.hints.get("parse"):
            if len(value) != 1:
                raise ConfigError("takes one value, got {count}: {value}", count=len(value), value=quoted(value))
            return self.read(value[0])
        return self._read_one(value)

    def text(self, value: Any) -> str:
        """Return a value as one line of text that `read` parses back; "" if not set."""
        if value is None:
            return ""
        if self.many:
            return join_words(value)
        return str(value).lower() if isinstance(value, bool) else str(value)

    def _is_unset(self, value: Any) -> bool:
        is_text = self.type is str and self.kind in ("", "text") and not (self.choices or self.hints.get("parse"))
        keeps_spaces = is_text and not self.many
        return value is None or (isinstance(value, str) and not value.strip() and not (value and keeps_spaces))

    def _unset(self) -> Any:
        if self.many:
            return ()
        if self.optional:
            return None
        if self.type is str:
            return self.default
        default, fix = self.default, {self.name: self.default}
        raise ConfigError(
            Problem("", "needs {expects}; the default is {default}", expects=self.expects, default=default, fix=fix)
        )

    def _read_several(self, items: list[Any]) -> tuple[Any, ...]:
        """Parse each item. Raises ConfigError with a problem for every invalid one."""
        values, wrong = [], []
        for item in items:
            try:
                values.append(self._read_one(item))
            except ConfigError as e:
                # A fix is one value, which would replace the right ones, too.
                new_problems = [problem.replaced(fix={}) if len(items) > 1 else problem for problem in e.problems]
                wrong += [problem for problem in new_problems if problem not in wrong[:MAX_WRONG]]
        if len(wrong) > MAX_WRONG:
            more = Problem("", ": and {count} more like these", count=len(wrong) - MAX_WRONG)
            raise ConfigError(*wrong[:MAX_WRONG], more)
        raise_if_any(wrong)
        return tuple(values)

    def _split_items(self, value: Any) -> list[Any]:
        if isinstance(value, list | tuple):  # words of a command line may contain commas
            are_words = self.type in (int, float)
            if self.kind in ("file", "files", "folder"):  # no path has a line end
                value = [line for item in value for line in (lines_of(item) if isinstance(item, str) else [item])]
            parts = (self._split_items(v) if are_words and isinstance(v, str) and v.strip() else [v] for v in value)
            return [item for part in parts for item in part]
        if not isinstance(value, str):
            return [value]
        # People separate numbers by commas ("1e-4, 1e-5"); in text a comma may be part of the value (betas=0.9,0.99).
        if self.type not in (int, float):
            return self.hints.get("split", split_words)(value)
        value = value.translate(WIDE_CHARACTERS)
        if re.search(r"\d,0\d", value):  # otherwise "0,0001" would be the two numbers 0 and 1
            raise self._wrong_kind(value, _with_decimal_point(value))
        return split_words(value.replace(",", " "))

    def _read_one(self, value: Any) -> Any:
        if isinstance(value, str):
            refuse_half_characters(value, in_path=self.kind in ("file", "files", "folder"))
        if self.kind in ("file", "files", "folder"):
            value = expand_home(strip_pasted(value) if isinstance(value, str) else value)
            if isinstance(value, str) and not value.startswith("data:"):  # the thumbnail may be in the option itself
                path = self.path_in(value)
                file, _, words = path.rpartition(":")  # words in place of the strength have a message of their own
                if problem := about_secret(self.name, path):  # before any message shows the value
                    raise ConfigError(problem.replaced(option=""))
                is_strength = self.hints.get("weighted") and len(file) > 1 and not re.search(r"[\\/]", words)
                _check_path_text(file if is_strength else path)
        try:
            value = (self.hints.get("parse") or CONVERT[self.type])(value)
        except ConfigError:
            raise
        except (TypeError, ValueError, OverflowError):
            raise self._wrong_kind(value, _with_decimal_point(value) if self.type in (int, float) else "") from None
        if value is None:  # a `parse` may say that a value means "not set"
            return None
        if self.choices:
            value = self._match_choice(value)
            if value in self.choices:  # a word among numbers has no limits
                return value
        if self.kind == "code" and not (CODE.fullmatch(value := value.strip()) and len(value) <= LONGEST_CODE):
            raise ConfigError(
                "must be a name, or several joined by dots as in module.Class, got {value}", value=quoted(value)
            )
        self._check_limits(value)
        return value

    def _check_limits(self, value: Any) -> None:
        """Raise ConfigError for a number beyond min, max or ceiling."""
        low, high = self.hints.get("min"), self.hints.get("max")
        if (low is not None and value < low) or (high is not None and value > high):
            shapes = {(False, True): "at least {low}", (True, False): "at most {high}"}
            shape = shapes.get((low is None, high is None), "at least {low} and at most {high}")
            usual = self.hints.get("usual", self.default)
            fix = {self.name: usual} if low is not None and value < min(low, 0) and usual is not None else {}
            limits = Message(shape, low=low, high=high)
            template = "must be {limits}, got {value}"
            raise ConfigError(Problem("", template, fix=fix, code=LIMITS, limits=limits, value=quoted(value)))
        ceiling = self.hints.get("ceiling", MAX_NUMBER if self.type is float else None)
        if ceiling is not None and value > ceiling:
            raise ConfigError("must be at most {ceiling}, got {value}", ceiling=f"{ceiling:,}", value=quoted(value))

    def _match_choice(self, value: Any) -> Any:
        value = value.strip() if isinstance(value, str) else value
        for choice in self.choices:
            if value == choice or (isinstance(value, str) and value.casefold() == str(choice).casefold()):
                return choice
        if self.open:
            return value
        raise self._wrong_kind(value, closest(str(value), map(str, self.choices)))

    def _wrong_kind(self, value: Any, suggestion: str = "") -> ConfigError:
        """Return the error about a value of the wrong kind; `suggestion` is the probable intention."""
        hint = Message(" (did you mean {name}?)", name=suggestion) if suggestion else ""
        fix = {self.name: suggestion} if suggestion else {}
        template = "must be {expects}, got {value}{hint}"
        return ConfigError(Problem("", template, fix=fix, expects=self.expects, value=quoted(value), hint=hint))


def to_bool(value: Any) -> bool:
    """Parse True, False, 0, 1 and the usual words."""
    word = str(value).strip().casefold()
    if isinstance(value, bool | int | str) and word in TRUE + FALSE:
        return word in TRUE
    raise ValueError(value)


def parse_finite(value: Any) -> float:
    """Parse a finite number, possibly text ("5e-5"). Infinity and NaN are invalid for every option."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(value)
    result = float(value.translate(WIDE_CHARACTERS) if isinstance(value, str) else value)
    if not math.isfinite(result):
        raise ValueError(value)
    return result


def to_int(value: Any) -> int:
    """Parse an integer, possibly text or 1600.0."""
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value):
        return int(value)  # exact for any length, unlike float
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    result = parse_finite(value)
    if not result.is_integer():
        raise ValueError(value)
    return int(result)


def to_str(value: Any) -> str:
    """Return text; a bare number of a TOML file becomes its digits."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Path):
        raise ValueError(value)
    return str(value)


def split_strength(text: str) -> tuple[str, float]:
    """Split FILE:0.8 into the file and its strength, by default 1."""
    path, colon, number = text.rpartition(":")
    with contextlib.suppress(ValueError):
        return (path, parse_finite(number)) if colon and path else (text, 1.0)
    return text, 1.0  # the colon is part of the name, as in C:\lora.safetensors


def _check_path_text(path: str) -> None:
    """Raise ConfigError for what no disk has as a path, which asking the disk would answer with an exception."""
    if re.search(r"[\x00-\x1f]", path):  # "D:\train" of a TOML holds a tab
        template = "has a character that no path can have, {value}: in double quotes write \\\\ for \\"
        raise ConfigError(template, value=quoted(path))
    if WINDOWS and "://" not in path and (sign := _sign_forbidden_on_windows(path.removeprefix("\\\\?\\"))):
        if sign == '"':  # programs take the backslash of "D:\images\" for a part of the word, and the quote as well
            template = 'has a quote in it, {value}: write "D:\\images" in a shell, without a backslash at its end'
            raise ConfigError(template, value=quoted(path))
        raise ConfigError(
            "has {sign}, which Windows does not allow in paths, got {value}", sign=sign, value=quoted(path)
        )
    if meant := meant_on_drive(path):
        raise ConfigError("has no backslash after the drive, {value}: write {meant}", value=quoted(path), meant=meant)
    names = path.replace("\\", "/").split("/")
    if max(map(name_length, names)) > LONGEST_FILE_NAME or len(path.encode(errors="surrogatepass")) > LONGEST_PATH:
        template = "is too long for a path: no name in it may have more than {most} bytes, got {value}"
        raise ConfigError(template, most=LONGEST_FILE_NAME, value=quoted(path))


def _sign_forbidden_on_windows(path: str) -> str:
    if forbidden := FORBIDDEN_ON_WINDOWS.search(path):
        return forbidden[0]
    # A file whose name has a colon would be written into a hidden stream of another one. "a:b" may be no path.
    return ":" if ABSOLUTE_ON_WINDOWS.match(path) and ":" in path[2:] else ""


def name_length(name: str) -> int:
    """Return the length of a file name as disks count it: in UTF-16 on Windows, elsewhere in bytes."""
    return len(name.encode("utf-16-le", "surrogatepass")) // 2 if WINDOWS else len(name.encode(errors="surrogatepass"))


def to_table(value: Any) -> JsonObject:
    """Return a mapping as a table. Raises ValueError for anything else."""
    if not isinstance(value, Mapping):
        raise ValueError(value)
    return dict(value)


CONVERT: dict[type, Callable[[Any], Any]] = {
    bool: to_bool,
    int: to_int,
    float: parse_finite,
    str: to_str,
    Path: lambda value: Path(to_str(value)),
    dict: to_table,
}


def quoted(value: Any) -> str:
    """Return a value as messages show it: text in quotes, at most 80 characters."""
    text = str(value)
    if isinstance(value, str | Path):  # repr would write the backslashes of Windows' paths twice
        text = repr(text).replace("\\\\", "\\") if text.isprintable() else repr(text)
    return text if len(text) <= 80 else text[:77] + "..."


def closest(name: str, candidates: Any) -> str:
    """Return the candidate that an unknown name probably meant, or ""."""
    names, written = {k.casefold(): k for k in candidates}, name.strip("-").replace("-", "_").casefold()
    for common in (COMMON_NAMES, DATASET_NAMES):
        if common.get(written) in names:
            return names[common[written]]
    close = difflib.get_close_matches(written, names, n=1, cutoff=0.6)
    return names[close[0]] if close else ""


def did_you_mean(name: str, candidates: Any) -> MessageLike:
    """Return a hint with the candidate as it has to be written, not as a field of the page calls it."""
    close = closest(name, candidates)
    return Message(" (did you mean {key}?)", key=close) if close else ""


def _with_decimal_point(value: Any) -> str:
    """Return a number with a decimal comma as probably meant, 0.5 for 0,5; "" if unclear."""
    if not isinstance(value, str) or "," not in value:
        return ""
    grouped = re.fullmatch(r"\s*[+-]?[1-9]\d{0,2}(,\d{3})+\s*", value)
    meant = value.strip().replace(",", "" if grouped else ".")
    with contextlib.suppress(ValueError):
        parse_finite(meant)
        return meant
    return ""


def split_words(text: str) -> list[str]:
    """Split text at whitespace outside quotes."""
    # A backslash is an ordinary character, as Windows paths need.
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""
    try:
        return list(lexer)
    except ValueError:
        raise ConfigError("has a quote that is never closed: {text}", text=quoted(text)) from None


def join_words(items: Any) -> str:
    # `split_words` splits them again.
    return " ".join(_quoted(str(item)) for item in items)


def _quoted(item: str) -> str:
    if item and not re.search(r"[\s\"']", item):
        return item
    if '"' not in item:
        return f'"{item}"'
    return "'\"'".join(f'"{part}"' if part else "" for part in item.split('"'))
