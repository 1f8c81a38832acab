"""How the sentences that a browser is sent were made: by templates, the keys of their translations, and arguments.

`data` says it beside what is shown as HTML; every answer to a script has it along.
"""

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from library.config.problems import Text


def how_made(found: Any) -> Iterator[dict[str, Any]]:
    """How the texts in an answer were made, of those that are not their template as it stands."""
    if isinstance(found, Text):
        if found.arguments or found != found.template:
            yield found.as_json()
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from how_made(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from how_made(value)


def data(*shown: str) -> str:
    """The attribute of an HTML element in which these texts are shown, or "" where they are templates as they stand."""
    known = list(how_made(shown))
    return f' data-texts="{escape(json.dumps(known))}"' if known else ""
