"""The page's words in other languages: one table per language, English sentence -> sentence.

The page is made in English once, for all visitors. Each browser asks for the table of its language and puts it over
what it shows (words.js); so whoever adds a text writes it in English, and a line in each table. What stands in no table
stays English: the help below fields, and what files and trainings say.
"""

import ast
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from kohya_gui.service import Answer, Sent
from library.config.schema import ConfigError

LANGUAGES = {"en": "English", "zh": "中文", "ja": "日本語"}
FOLDER = Path(__file__).parent / "words"

# Parts whose words are no texts of the page: code, help, and what users and files say.
SKIPPED = ("code", "pre", "small", "style", "script", "textarea", "datalist", "option")
UNSEEN = (
    "cli",
    "importing",
    "serving",
    "door",
    "texts",
    "theme",
    "assets",
    "routes",
    "service",
)  # modules without words for the page
ATTRIBUTES = ("placeholder", "aria-label", "title")
# SDXL, LoRA, bf16, FLUX.1, kohya_ss, ~/kohya/cat.toml: the same everywhere.
NAME = r"(?:[\w.-]*[A-Z][\w.-]*[A-Z][\w.-]*|[\w.-]*[\d_][\w.-]*|\S*/\S*|\W+)"
NAMES = re.compile(rf"\s*|{NAME}(?:\s+{NAME})*")


@cache
def table(language: str) -> Mapping[str, str]:
    """The table of a language. Raises ConfigError for one that there is none for."""
    if language not in LANGUAGES or language == "en":
        raise ConfigError(f"there are no words for {language}")
    return json.loads((FOLDER / f"{language}.json").read_text(encoding="utf-8"))


def answers() -> dict[str, Answer]:
    """What scripts may ask."""

    def words(sent: Sent) -> dict[str, Any]:
        return {"words": table(sent.text("language"))}

    return {"words": words}


class Words(HTMLParser):
    """The texts in a piece of HTML that people read, whatever is in them for machines left out."""

    VOID = ("input", "br", "img", "hr", "source", "path", "line", "polyline", "rect", "circle")

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open: list[str] = []
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element opens; some of its attributes are read out or shown."""
        self.found += [text for name, text in attrs if name in ATTRIBUTES and text]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """An element closes."""
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        """Text, unless it belongs to a part that is skipped."""
        if data.strip() and not any(tag in SKIPPED for tag in self._open):
            self.found.append(" ".join(data.split()))


def of_page(config: Mapping[str, Any]) -> Iterator[str]:
    """Every text of a page that needs a translation, from Gradio's description of it."""
    for component in config["components"]:
        props = component["props"]
        kind = component["type"]
        shown = [props.get(name) for name in ("label", "placeholder")] if kind not in ("html", "row", "column") else []
        shown += [props.get("value")] if kind in ("button", "uploadbutton") else []
        for text in shown:
            if isinstance(text, str) and needs_one(text):
                yield text
        if kind == "html" and isinstance(props.get("value"), str):
            yield from filter(needs_one, Words(props["value"]).found)


def of_sources(names: Collection[str] = ()) -> Iterator[str]:
    """Every text that handlers and scripts may show later: sentences in the page's own sources, or in some of them.

    `names` are modules without .py, and scripts with .js. What is put into a sentence is {0}, {1} and so on.
    """
    for path in sorted(FOLDER.parent.glob("*.js")):
        if names and path.name not in names:
            continue
        for found in re.findall(r"[\"`]([A-Z][^\"`\n]*)[\"`]", path.read_text(encoding="utf-8")):
            pieces = re.split(r"\$\{(?:[^{}]|\{[^}]*\})*\}", found)
            text = "".join(f"{{{at - 1}}}{piece}" if at else piece for at, piece in enumerate(pieces))
            if is_sentence(text):
                yield text
    for path in sorted(FOLDER.parent.glob("*.py")):
        if path.stem in names or (not names and path.stem not in UNSEEN):
            yield from filter(is_sentence, _literals(ast.parse(path.read_text(encoding="utf-8"))))


def _literals(tree: ast.AST) -> Iterator[str]:
    """The texts in a module, without its docstrings; a formatted one as a pattern."""
    aside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    aside |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in aside:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from Words(node.value).found if "<" in node.value else [node.value]
        elif isinstance(node, ast.JoinedStr):
            count = itertools.count()
            parts = [p.value if isinstance(p, ast.Constant) else f"{{{next(count)}}}" for p in node.values]
            made = "".join(map(str, parts))
            yield from Words(made).found if "<" in made else [made]


def is_sentence(text: str) -> bool:
    """Whether a text of a source is made for people: a capital letter in front, and no mark of a program in it."""
    return (
        bool(re.match(r"[A-Z{][\w{}]*[a-z}]?[ .:,]?", text))
        and " " in text.strip()
        and needs_one(text)
        and not re.search(r"[<>=;\\/]|\{\}|^\{0\}[^ ]|__", text)
    )


def covered(text: str, words: Mapping[str, str]) -> bool:
    """Whether a table has a text, by itself or as a pattern with words in its places."""
    if text in words or not needs_one(text):
        return True
    for pattern in (one for one in words if "{" in one):
        shape = re.sub(r"\\{\d\\}", "(.+?)", re.escape(pattern))
        if found := re.fullmatch(shape, text):
            return all(covered(part, words) for part in found.groups() if not re.fullmatch(r"\{\d\}", part))
    return False


def needs_one(text: str) -> bool:
    """Whether a text is words, and not a name or a number that is the same everywhere."""
    return bool(text.strip()) and not NAMES.fullmatch(text.strip())
