"""Page, shell and documents use the field's usual terms: what stopped readers before may not come back."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kohya_gui.api.words_page import WORDS, table_rows
from kohya_gui.i18n.texts import MEANINGS_FOLDER, load_catalogue
from tests import source

# What is not to be written, as an expression, and what is written instead. A blank stands for any white space.
INSTEAD = {
    r"read and asked": "say what the section's options are: base model, text encoders, VAE",
    r"find it again": "noise, target",
    r"how wrong an answer|wrong answer": "loss function, loss weighting",
    r"play(s|ed|ing)? (\w+ ){0,3}back": "replay, replayed: CUDA graphs are replayed",
    r"hardly fit": "nearly all GPU memory",
    r"(wait|keep|kept|stay)s? (\w+ ){0,3}in host memory|host memory": "CPU memory; swapped to, offloaded to CPU memory",
    r"no such setting here": "not supported",
    r"name the script": "--script names the training script",
    r"find doubles|\bdoubles of": "duplicates",
    r"on the side|on its side": "EXIF rotation; landscape, portrait",
    r"(steps|batches|images|pictures) an epoch": "per epoch",
    r"is sdpa = true": "sdpa is used instead",
    r"waiting for data, .*moving it|\bmoving it\b": "copying to the GPU",
    r"the very (thing|same)": "the same",
    r"what people have|people have": "say which files are read",
    r"for the eye": "for the reader; no meaning",
    r"computed twice|nothing is computed twice": "recomputed; gradient checkpointing",
    r"kinds? of numbers": "number format, precision, dtype",
    r"drawn on the way|on the way, to see": "sample images during training",
    r"says? about itself": "metadata",
    r"call(s)? (it|her|him|them)? ?up\b": "trigger",
    r"sign of life": "has not reported",
    r"still at work": "still running",
    r"(won|win) back|paid for itself|pay(s)? for itself": "recovered, saved",
    r"get(s|ting)? ready": "preparing",
    r"will do\b": "is enough",
    r"(gpu|it) runs? dry": "idle",
    r"went away while": "became unavailable",
    r"lost each other": "communication failed",
    r"round in circles": "recursion",
    r"looking at images|comparing looks": "scanning, comparing images",
    r"want(s)? opposite": "exclude each other",
    r"takes its time": "is slow",
    r"models? one talks to": "chat model",
    r"weighed against each other": "beam search",
    r"told none|is told during": "takes no guidance; is given",
    r"here goes\b": "expects",
    r"nothing (would )?learns?\b|nothing (has been|is) learned": "nothing is trained",
    r"finds? its own": "sets its own; adapts",
    r"counts? more, ": "stronger; weight",
    r"no toml; make one": "is not a TOML file; convert it",
    r"tells its words": "sets",
    r"begin(s)? anew|made anew|make(s)? anew|anew\b": "again, new",
    r"cut off\b": "interrupted",
    r"by chance\b": "randomly; stochastic rounding",
    r"never in the way|in the way where": "in place of",
    r"\} %(?! \()": "no blank before a percent sign",
    r"\benlarged (\{|more than|to more than|over)": "upscaled",
    r"ways? of (training|doing) it|the usual ways|every way\b": "settings",
    r"(?<![{\w/-])(?<!dataset\s)(?<!a\s)(?<!=\")pictures?\b(?!\.svg|[}:=(]|\s[\d{])": "image, sample image",
    r"(?<!\()(?<!the\s)\bRAM\b": "CPU memory",
    r"(?<!there\s)\bis no (?!longer)": "is not a",
    r"\b(out|in)side of\b": "outside, inside",
    r"\bstands in\b|\blies? (beside|directly)\b": "is in, is beside",
}


def said(path: Path) -> Iterator[tuple[int, str]]:
    """The texts of a source file that somebody reads: string constants with a blank that are no docstrings."""
    nodes = source.nodes(path)
    quiet = {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "{}" for p in node.values]
            quiet |= {id(part) for part in node.values}
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in quiet:
            yield node.lineno, node.value


@cache
def texts() -> list[tuple[str, str]]:
    """Everything that users read, with where it stands."""
    return list(_texts())


def _texts() -> Iterator[tuple[str, str]]:
    for path in source.files():
        name = path.relative_to(source.ROOT).as_posix()
        yield from ((f"{name}:{line}", text) for line, text in said(path) if " " in text)
    for pattern in (
        "kohya_gui/**/*.js",
        "kohya_gui/**/*.html",
        "presets/*/*.toml",
        "library/**/*.toml",
        "docs/*.md",
        "README.md",
        "setup.sh",
    ):
        for path in sorted(source.ROOT.glob(pattern)):
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".js":  # what is said stands in quotes; the rest is code and remarks
                text = "\n".join(quoted[1] for quoted in re.findall(r"([\"'`])((?:(?!\1)[^\\\n]|\\.)* .*?)\1", text))
            yield path.relative_to(source.ROOT).as_posix(), text
    for path in sorted((source.ROOT / "kohya_gui" / "i18n" / "words").glob("*.po")):
        name = path.relative_to(source.ROOT).as_posix()
        yield from ((name, english) for english in load_catalogue(path.stem))


@cache
def found(text: str) -> list[str]:
    """What is not to be written and stands in a text."""
    return [match[0] for bad in INSTEAD for match in re.finditer(bad.replace(" ", r"\s+"), text, re.IGNORECASE)]


def test_the_lines_of_a_check_begin_alike():
    """After its topic each line continues in lower case; names such as AdamW and GPU keep theirs."""
    capital = re.compile(r"[A-Z][a-z]+[ :,]")
    lines = [text for path in sorted((source.ROOT / "library" / "check").glob("*.py")) for _, text in said(path)]
    assert len(lines) > 50 and not [text for text in lines if capital.match(text)]


def test_no_text_uses_words_that_stop_a_reader():
    wrong = [f"{where}: {bad!r}" for where, text in texts() for bad in found(text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "How the checkpoint is read and asked.",
        "What is added to an image before the model has to find it again.",
        "How wrong an answer counts.",
        "minutes of trying kernels for each size, then steps are played back.",
        "Checkpoints wait in host memory, for models that hardly fit.",
        "there is no such setting here",
        "or name the script",
        "Find doubles",
        "Lying on the side",
        "Steps an epoch",
        "xformers: is sdpa = true",
        "0% waiting for data, 0% moving it",
        "starts the very thing\nthe page starts",
        "Reads what people have",
        "tables are for the eye",
        "{percent} % of an epoch",
        "enlarged {factor} times",
    ],
)
def test_the_list_knows_what_stopped_readers_before(text):
    assert found(text)


def test_texts_of_every_place_are_looked_at():
    places = {where.split(":")[0] for where, _ in texts()}
    assert {
        "README.md",
        "setup.sh",
        "docs/tools.md",
        "kohya_gui/i18n/words/zh.po",
        "kohya_gui/queue/queue.js",
    } <= places
    every = [text for _, text in texts()]
    assert any("Find duplicates" in text for text in every)  # a script's
    assert any("Higher learns more detail" in text for text in every)  # an option's help


def glossary() -> list[list[str]]:
    """The rows of docs/words.md: word, meaning, and the word in Chinese and in Japanese."""
    return table_rows(WORDS.read_text(encoding="utf-8"))[1:]


@pytest.mark.parametrize(("language", "column"), [("zh", 2), ("ja", 3)])
def test_the_catalogues_use_the_words_of_the_glossary(language, column):
    other = []
    names = re.compile(r"\{\w*\}|<\w+>|\w*_\w+|Torch Compile|Weights & Biases")
    catalogue = {**load_catalogue(language), **load_catalogue(language, MEANINGS_FOLDER)}
    lines = [(english, names.sub("", english), re.sub(r"\{\w*\}", "", said)) for english, said in catalogue.items()]
    for row in glossary():
        word, translated = row[0], row[column]
        # Not as a part of a name, such as compile_mode, a file or Torch Compile; "compile" alone is also an option.
        plain = re.compile(rf"(?<![\w.\-]){re.escape(word)}(e?s)?(?![\w=\-]|\.\w)", re.IGNORECASE)
        for english, text, said in lines:
            if plain.search(text) and translated not in said and word.lower() not in said.lower():
                other.append(f"{word}: {english!r} is {said!r}, without {translated}")
    assert len(glossary()) > 30 and not other, "\n".join(other)


def test_the_glossary_names_what_the_page_says():
    """A word that no text of the page uses, or that has a second translation, does not belong there."""
    rows = glossary()
    texts = " ".join(load_catalogue("zh")).lower()
    assert not [row[0] for row in rows if row[0].lower() not in texts]
    for column in (0, 2, 3):
        assert len({row[column] for row in rows}) == len(rows)
