"""Messages among other values as JSON: for a browser, and in the files of a run."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import FIELD, NAMED, Message, message_of_json


def how_made(found: Any) -> Iterator[JsonObject]:
    """How the texts among some values were made, of those that are not their template as it stands or name options."""
    if isinstance(found, Message):
        if found.arguments or str(found) != found.template or NAMED.search(str(found)):
            yield found.as_json()
        if "\n" in str(found):  # each line is shown by itself
            yield from how_made(found.arguments)
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from how_made(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from how_made(value)


def locate_texts(found: Any, at: tuple[str | int, ...] = ()) -> Iterator[JsonObject]:
    """The messages among some values as JSON, with the names and numbers that lead to each (`at`): the same words
    elsewhere, such as a caption of the user's, are no message of ours."""
    if isinstance(found, Message):
        yield {**found.as_json(), "at": list(at)}
    elif isinstance(found, Mapping):
        for name, value in found.items():
            yield from locate_texts(value, (*at, str(name)))
    elif isinstance(found, list | tuple):
        for number, value in enumerate(found):
            yield from locate_texts(value, (*at, number))


def restored(found: Any, made: Iterable[JsonMapping]) -> Any:
    """Values as another process has stored them, with the messages that `locate_texts` lists.

    A place that holds another text by now, or none, stays as it is; so does what older versions stored without places,
    and a text that its template and arguments do not give: whoever edits a file would choose what is formatted.
    """
    texts = {tuple(one["at"]): one for one in made if "at" in one}

    def with_texts(value: Any, at: tuple[str | int, ...]) -> Any:
        if isinstance(value, Mapping):
            return {name: with_texts(inner, (*at, str(name))) for name, inner in value.items()}
        if isinstance(value, list):
            return [with_texts(inner, (*at, number)) for number, inner in enumerate(value)]
        known = texts.get(at)
        return message_of_json(known) if known is not None and known["text"] == value and _is_sound(known) else value

    return with_texts(found, ())


def _is_sound(sent: JsonMapping) -> bool:
    """Whether a stored message gives the text that stands beside it, decided without formatting anything longer."""
    arguments, text = sent["arguments"], sent["text"]
    inner = [one for one in arguments.values() if not isinstance(one, str)]
    if not (isinstance(text, str) and all(isinstance(one, dict) and _is_sound(one) for one in inner)):
        return False
    lengths = {name: len(one if isinstance(one, str) else one["text"]) for name, one in arguments.items()}
    plural = sent.get("plural") if arguments.get("count") != "1" else ""
    parts = FIELD.finditer(plural or sent["template"]) if arguments else ()
    names = [part[2] or part[1] for part in parts if part[1] or part[2]]
    if not lengths.keys() >= {*names} or sum(lengths[name] for name in names) > len(text):
        return False
    return str(message_of_json(sent)) == text
