"""The texts that the page may show, extracted from its sources and from the modules whose messages it shows."""

import ast
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

# Elements whose words are no texts of the page: code, and the contents of files and fields.
SKIPPED = ("code", "pre", "style", "script", "textarea")
ATTRIBUTES = ("placeholder", "aria-label", "aria-valuetext", "title", "alt")
# SDXL, LoRA, bf16, FLUX.1, kohya_ss, ~/kohya/cat.toml: the same everywhere.
NAME = r"(?:[\w.-]*[A-Z][\w.-]*[A-Z][\w.-]*|[\w.-]*[\d_][\w.-]*|\S*[/=]\S*|\W+)"
NAMES = re.compile(rf"\s*|{NAME}(?:,?\s+{NAME})*")
PLACE = re.compile(r"\{\w+\}")

# Callables that make a text -> which argument is its template.
MAKERS = {
    "Message": 0,
    "ngettext": 0,
    "Problem": 1,
    "ConfigError": 0,
    "about_images": 0,
    "_wrong": -1,
    "wrong_argument": -1,
    "_about": 1,
    "_flag": 1,
    "_wide": 0,
    "_budget": 0,
    "_no_blocks": 0,
    "remark": 1,
    "say": 0,
}
# The same for importers, whose plain texts are shown inside other texts.
IMPORTERS = {"change": 1, "ignore": 1, "explain": 0, "set_by": 2, "_say_layers": 1, "nearest": 1}
SAID_IN_JS = re.compile(r"\bsay\(([^{]*?(?:\"[^\"]*\"[^{\"]*?)+),\s*\{")
COUNTED_IN_JS = re.compile(r"\bcount\([^\"]*?, \"([^\"]+)\"\)")


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """The calls in a module, by the last part of the name that is called."""
    for node in nodes(path):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func).split(".")[-1], node


def templates(path: Path, without: Sequence[str] = (), makers: Mapping[str, int] = MAKERS) -> Iterator[str]:
    """The templates of texts with arguments, and of problems, that a module or a script makes; not by callables of
    `without`."""
    if path.suffix == ".js":
        text = path.read_text(encoding="utf-8")
        for arguments in SAID_IN_JS.findall(text):
            yield from re.findall(r"\"([^\"]*[a-z][^\"]*)\"", arguments)
        for noun in COUNTED_IN_JS.findall(text):
            yield from (f"{{count}} {noun}", f"{{count}} {noun}s")
        return
    assigned: dict[str, list[ast.expr]] = {}
    for node in nodes(path):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            for name in target.elts if isinstance(target, ast.Tuple) else (target,):
                assigned.setdefault(ast.unparse(name), []).append(node.value)
    for name, node in calls(path):
        if name == "counted" and isinstance(node.args[1], ast.Constant):
            yield from (f"{{count}} {node.args[1].value}", f"{{count}} {node.args[1].value}s")
        if name not in makers or name in without:
            continue
        given = [keyword.value for keyword in node.keywords if keyword.arg == "template"]
        if texts := node.args[makers[name] :][:1] or given if makers[name] >= 0 else node.args[-1:]:
            for template in constants(texts[0], assigned):
                yield template.removeprefix(":").lstrip() if name not in ("Message", "say") else template


# Callables that report progress -> which argument is the text. Other callables of these names take no text.
TOLD = {"phase": 0, "report": 0, "told": 0, "on_graph": 0, "spread": 3, "finish": 2}


def progress(path: Path) -> Iterator[tuple[str, str | ast.expr | None]]:
    """Calls that report progress: their source, and the template of the text, or the expression that makes the text
    elsewhere, or None for a plain text."""
    for name, node in calls(path):
        if name not in TOLD or len(node.args) <= TOLD[name]:
            continue
        text_node = node.args[TOLD[name]]
        if isinstance(text_node, ast.Constant | ast.JoinedStr):
            yield ast.unparse(node), None
        elif (
            isinstance(text_node, ast.Call)
            and ast.unparse(text_node.func) == "Message"
            and isinstance(text_node.args[0], ast.Constant)
        ):
            yield ast.unparse(node), str(text_node.args[0].value)
        elif isinstance(text_node, ast.IfExp):
            for part in (text_node.body, text_node.orelse):
                is_text = isinstance(part, ast.Call) and isinstance(part.args[0], ast.Constant)
                yield ast.unparse(node), str(part.args[0].value) if is_text else part
        else:
            yield ast.unparse(node), text_node


def filled_by_hand(path: Path) -> Iterator[str]:
    """Calls whose template is an f-string: with its values filled in, no catalogue has it."""
    for name, node in calls(path):
        if name in ("Message", "Problem", "ConfigError", "warn"):
            at = MAKERS.get(name, 0)
            if len(node.args) > at and isinstance(node.args[at], ast.JoinedStr):
                yield ast.unparse(node)


def constants(expression: ast.expr, assigned: Mapping[str, list[ast.expr]], deep: bool = True) -> Iterator[str]:
    """The texts that an expression may evaluate to: either branch, a value of a table, a variable of the module."""
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        yield expression.value
    elif isinstance(expression, ast.IfExp | ast.BoolOp | ast.Tuple):
        for part in (
            (expression.body, expression.orelse)
            if isinstance(expression, ast.IfExp)
            else [*ast.iter_child_nodes(expression)]
        ):
            yield from constants(part, assigned, deep)
    elif isinstance(expression, ast.Dict):
        for value in expression.values:
            yield from constants(value, assigned, deep)
    elif deep and isinstance(expression, ast.Name | ast.Subscript):
        name = ast.unparse(expression.value if isinstance(expression, ast.Subscript) else expression)
        for value in assigned.get(name, ()):
            yield from constants(value, {**assigned, name: []}, isinstance(expression, ast.Name))  # it may name itself


class Words(HTMLParser):
    """The texts in a piece of HTML that people read, without those for machines."""

    VOID = ("input", "br", "img", "hr", "source", "path", "line", "polyline", "rect", "circle")

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open: list[str] = []
        self._value: str | None = None  # of the option that was opened last
        self.made: list[str] = []  # how texts with arguments were made, as JSON
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element opens; some of its attributes are read out or shown."""
        self.found += [text for name, text in attrs if name in ATTRIBUTES and text]
        self.made += [text for name, text in attrs if name == "data-texts" and text]
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


def of_page(config: Mapping[str, Any]) -> Iterator[str]:
    """Every text of a page that needs a translation, from Gradio's description of it; templates where there are."""
    for component in config["components"]:
        props = component["props"]
        kind = component["type"]
        shown = [props.get(name) for name in ("label", "placeholder")] if kind not in ("html", "row", "column") else []
        shown += [props.get("value")] if kind in ("button", "uploadbutton") else []
        yield from (text for text in shown if isinstance(text, str) and needs_one(text))
        if kind == "html" and isinstance(props.get("value"), str):
            yield from of_markup(props["value"])


def of_markup(markup: str) -> Iterator[str]:
    """Every text of a piece of HTML that needs a translation; templates where there are."""
    words = Words(markup)
    templates = {sentence["text"]: sentence["template"] for texts in words.made for sentence in json.loads(texts)}
    yield from filter(needs_one, (templates.get(text, text) for text in words.found))


def sentences(path: Path) -> Iterator[str]:
    """The sentences without arguments in a module or a script."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".js":
        texts = re.findall(r"\"([A-Z][^\"\n]*)\"", text)
    else:
        tree = ast.parse(text)
        aside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        aside |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        literals = [node.value for node in nodes if id(node) not in aside]
        texts = [shown for text in literals for shown in (Words(text).found if "<" in text else [text])]
    yield from filter(is_sentence, texts)


def is_sentence(text: str) -> bool:
    """Whether a literal is a sentence for people: it starts with a capital letter and has no signs of code."""
    whole = re.match(r"[A-Z{][\w{}]*[a-z}]?[ .:,]?", text) and " " in text.strip()
    return bool(whole) and needs_one(text) and not re.search(r"[<>=;\\/]|\{\}|__", text)


def needs_one(text: str) -> bool:
    """Whether a text needs a translation: it has words, and is no name or number that is the same in all languages."""
    bare = PLACE.sub("", text).strip()
    return bool(bare) and not NAMES.fullmatch(bare)
