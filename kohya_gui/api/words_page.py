"""The terms of the page and what they mean: docs/words.md as a page to read, without scripts and other sites."""

import re
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path

from kohya_gui.api.docs_page import STYLE

WORDS = Path(__file__).parents[2] / "docs" / "words.md"
# In text that is escaped already: bold, code, and links, of which the words stay, as the page has no other document.
INLINE = ((r"\*\*(.+?)\*\*", r"<b>\1</b>"), (r"`(.+?)`", r"<code>\1</code>"), (r"\[(.+?)\]\([^)]*\)", r"\1"))
RULE = "|---"  # below the heads of a table


def words_html() -> str:
    """Return the page."""
    kinds = {"|": _table, "-": _bullets, "#": _headings}
    lines = re.sub(r"\n  (?=\S)", " ", WORDS.read_text(encoding="utf-8")).splitlines()  # an entry is one line
    groups = groupby(filter(None, lines), key=lambda line: line[0] if line[0] in kinds else "")
    body = "".join(part for kind, group in groups for part in kinds.get(kind, _paragraphs)([*group]))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Words</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>"
    )


def _inline(text: str) -> str:
    text = escape(text.strip())
    for pattern, replacement in INLINE:
        text = re.sub(pattern, replacement, text)
    return text


def _table(lines: list[str]) -> Iterator[str]:
    rows = [line.strip("|").split("|") for line in lines if not line.startswith(RULE)]
    tags = ["th", *["td"] * (len(rows) - 1)]
    cells = ("".join(f"<{tag}>{_inline(cell)}</{tag}>" for cell in row) for tag, row in zip(tags, rows, strict=True))
    yield f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _bullets(lines: list[str]) -> Iterator[str]:
    yield f"<ul>{''.join(f'<li>{_inline(line[1:])}</li>' for line in lines)}</ul>"


def _headings(lines: list[str]) -> Iterator[str]:
    for line in lines:
        level = len(line) - len(line.lstrip("#"))
        yield f"<h{level}>{_inline(line[level:])}</h{level}>"


def _paragraphs(lines: list[str]) -> Iterator[str]:
    yield f"<p>{_inline(' '.join(lines))}</p>"
