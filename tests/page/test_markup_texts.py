"""Texts that Python writes between tags, and those that a record keeps: every catalogue has them."""

import ast
import re

import pytest

from kohya_gui.i18n import texts
from library.config.problems import Message
from library.runs.lost_time import lost_time_sentence
from tests import source
from tests.page.page_texts import needs_one

TABLES = {name: texts.load_catalogue(name) for name in texts.LANGUAGES if name != "en"}
# Pages with languages of their own, or for programs.
OTHER_PAGES = ("auth.py", "docs_page.py", "look.py")
VALUE = "\0"  # stands for a value in an f-string
BETWEEN_TAGS = re.compile(rf">([^<>{VALUE}]*[a-z]{{2}}[^<>{VALUE}]*)</(?:a|b|button|h\d|li|p|small|span|summary)>")
IN_ATTRIBUTES = re.compile(rf"(?:title|aria-label|placeholder|alt)=\"([^\"{VALUE}]+)\"")


def written(path):
    """The texts in the markup of a module: between tags without a value among them, and of attributes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            markup = "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            markup = node.value
        else:
            continue
        yield from (" ".join(text.split()) for text in BETWEEN_TAGS.findall(markup) + IN_ATTRIBUTES.findall(markup))


@pytest.mark.parametrize("language", TABLES)
def test_every_text_between_tags_is_in_every_catalogue(language):
    modules = [path for path in (source.ROOT / "kohya_gui").rglob("*.py") if path.name not in OTHER_PAGES]
    found = {text for path in modules for text in written(path) if needs_one(text)}
    assert len(found) > 40 and "Open this run" in found
    known = TABLES[language].keys()
    assert [text for text in sorted(found) if not {text, text[:1].lower() + text[1:]} & known] == []


@pytest.mark.parametrize("cause", ["generating samples", Message("saving")])
def test_what_took_time_is_translated_from_a_record_too(cause):
    sentence = lost_time_sentence([{"cause": cause, "seconds": 2.04}])
    assert str(sentence) == f"2.0 s went to other work since the first step: {cause} 2.0 s"
    part = sentence.arguments["causes"].arguments["part0"]
    assert isinstance(part.arguments["cause"], Message)
    assert all(part.template in table and str(cause) in table for table in TABLES.values())
