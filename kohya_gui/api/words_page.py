"""The terms of the page and what they mean: docs/words.md as a page to read, without scripts and other sites."""

from pathlib import Path

from markdown_it import MarkdownIt

from kohya_gui.api.docs_page import STYLE

WORDS = Path(__file__).parents[2] / "docs" / "words.md"


def words_html() -> str:
    """Return the page."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    markdown.validateLink = lambda url: True  # each link is reduced to its text, as the page has no other document
    for end in ("link_open", "link_close"):
        markdown.add_render_rule(end, lambda *_: "")
    body = markdown.render(WORDS.read_text(encoding="utf-8"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Words</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>"
    )
