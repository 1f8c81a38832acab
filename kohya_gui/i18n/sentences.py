"""How the sentences that a browser is sent were made: by templates, the keys of their translations, and arguments.

`data` says it beside what is shown as HTML; every answer to a script has it along.
"""

import json
from html import escape
from typing import Any

from library.config.stored_messages import how_made


def data(*shown: Any) -> str:
    """The attribute of an HTML element in which these texts are shown, or "" where they are templates as they stand."""
    known = list(how_made(shown))
    return f' data-texts="{escape(json.dumps(known))}"' if known else ""
