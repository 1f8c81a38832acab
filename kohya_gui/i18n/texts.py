"""The page's words in other languages: one table per language, English sentence -> sentence.

The page is made in English once, for all visitors. Each browser asks for the table of its language and puts it over
what it shows (words.js); so whoever adds a text writes it in English, and a line in each table. What stands in no table
stays English: logs, and what only other programs and files say.

In a line {0}, {1} and so on stand for whatever is there, and are looked up themselves. A line that begins with {name}
is a sentence about an option, whose name stands in front of it or, below its field, does not.
"""

import ast
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

from kohya_gui.server.json_api import ApiRequest, Handler
from library.config.json_types import JsonMapping, JsonObject
from library.config.schema import ConfigError

LANGUAGES = {"en": "English", "zh": "中文", "ja": "日本語"}
FOLDER = Path(__file__).parent / "words"
PAGE = Path(__file__).parents[1]

# Parts whose words are no texts of the page: code, and what users and files say.
SKIPPED = ("code", "pre", "style", "script", "textarea", "datalist")
UNSEEN = (
    "serving",
    "auth",
    "texts",
    "theme",
    "assets",
    "scripts",
    "routes",
    "json_api",
    "tensorboard",
)  # modules without words for the page
ATTRIBUTES = ("placeholder", "aria-label", "title")
# SDXL, LoRA, bf16, FLUX.1, kohya_ss, ~/kohya/cat.toml: the same everywhere.
NAME = r"(?:[\w.-]*[A-Z][\w.-]*[A-Z][\w.-]*|[\w.-]*[\d_][\w.-]*|\S*[/=]\S*|\W+)"
NAMES = re.compile(rf"\s*|{NAME}(?:,?\s+{NAME})*")
NUMBER = r"(?:[\d.,:/ ×→]|\b(?:s|h|min|GB|MB)\b)"  # a piece of numbers and their units
PLACE = re.compile(r"\{(\d)\}")
NAMED = "{name} "
# What a sentence about an option may begin with: "resolution ", "in cat.toml: --resolution ", "Image folder: ", ": ".
LEAD = r"(?:((?:in [^:]+: )?(?:--)?[a-z]\w*(?=:? )|[^:\n]{0,60}(?=: )):? )?"


# Why: docs/decisions/2026-11-20-english-in-the-sources.md
@cache
def table(language: str) -> Mapping[str, str]:
    """The table of a language. Raises ConfigError for one that there is none for."""
    if language not in LANGUAGES or language == "en":
        raise ConfigError("there are no words for {language}", language=language)
    return json.loads((FOLDER / f"{language}.json").read_text(encoding="utf-8"))


@cache
def patterns(language: str) -> tuple[tuple[str, str, bool], ...]:
    """The lines of a table that have places, as `pattern` makes them. The longest come first, as they say the most."""
    lines = sorted(table(language).items(), key=lambda line: -len(line[0]))
    return tuple(pattern(*line) for line in lines if line[0].startswith(NAMED) or PLACE.search(line[0]))


def pattern(english: str, other: str) -> tuple[str, str, bool]:
    """A line as an expression for Python and browsers, its translation with the groups' numbers, and whether the first
    group is an option's name.

    In a line of few letters a place stands for one word or number, or it would take other sentences apart; with only a
    word behind it for a number, or it would take names apart.
    """
    named = english.startswith(NAMED)
    core = english.removeprefix(NAMED)
    few = not named and len(re.sub(r"[^A-Za-z]", "", core)) < 6
    part = f"({NUMBER}*?|\\S*?)" if few else "(.*?)"
    if re.fullmatch(r"\{0\} [a-z]+", core):
        part = f"({NUMBER}+?)"
    order = PLACE.findall(core)
    shape = PLACE.sub(lambda found: part, re.sub(r"\\([{} ])", r"\1", re.escape(core)))
    if named and core[0].isalpha():
        shape = f"[{core[0].upper()}{core[0]}]{shape[1:]}"
    to = PLACE.sub(lambda found: f"{{{order.index(found[1]) + 1 + named}}}", other)
    return f"^{LEAD if named else ''}{shape}$", to, named


def answers() -> dict[str, Handler]:
    """What scripts may ask."""

    def words(sent: ApiRequest) -> JsonObject:
        language = sent.text("language")
        exact = {text: other for text, other in table(language).items() if not PLACE.search(text)}
        return {"words": exact, "patterns": patterns(language)}

    return {"words": words}


class Words(HTMLParser):
    """The texts in a piece of HTML that people read, whatever is in them for machines left out."""

    VOID = ("input", "br", "img", "hr", "source", "path", "line", "polyline", "rect", "circle")

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open: list[str] = []
        self._value: str | None = None  # of the option that was opened last
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element opens; some of its attributes are read out or shown."""
        self.found += [text for name, text in attrs if name in ATTRIBUTES and text]
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "option":
            self._value = dict(attrs).get("value")

    def handle_endtag(self, tag: str) -> None:
        """An element closes."""
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        """Text, unless it belongs to a part that is skipped."""
        if not data.strip() or any(tag in SKIPPED for tag in self._open):
            return
        # A choice that is a value stays as it is.
        if self._open[-1:] != ["option"] or self._value not in (None, data.strip()):
            self.found.append(" ".join(data.split()))


def of_page(config: JsonMapping) -> Iterator[str]:
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
    for path in sorted(PAGE.rglob("*.js")):
        if names and path.name not in names:
            continue
        for found in re.findall(r"[\"`]([A-Z][^\"`\n]*)[\"`]", path.read_text(encoding="utf-8")):
            pieces = re.split(r"\$\{(?:[^{}]|\{[^}]*\})*\}", found)
            text = "".join(f"{{{at - 1}}}{piece}" if at else piece for at, piece in enumerate(pieces))
            if is_sentence(text):
                yield text
    for path in sorted(PAGE.rglob("*.py")):
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


def covered(text: str, language: str) -> bool:
    """Whether a table has a text, by itself or as a pattern with words in its places."""
    if text in table(language) or PLACE.fullmatch(text) or not needs_one(text):
        return True
    for shape, _, named in patterns(language):
        if found := re.match(shape, text, re.S):
            return all(covered(part, language) for part in found.groups()[named:])
    return text[:1].isupper() and covered(text[:1].lower() + text[1:], language)


def needs_one(text: str) -> bool:
    """Whether a text is words, and not a name or a number that is the same everywhere."""
    return bool(text.strip()) and not NAMES.fullmatch(text.strip())
