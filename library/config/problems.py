"""Problems as values: what is wrong with a training, or worth knowing about it, made where the rule is.

A problem is a sentence, so that it can be printed and compared like any text; and it carries what a form needs besides:
the option that it is about, the values that would mend it, and the template and arguments that it was made of, by which
it is translated. Nobody has to take sentences apart.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from library.config.json_types import JsonMapping, JsonObject

__all__ = [
    "FLAG",
    "ConfigError",
    "Problem",
    "Report",
    "Text",
    "counted",
    "either",
    "how_made",
    "listed",
    "locate_texts",
    "option_name",
    "option_names",
    "option_values",
    "problems_of",
    "read",
    "restored",
    "together",
]
FLAG = "--"  # the place of an option of a command line
# What names of options have in them, or are; other names are words as well (kohya_gui/i18n/labels.js).
NAMED = re.compile(r"\w_\w|\b(?:fsdp|sdpa|xformers|lowram|highvram|t5xxl|qwen3)\b")
SURROGATES = re.compile("[\ud800-\udfff]")
FACTS = ("also", "fix", "place", "topic", "code")  # of a problem, besides its option and its text


def printable(value: Any) -> str:
    """A value as text that any file, terminal or browser takes: bytes of file names that are not UTF-8, which Python
    keeps as surrogates, are shown as \\xe9."""
    return SURROGATES.sub(_byte, str(value))


def _byte(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


class Text(str):
    """A text made of a `template`, the key of its translations, and of `arguments`, which may be such texts too."""

    __slots__ = ("arguments", "template")
    template: str
    arguments: Mapping[str, str]

    def __new__(cls, template: str, **arguments: Any) -> Self:
        """`{name}` in the template stands for the argument of that name; without arguments braces mean nothing."""
        return cls._made(template, template, arguments)

    @classmethod
    def _made(cls, shape: str, template: str, arguments: JsonMapping) -> Self:
        filled = {name: value if isinstance(value, Text) else printable(value) for name, value in arguments.items()}
        made = super().__new__(cls, shape.format_map(filled) if filled else shape)
        made.template, made.arguments = template, filled
        return made

    def as_json(self) -> JsonObject:
        """The text, its template and its arguments, for another process or a browser."""
        inner = {name: value.as_json() if isinstance(value, Text) else value for name, value in self.arguments.items()}
        return {"text": str(self), "template": self.template, "arguments": inner}

    def changed(self, change: Callable[[str], str]) -> "Text":
        """The same with what was put into it changed; a text without arguments is changed whole."""
        if not self.arguments:
            return Text(change(str(self)))
        return Text(self.template, **{name: change(value) for name, value in self.arguments.items()})

    def capitalized(self) -> "Text":
        """The same with a capital letter in front, which languages without them need no line of their own for; a name
        that was put in front stays as it is."""
        first = re.match(r"\{(\w+)\}", self.template)
        if first and first[1] in self.arguments and not isinstance(self.arguments[first[1]], Text):
            return self
        made = str.__new__(Text, self[:1].upper() + self[1:])
        made.template, made.arguments = self.template, self.arguments
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _text, (self.as_json(),)


class Problem(Text):
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

    def __new__(cls, option: str, template: str, *, also: str | Iterable[str] = (), fix: Mapping[str, Any] = {},
                topic: str = "", code: str = "", **arguments: Any) -> Self:  # fmt: skip
        """The sentence is the option and the template, which begins with ":" where a colon follows the option.

        `also` may be written as names with blanks between.
        """
        place = arguments.pop("place", "")
        head = f"{place}{option}{' ' if option and not template.startswith(':') else ''}"
        escaped = head.replace("{", "{{").replace("}", "}}") if arguments else head
        made = cls._made(escaped + template, template, arguments)
        made.option, made.place, made.topic, made.code = option, place, topic, code
        made.also = frozenset(also.split() if isinstance(also, str) else also)
        made.fix = dict(fix)
        return made

    @property
    def options(self) -> frozenset[str]:
        """All options that it depends on."""
        return self.also | {self.option} if self.option else self.also

    @property
    def about(self) -> Text:
        """The sentence as it stands below a field: without the option in front, where it is a whole one without it."""
        if self.option and self.template.startswith(("and ", "=", "(")):
            return self.replaced(place="")
        return Text(self.template.removeprefix(":").lstrip(), **self.arguments)

    def capitalized(self) -> Text:
        """As of any text; the name of an option stays as it is written."""
        return self if self.option else super().capitalized()

    def changed(self, change: Callable[[str], str]) -> "Problem":
        """As of any text."""
        arguments = {name: change(value) for name, value in self.arguments.items()}
        return self.replaced(**arguments) if arguments else self.replaced(template=change(self.template))

    def replaced(self, **changes: Any) -> "Problem":
        """The same with another option, place or fix."""
        facts = {name: getattr(self, name) for name in FACTS}
        given: dict[str, Any] = {"option": self.option, "template": self.template, **facts, **self.arguments}
        return Problem(**given | changes)

    def as_json(self) -> JsonObject:
        """All of it, for another process; `read` makes a problem of it again."""
        facts = {name: getattr(self, name) for name in FACTS}
        return {**super().as_json(), "option": self.option, **facts, "also": sorted(self.also)}


class OptionName(Text):
    """The name of an option as an argument of a text. A form shows the label of the option's field instead."""

    __slots__ = ()

    def as_json(self) -> JsonObject:
        """As of any text, and that it is a name."""
        return {**super().as_json(), "isOption": True}

    def changed(self, change: Callable[[str], str]) -> "Text":
        """A name stays as it is."""
        return self

    def capitalized(self) -> "Text":
        """A name stays as it is."""
        return self


def option_name(name: str) -> OptionName:
    """The name of an option where it is an argument of a text."""
    return OptionName(name)


def option_names(names: Iterable[str]) -> Text:
    """The names of options, one after the other."""
    return listed([*map(option_name, names)])


def option_values(shown: Mapping[str, str]) -> Text:
    """Options with their values as text: "a = 1, b = true"."""
    template = "{option} = {value}"
    return listed([Text(template, option=option_name(name), value=value) for name, value in shown.items()])


def counted(count: int, noun: str) -> Text:
    """Things and how many there are: 1 image, 2 images."""
    return Text("{count} " + noun + ("" if count == 1 else "s"), count=count)


def listed(texts: Sequence[str], between: str = ", ") -> Text:
    """Texts as one, with a sign between."""
    template = between.join(f"{{part{at}}}" for at in range(len(texts)))
    return Text(template, **{f"part{at}": text for at, text in enumerate(texts)})


def either(names: Iterable[str]) -> str:
    """Names as a choice of one: "a", "a or b", "a, b or c"."""
    *first, last = [*names] or [""]
    return Text("{first} or {last}", first=listed(first), last=last) if first else last


def together(names: Iterable[str]) -> str:
    """Names that belong together: "a", "a and b", "a, b and c"."""
    *first, last = [*names] or [""]
    return Text("{first} and {last}", first=listed(first), last=last) if first else last


Report = Callable[[Text, int, int], None]  # what is done now, how much of how much; it may raise to end the work


def how_made(found: Any) -> Iterator[JsonObject]:
    """How the texts among some values were made, of those that are not their template as it stands or name options."""
    if isinstance(found, Text):
        if found.arguments or found != found.template or NAMED.search(found):
            yield found.as_json()
        if "\n" in found:  # each line is shown by itself
            yield from how_made(found.arguments)
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from how_made(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from how_made(value)


def locate_texts(found: Any, at: tuple[str | int, ...] = ()) -> Iterator[JsonObject]:
    """How the texts among some values were made, as `how_made` has it, with the names and numbers that lead to each
    (`at`): the same words elsewhere, such as a caption of the user's, are no text of ours."""
    if isinstance(found, Text):
        if found.arguments or found != found.template:
            yield {**found.as_json(), "at": list(at)}
    elif isinstance(found, Mapping):
        for name, value in found.items():
            yield from locate_texts(value, (*at, str(name)))
    elif isinstance(found, list | tuple):
        for number, value in enumerate(found):
            yield from locate_texts(value, (*at, number))


def restored(found: Any, made: Iterable[JsonMapping]) -> Any:
    """Values as another process has stored them, with the texts that `locate_texts` lists as they were made.

    A place that holds another text by now, or none, stays as it is; so does what older versions stored without places.
    """
    texts = {tuple(one["at"]): one for one in made if "at" in one}

    def with_texts(value: Any, at: tuple[str | int, ...]) -> Any:
        if isinstance(value, Mapping):
            return {name: with_texts(inner, (*at, str(name))) for name, inner in value.items()}
        if isinstance(value, list):
            return [with_texts(inner, (*at, number)) for number, inner in enumerate(value)]
        known = texts.get(at)
        return _text(known) if known is not None and known["text"] == value else value

    return with_texts(found, ())


def read(sent: JsonMapping) -> Problem:
    """What `Problem.as_json` wrote -> the problem."""
    return Problem(**{name: sent[name] for name in ("option", "template", *FACTS)}, **_arguments(sent))


def _arguments(sent: JsonMapping) -> JsonObject:
    return {name: _text(one) if isinstance(one, dict) else one for name, one in sent["arguments"].items()}


def _text(sent: JsonMapping) -> Text:
    if sent.get("isOption"):
        return OptionName(sent["template"])
    return read(sent) if "option" in sent else Text(sent["template"], **_arguments(sent))


class ConfigError(ValueError):
    """Everything the user must fix: `problems`. As text it is one line for each."""

    def __init__(self, *problems: str, **arguments: Any) -> None:
        """Problems, or one template with its arguments."""
        self.problems = [Problem("", problems[0], **arguments)] if arguments else [*problems_of(problems)]
        super().__init__("\n".join(self.problems))

    @property
    def said(self) -> str:
        """What it says, which can be translated: its problem, or a line for each."""
        return self.problems[0] if len(self.problems) == 1 else listed(self.problems, "\n")


def problems_of(texts: Iterable[str]) -> Iterator[Problem]:
    """Problems as they are, texts with their arguments as problems, and of plain ones a problem for each line."""
    for text in texts:
        if isinstance(text, Problem):
            yield text
        elif isinstance(text, Text):
            yield Problem("", text.template, **dict[str, Any](text.arguments))
        else:
            yield from (Problem("", line) for line in str(text).splitlines() or [""])
