"""Messages and problems as values, created by the rule that reports them.

A message keeps its template, which is the key of its translations, and its arguments; it becomes text where it is
shown. A problem also carries what a form needs: its option, and values that would fix it.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, TypeVar

from library.config.json_types import JsonMapping, JsonObject

T = TypeVar("T")
FLAG = "--"  # the place of an option of a command line
# Marks of option names; other names are also words (kohya_gui/i18n/labels.js).
NAMED = re.compile(r"\w_\w|\b(?:fsdp|sdpa|xformers|lowram|highvram|t5xxl|qwen3)\b")
SURROGATES = re.compile("[\ud800-\udfff]")
# Characters that a terminal or a browser obeys instead of showing them: control characters, whole escape sequences of
# terminals begin with one, and those that turn the direction of all text after them.
OBEYED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")
FIELD = re.compile(r"\{\{|\}\}|\{([^\W\d]\w*)\}|([{}])")  # doubled braces, a plain field, and a brace that is neither
FAILS_AGAIN = "again"  # code of an error of a training that the same settings are likely to cause again
PROBLEM_FACTS = ("also", "fix", "place", "topic", "code")  # of a problem, besides its option and its text


def printable_text(value: Any) -> str:
    """Return text for people, with characters that are not to be shown as escapes: names of files may hold any.

    Python keeps bytes of file names that are not UTF-8 as surrogates, which no file or browser takes: show \\xe9.
    """
    text = str(value)
    return text if text.isprintable() else OBEYED.sub(_escape, text)


def one_line(value: Any) -> str:
    """Return printable text in one line: a line end in a name would imitate a line of its own."""
    return re.sub("[\t\n\r]", _escape, printable_text(value))


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    code -= 0xDC00 if 0xDC80 <= code <= 0xDCFF else 0
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _as_argument(value: Any) -> "str | Message":
    if isinstance(value, ConfigError):  # as a text its sentences would stay English
        return value.said
    if isinstance(value, PurePath):
        return one_line(value)
    return value if isinstance(value, Message) else printable_text(value)


class Message:
    """A sentence for people, as a value: a `template`, the key of its translations, and `arguments`, which may be
    messages, too. `str()` renders it in English.

    `plural` is the template for any `count` but one, as in gettext; "" for none.
    """

    __slots__ = ("arguments", "plural", "template")
    template: str
    arguments: Mapping[str, "str | Message"]
    plural: str

    def __init__(self, template: str, /, **arguments: Any) -> None:
        filled = {name: _as_argument(value) for name, value in arguments.items()}
        self._set(template=template, arguments=MappingProxyType(filled), plural="")

    def _set(self, **facts: Any) -> None:
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is a value; make another one instead of changing its {name}")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __str__(self) -> str:
        shown = self.plural if self.plural and self.arguments.get("count") != "1" else self.template
        return shown.format_map(self.arguments) if self.arguments else shown

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {str(self)!r}>"

    def __bool__(self) -> bool:
        return bool(self.template)

    def __eq__(self, other: object) -> bool:
        return self._parts == other._parts if isinstance(other, Message) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._parts)

    @property
    def _parts(self) -> tuple[Any, ...]:
        return (self.template, *sorted(self.arguments.items(), key=itemgetter(0)), self.plural)

    def as_json(self) -> JsonObject:
        """Return text, template and arguments, for another process or a browser."""
        inner = {
            name: value.as_json() if isinstance(value, Message) else value for name, value in self.arguments.items()
        }
        plural = {"plural": self.plural} if self.plural else {}
        return {"text": str(self), "template": self.template, **plural, "arguments": inner}

    def changed(self, change: Callable[[str], str]) -> "Message":
        return self._with(*self._changed(change))

    def _changed(self, change: Callable[[str], str]) -> "tuple[dict[str, str | Message], str]":
        def inner(value: str | Message) -> str | Message:
            return value.changed(change) if isinstance(value, Message) else change(value)

        arguments = {name: inner(value) for name, value in self.arguments.items()}
        return arguments, self.template if arguments else change(self.template)

    def capitalized(self) -> "Message":
        """Return the message with a leading capital; an argument or a name at the start stays."""
        # Languages without capitals then need no separate translation.
        first = re.match(r"\{(\w+)\}", self.template)
        if first and (inner := self.arguments.get(first[1])) is not None:
            return self._with({first[1]: inner.capitalized()}) if isinstance(inner, Message) else self
        is_name = re.match(r"\S*\w[._/\\]\w", self.template)  # flux_train.toml
        return self if is_name else self._with({}, self.template[:1].upper() + self.template[1:])

    def _with(self, arguments: "Mapping[str, str | Message]", template: str | None = None) -> "Message":
        message = Message(self.template if template is None else template, **{**self.arguments, **arguments})
        message._set(plural=self.plural)
        return message

    def __reduce__(self) -> tuple[Any, ...]:
        return message_of_json, (self.as_json(),)


class Problem(Message):
    """A sentence about an option, or about something else if `option` is "".

    `also` are other options that the rule reads; `fix` are values by option name that would solve it; `place` precedes
    the option's name if it was not set in a form ("--", "in cat.toml: "); `topic` is set if no option implies it;
    `code` lets programs treat this problem specially.
    """

    __slots__ = ("also", "code", "fix", "option", "place", "topic")
    option: str
    also: frozenset[str]
    fix: JsonMapping
    place: str
    topic: str
    code: str

    def __init__(
        self,
        option: str,
        template: str,
        *,
        also: str | Iterable[str] = (),
        fix: Mapping[str, Any] = {},
        topic: str = "",
        code: str = "",
        **arguments: Any,
    ) -> None:
        """The sentence is the option and the template, which begins with ":" if a colon follows the option.

        `also` may be given as space-separated names.
        """
        place = arguments.pop("place", "")
        super().__init__(template, **arguments)
        self._set(option=option, place=place, topic=topic, code=code, fix=dict(fix))
        self._set(also=frozenset(also.split() if isinstance(also, str) else also))

    def __str__(self) -> str:
        blank = " " if self.option and not self.template.startswith(":") else ""
        return f"{printable_text(self.place + self.option)}{blank}{super().__str__()}"

    @property
    def _parts(self) -> tuple[Any, ...]:
        return (*super()._parts, self.option, self.place)

    @property
    def options(self) -> frozenset[str]:
        return self.also | {self.option} if self.option else self.also

    @property
    def about(self) -> Message:
        """The sentence as shown below a field: without the option at the start, if it is complete without it."""
        if self.option and self.template.startswith(("and ", "=", "(")):
            return self.replaced(place="")
        return Message(self.template.removeprefix(":").lstrip(), **self.arguments)

    def capitalized(self) -> Message:
        return self if self.option else self.replaced(template=super().capitalized().template)

    def changed(self, change: Callable[[str], str]) -> "Problem":
        arguments, template = self._changed(change)
        return self.replaced(template=template, **arguments)

    def replaced(self, **changes: Any) -> "Problem":
        """Return a copy with another option, place or fix."""
        facts = {name: getattr(self, name) for name in PROBLEM_FACTS}
        arguments: dict[str, Any] = {"option": self.option, "template": self.template, **facts, **self.arguments}
        return Problem(**arguments | changes)

    def as_json(self) -> JsonObject:
        facts = {name: getattr(self, name) for name in PROBLEM_FACTS}
        return {**super().as_json(), "option": self.option, **facts, "also": sorted(self.also)}


class OptionName(Message):
    """The name of an option as an argument of a message. A form shows its field's label instead."""

    __slots__ = ()

    def as_json(self) -> JsonObject:
        return {**super().as_json(), "isOption": True}

    def changed(self, change: Callable[[str], str]) -> "Message":
        return self

    def capitalized(self) -> "Message":
        return self


def option_name(name: str) -> OptionName:
    return OptionName(name)


def option_names(names: Iterable[str]) -> Message:
    return join_messages([*map(option_name, names)])


def option_values(values: Mapping[str, str]) -> Message:
    template = "{option} = {value}"
    return join_messages([Message(template, option=option_name(name), value=value) for name, value in values.items()])


def with_labels(message: Message, labels: Mapping[str, str]) -> Message:
    """Return a message in which options are called by their labels, as in a form of their own."""
    if isinstance(message, OptionName):
        return Message(labels.get(message.template, message.template))
    inner = {
        name: with_labels(value, labels) for name, value in message.arguments.items() if isinstance(value, Message)
    }
    if isinstance(message, Problem):
        return message.replaced(**inner)
    return message._with(inner) if inner else message


def without_flags(message: "MessageLike") -> "MessageLike":
    """Return a message whose options are not written as flags, for readers of a form. Plain text stays."""
    if not isinstance(message, Message):
        return message
    inner = {name: without_flags(value) for name, value in message.arguments.items() if isinstance(value, Message)}
    if isinstance(message, Problem):
        return message.replaced(place="" if message.place == FLAG else message.place, **inner)
    return message._with(inner) if inner else message


MessageLike = str | Message  # plain text from the user or another program, or a sentence of ours


def counted(count: int, noun: str) -> Message:
    return ngettext(f"{{count}} {noun}", f"{{count}} {noun}s", count)


def ngettext(template: str, plural: str, count: int, **arguments: Any) -> Message:
    """Return a sentence about a number of things, with a singular and a plural template, as in gettext."""
    message = Message(template, count=f"{count:,}", **arguments)
    message._set(plural=plural)
    return message


def join_messages(texts: Sequence[MessageLike], between: str = ", ") -> Message:
    template = between.join(f"{{part{at}}}" for at in range(len(texts)))
    return Message(template, **{f"part{at}": text for at, text in enumerate(texts)})


def either(names: Iterable[MessageLike]) -> MessageLike:
    *first, last = [*names] or [""]
    return Message("{first} or {last}", first=join_messages(first), last=last) if first else last


def together(names: Iterable[MessageLike]) -> MessageLike:
    *first, last = [*names] or [""]
    return Message("{first} and {last}", first=join_messages(first), last=last) if first else last


Report = Callable[[Message, int, int], None]  # current work, done, total; may raise to end the work


def problem_from_json(sent: JsonMapping) -> Problem:
    """Return the problem that `Problem.as_json` wrote."""
    return Problem(
        **{name: sent[name] for name in ("option", "template", *PROBLEM_FACTS)}, **_arguments_from_json(sent)
    )


def _arguments_from_json(sent: JsonMapping) -> JsonObject:
    return {
        name: message_of_json(value) if isinstance(value, dict) else value for name, value in sent["arguments"].items()
    }


def message_of_json(sent: JsonMapping) -> Message:
    """Return the message, problem or option name that `as_json` wrote."""
    if "option" in sent:
        return problem_from_json(sent)
    if sent.get("isOption"):
        return OptionName(sent["template"])
    message = Message(sent["template"], **_arguments_from_json(sent))
    message._set(plural=sent.get("plural", ""))
    return message


class ConfigError(ValueError):
    """Everything the user must fix, in `problems`. As text it has a line for each."""

    def __init__(self, *problems: MessageLike, **arguments: Any) -> None:
        self.problems = [Problem("", str(problems[0]), **arguments)] if arguments else [*as_problems(problems)]
        super().__init__("\n".join(map(str, self.problems)))

    @property
    def said(self) -> Message:
        return self.problems[0] if len(self.problems) == 1 else join_messages(self.problems, "\n")


@contextlib.contextmanager
def collecting(problems: list[Problem]) -> Iterator[None]:
    """Add the problems of a ConfigError within this context to others, so that all are named at once."""
    try:
        yield
    except ConfigError as e:
        problems += e.problems


def raise_if_any(problems: Iterable[MessageLike]) -> None:
    """Raise one ConfigError with all of the problems, if there are any."""
    if all_problems := [*problems]:
        raise ConfigError(*all_problems)


def attempted(problems: list[Problem], make: Callable[[], T]) -> T | None:
    """Return what `make` returns; None, and its problems among the others, if it raises ConfigError."""
    with collecting(problems):
        return make()
    return None


def require_choice(name: MessageLike, value: Any, choices: Iterable[Any]) -> None:
    """Raise ConfigError for a value that is not one of the choices."""
    if value not in (choices := tuple(choices)):
        template = "{name} is {value}: use one of {choices}"
        raise ConfigError(template, name=name, value=repr(value), choices=", ".join(map(str, choices)))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; the name of its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def as_message(text: MessageLike) -> Message:
    return text if isinstance(text, Message) else Message(text)


def as_problems(texts: Iterable[MessageLike]) -> Iterator[Problem]:
    """Convert texts to problems: messages become one each, plain texts one per line.

    A message with a plural, or with an argument named like a fact of problems, becomes the argument of one.
    """
    for text in texts:
        if isinstance(text, Problem):
            yield text
        elif isinstance(text, Message):
            is_plain = not (text.plural or text.arguments.keys() & {"option", "template", *PROBLEM_FACTS})
            arguments: dict[str, Any] = {**text.arguments} if is_plain else {"said": text}
            yield Problem("", text.template if is_plain else "{said}", **arguments)
        else:
            yield from (Problem("", line) for line in text.splitlines() or [""])
