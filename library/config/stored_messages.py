"""Messages among other values as JSON: for a browser, and in the files of a run."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import FIELD, NAMED, Message, message_of_json


def how_made(content: Any) -> Iterator[JsonObject]:
    """Yield as JSON the messages among some values that a page must translate by their parts: those with arguments, or
    with names of options."""
    if isinstance(content, Message):
        if content.arguments or str(content) != content.template or NAMED.search(str(content)):
            yield content.as_json()
        if "\n" in str(content):  # each line is shown by itself
            yield from how_made(content.arguments)
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from how_made(value)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from how_made(value)


def locate_texts(content: Any, at: tuple[str | int, ...] = ()) -> Iterator[JsonObject]:
    """Yield the messages among some values as JSON, with the keys and indices that lead to each (`at`): the same words
    elsewhere may be the user's, such as a caption."""
    if isinstance(content, Message):
        yield {**content.as_json(), "at": list(at)}
    elif isinstance(content, Mapping):
        for name, value in content.items():
            yield from locate_texts(value, (*at, str(name)))
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            yield from locate_texts(value, (*at, number))


def restored(values: Any, messages: Iterable[JsonMapping]) -> Any:
    """Return values that another process has stored, with the messages that `locate_texts` lists in place of texts.

    A text that has changed since, that an older version stored without its place, or that does not follow from its
    template and arguments, stays plain text: who edits the file could otherwise choose what is formatted.
    """
    texts = {tuple(message["at"]): message for message in messages if "at" in message}

    def with_texts(value: Any, at: tuple[str | int, ...]) -> Any:
        if isinstance(value, Mapping):
            return {name: with_texts(inner, (*at, str(name))) for name, inner in value.items()}
        if isinstance(value, list):
            return [with_texts(inner, (*at, number)) for number, inner in enumerate(value)]
        message = texts.get(at)
        is_valid = message is not None and message["text"] == value and _is_sound(message)
        return message_of_json(message) if message is not None and is_valid else value

    return with_texts(values, ())


def _is_sound(sent: JsonMapping) -> bool:
    """Return whether a stored message yields the text that is stored with it, without formatting anything longer."""
    # A template such as "{a}{a}{a}..." could otherwise fill the memory.
    arguments, text = sent["arguments"], sent["text"]
    inner = [argument for argument in arguments.values() if not isinstance(argument, str)]
    if not (isinstance(text, str) and all(isinstance(argument, dict) and _is_sound(argument) for argument in inner)):
        return False
    lengths = {
        name: len(argument if isinstance(argument, str) else argument["text"]) for name, argument in arguments.items()
    }
    plural = sent.get("plural") if arguments.get("count") != "1" else ""
    parts = FIELD.finditer(plural or sent["template"]) if arguments else ()
    names = [part[2] or part[1] for part in parts if part[1] or part[2]]
    if not lengths.keys() >= {*names} or sum(lengths[name] for name in names) > len(text):
        return False
    return str(message_of_json(sent)) == text
