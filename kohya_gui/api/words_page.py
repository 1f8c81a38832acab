"""The terms of the page and what they mean: docs/words.md as a page to read, without scripts and other sites."""

from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt

from kohya_gui.api.docs_page import STYLE
from kohya_gui.i18n.texts import LANGUAGES, MEANINGS_FOLDER, load_catalogue

WORDS = Path(__file__).parents[2] / "docs" / "words.md"
FIXED_TEXTS = ("Words", "word", "meaning", "Methods and formats", "These names are the same in every language.")


def words_html(language: str = "en") -> str:
    """Return the page; in English for a language without translations."""
    language = language if language in LANGUAGES else "en"
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    markdown.validateLink = lambda url: True  # each link is reduced to its text, as the page has no other document
    for end in ("link_open", "link_close"):
        markdown.add_render_rule(end, lambda *_: "")
    english = WORDS.read_text(encoding="utf-8")
    text, title = (english, "Words") if language == "en" else _translated(english, language)
    return (
        f'<!doctype html><html lang="{language}"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{STYLE}</style></head>'
        f"<body><main>{markdown.render(text)}</main></body></html>"
    )


def _translated(english: str, language: str) -> tuple[str, str]:
    """Return the words of a language with their meanings, as Markdown, and the title."""
    meanings = load_catalogue(language, MEANINGS_FOLDER)
    title, word, meaning, names, same = (meanings[text] for text in FIXED_TEXTS)
    head, *rows = table_rows(english)
    column = head.index(LANGUAGES[language])
    lines = [f"# {title}", "", f"| {word} | {LANGUAGES['en']} | {meaning} |", "|---|---|---|"]
    lines += [f"| {row[column]} | {row[0]} | {meanings.get(row[1], row[1])} |" for row in rows]
    lines += ["", f"## {names}", "", same, ""]
    lines += [f"- {meanings.get(text, text)}" for text in explained_names(english)]
    return "\n".join(lines), title


def table_rows(text: str) -> list[list[str]]:
    """Return the rows of the table, its head first: word, meaning, and the word in other languages."""
    lines = (line.strip("|") for line in text.splitlines() if line.startswith("| "))
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def explained_names(text: str) -> Iterator[str]:
    """Yield the entries below the table, each as one line."""
    entry = ""
    for line in text.splitlines():
        if line.startswith("- "):
            if entry:
                yield entry
            entry = line[2:]
        elif entry and line.startswith("  "):
            entry += f" {line.strip()}"
    if entry:
        yield entry
