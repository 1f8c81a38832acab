"""Messages and problems as values: what people read of a training, made where the rule is.

A message keeps the template, by which it is translated, and what was put into it; it becomes text where somebody reads
it. A problem carries what a form needs as well: the option that it is about, and the values that would mend it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from library.config.json_types import JsonMapping, JsonObject

__all__ = [
    "FLAG",
    "ConfigError",
    "MessageLike",
    "Problem",
    "Report",
    "Message",
    "counted",
    "either",
    "listed",
    "message_of_json",
    "ngettext",
    "option_name",
    "option_names",
    "option_values",
    "problems_of",
    "read",
    "together",
]
FLAG = "--"  # the place of an option of a command line
# What names of options have in them, or are; other names are words as well (kohya_gui/i18n/labels.js).
NAMED = re.compile(r"\w_\w|\b(?:fsdp|sdpa|xformers|lowram|highvram|t5xxl|qwen3)\b")
SURROGATES = re.compile("[\ud800-\udfff]")
FIELD = re.compile(r"\{\{|\}\}|\{([^\W\d]\w*)\}|([{}])")  # doubled braces, a plain field, and a brace that is neither
FACTS = ("also", "fix", "place", "topic", "code")  # of a problem, besides its option and its text


def printable(value: Any) -> str:
    """A value as text that any file, terminal or browser takes: bytes of file names that are not UTF-8, which Python
    keeps as surrogates, are shown as \\xe9."""
    return SURROGATES.sub(_byte, str(value))


def _byte(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


class Message:
    """A sentence for people, as a value: a `template`, the key of its translations, and `arguments`, which may be
    messages as well. It becomes text where somebody reads it: `str()` gives English.

    `plural` is the template for any `count` but one, as in gettext; "": there is no such form.
    """

    __slots__ = ("arguments", "plural", "template")
    template: str
    arguments: Mapping[str, "str | Message"]
    plural: str

    def __init__(self, template: str, /, **arguments: Any) -> None:
        """`{name}` in the template stands for the argument of that name; without arguments braces mean nothing."""
        filled = {name: value if isinstance(value, Message) else printable(value) for name, value in arguments.items()}
        self._set(template=template, arguments=MappingProxyType(filled), plural="")

    def _set(self, **facts: Any) -> None:
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is a value; make another one instead of changing its {name}")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __str__(self) -> str:
        return self._filled(self.template)

    def _filled(self, template: str) -> str:
        shown = self.plural if self.plural and self.arguments.get("count") != "1" else template
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
        """What makes two of them equal."""
        return (self.template, *sorted(self.arguments.items(), key=itemgetter(0)), self.plural)

    def as_json(self) -> JsonObject:
        """The text, its template and its arguments, for another process or a browser."""
        inner = {
            name: value.as_json() if isinstance(value, Message) else value for name, value in self.arguments.items()
        }
        plural = {"plural": self.plural} if self.plural else {}
        return {"text": str(self), "template": self.template, **plural, "arguments": inner}

    def changed(self, change: Callable[[str], str]) -> "Message":
        """The same with what was put into it changed; one without arguments is changed whole."""
        return self._with(*self._changed(change))

    def _changed(self, change: Callable[[str], str]) -> "tuple[dict[str, str | Message], str]":
        def inner(value: str | Message) -> str | Message:
            return value.changed(change) if isinstance(value, Message) else change(value)

        arguments = {name: inner(value) for name, value in self.arguments.items()}
        return arguments, self.template if arguments else change(self.template)

    def capitalized(self) -> "Message":
        """The same with a capital letter in front, which languages without them need no line of their own for; a name
        that was put in front stays as it is."""
        first = re.match(r"\{(\w+)\}", self.template)
        if first and (inner := self.arguments.get(first[1])) is not None:
            return self._with({first[1]: inner.capitalized()}) if isinstance(inner, Message) else self
        return self._with({}, self.template[:1].upper() + self.template[1:])

    def _with(self, arguments: "Mapping[str, str | Message]", template: str | None = None) -> "Message":
        made = Message(self.template if template is None else template, **{**self.arguments, **arguments})
        made._set(plural=self.plural)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return message_of_json, (self.as_json(),)


class Problem(Message):
    """A sentence about an option, or about something else where `option` is "".

    `also` are the other options whose values the rule reads; `fix` are values by option name that would mend it;
    `place` stands before the option's name where it was not set in a form ("--", "in cat.toml: "); `topic` is said
    where no option tells it; `code` is for programs that treat this very problem in a way of its own.
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
        """The sentence is the option and the template, which begins with ":" where a colon follows the option.

        `also` may be written as names with blanks between.
        """
        place = arguments.pop("place", "")
        super().__init__(template, **arguments)
        self._set(option=option, place=place, topic=topic, code=code, fix=dict(fix))
        self._set(also=frozenset(also.split() if isinstance(also, str) else also))

    def __str__(self) -> str:
        blank = " " if self.option and not self.template.startswith(":") else ""
        return f"{self.place}{self.option}{blank}{super().__str__()}"

    @property
    def _parts(self) -> tuple[Any, ...]:
        """The sentence and its option; another fix makes no other problem."""
        return (*super()._parts, self.option, self.place)

    @property
    def options(self) -> frozenset[str]:
        """All options that it depends on."""
        return self.also | {self.option} if self.option else self.also

    @property
    def about(self) -> Message:
        """The sentence as it stands below a field: without the option in front, where it is a whole one without it."""
        if self.option and self.template.startswith(("and ", "=", "(")):
            return self.replaced(place="")
        return Message(self.template.removeprefix(":").lstrip(), **self.arguments)

    def capitalized(self) -> Message:
        """As of any text; the name of an option stays as it is written."""
        return self if self.option else self.replaced(template=super().capitalized().template)

    def changed(self, change: Callable[[str], str]) -> "Problem":
        """As of any text."""
        arguments, template = self._changed(change)
        return self.replaced(template=template, **arguments)

    def replaced(self, **changes: Any) -> "Problem":
        """The same with another option, place or fix."""
        facts = {name: getattr(self, name) for name in FACTS}
        given: dict[str, Any] = {"option": self.option, "template": self.template, **facts, **self.arguments}
        return Problem(**given | changes)

    def as_json(self) -> JsonObject:
        """All of it, for another process; `read` makes a problem of it again."""
        facts = {name: getattr(self, name) for name in FACTS}
        return {**super().as_json(), "option": self.option, **facts, "also": sorted(self.also)}


class OptionName(Message):
    """The name of an option as an argument of a text. A form shows the label of the option's field instead."""

    __slots__ = ()

    def as_json(self) -> JsonObject:
        """As of any text, and that it is a name."""
        return {**super().as_json(), "isOption": True}

    def changed(self, change: Callable[[str], str]) -> "Message":
        """A name stays as it is."""
        return self

    def capitalized(self) -> "Message":
        """A name stays as it is."""
        return self


def option_name(name: str) -> OptionName:
    """The name of an option where it is an argument of a text."""
    return OptionName(name)


def option_names(names: Iterable[str]) -> Message:
    """The names of options, one after the other."""
    return listed([*map(option_name, names)])


def option_values(shown: Mapping[str, str]) -> Message:
    """Options with their values as text: "a = 1, b = true"."""
    template = "{option} = {value}"
    return listed([Message(template, option=option_name(name), value=value) for name, value in shown.items()])


MessageLike = str | Message  # plain text of the user's or of another program, or a sentence of ours


def counted(count: int, noun: str) -> Message:
    """Things and how many there are: 1 image, 2 images."""
    return ngettext(f"{{count}} {noun}", f"{{count}} {noun}s", count)


def ngettext(template: str, plural: str, count: int, **arguments: Any) -> Message:
    """A sentence about so many things, as gettext has it: one template for one of them, and one for more or none."""
    made = Message(template, count=f"{count:,}", **arguments)
    made._set(plural=plural)
    return made


def listed(texts: Sequence[MessageLike], between: str = ", ") -> Message:
    """Texts as one, with a sign between."""
    template = between.join(f"{{part{at}}}" for at in range(len(texts)))
    return Message(template, **{f"part{at}": text for at, text in enumerate(texts)})


def either(names: Iterable[MessageLike]) -> MessageLike:
    """Names as a choice of one: "a", "a or b", "a, b or c"."""
    *first, last = [*names] or [""]
    return Message("{first} or {last}", first=listed(first), last=last) if first else last


def together(names: Iterable[MessageLike]) -> MessageLike:
    """Names that belong together: "a", "a and b", "a, b and c"."""
    *first, last = [*names] or [""]
    return Message("{first} and {last}", first=listed(first), last=last) if first else last


Report = Callable[[Message, int, int], None]  # what is done now, how much of how much; it may raise to end the work


def read(sent: JsonMapping) -> Problem:
    """What `Problem.as_json` wrote -> the problem."""
    return Problem(**{name: sent[name] for name in ("option", "template", *FACTS)}, **_arguments(sent))


def _arguments(sent: JsonMapping) -> JsonObject:
    return {name: message_of_json(one) if isinstance(one, dict) else one for name, one in sent["arguments"].items()}


def message_of_json(sent: JsonMapping) -> Message:
    """What `as_json` of a message, a problem or an option's name wrote -> the same again."""
    if "option" in sent:
        return read(sent)
    if sent.get("isOption"):
        return OptionName(sent["template"])
    made = Message(sent["template"], **_arguments(sent))
    made._set(plural=sent.get("plural", ""))
    return made


class ConfigError(ValueError):
    """Everything the user must fix: `problems`. As text it is one line for each."""

    def __init__(self, *problems: MessageLike, **arguments: Any) -> None:
        """Problems, or one template with its arguments."""
        self.problems = [Problem("", str(problems[0]), **arguments)] if arguments else [*problems_of(problems)]
        super().__init__("\n".join(map(str, self.problems)))

    @property
    def said(self) -> Message:
        """What it says, which can be translated: its problem, or a line for each."""
        return self.problems[0] if len(self.problems) == 1 else listed(self.problems, "\n")


def problems_of(texts: Iterable[MessageLike]) -> Iterator[Problem]:
    """Problems as they are, messages as problems, and of plain texts a problem for each line.

    A message with a plural, or with an argument that is named like a fact of problems, becomes the argument of one.
    """
    for text in texts:
        if isinstance(text, Problem):
            yield text
        elif isinstance(text, Message):
            is_plain = not (text.plural or text.arguments.keys() & {"option", "template", *FACTS})
            arguments: dict[str, Any] = {**text.arguments} if is_plain else {"said": text}
            yield Problem("", text.template if is_plain else "{said}", **arguments)
        else:
            yield from (Problem("", line) for line in text.splitlines() or [""])
