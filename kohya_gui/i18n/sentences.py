"""Templates and arguments of the sentences sent to a browser, by which it translates them.

`data` puts them beside texts in HTML; JSON answers have them in `texts`.
"""

import json
from html import escape
from typing import Any

from library.config.stored_messages import how_made


def data(*shown: Any) -> str:
    messages = list(how_made(shown))
    return f' data-texts="{escape(json.dumps(messages))}"' if messages else ""
