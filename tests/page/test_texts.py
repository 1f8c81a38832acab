"""The page in other languages: every text has its line in every table, and a browser shows them."""

import re
from pathlib import Path

import pytest

from kohya_gui import texts
from library.config.schema import ConfigError

TABLES = {name: texts.table(name) for name in texts.LANGUAGES if name != "en"}
FORMS = ("checking", "comparing", "compiling", "form", "helping", "messages", "presets", "probing", "training",
         "page.js", "desk.js", "search.js")  # fmt: skip


@pytest.mark.parametrize("language", TABLES)
def test_a_table_has_the_lines_of_the_others_with_the_same_places(language):
    words = TABLES[language]
    assert set(words) == set(next(iter(TABLES.values())))
    for english, other in words.items():
        places = set(re.findall(r"\{\d\}", english))
        assert set(re.findall(r"\{\d\}", other)) <= places, english
        assert other.strip(), english


def test_every_text_of_the_page_is_in_every_table():
    from kohya_gui.app import build

    page = dict.fromkeys(texts.of_page(build().config))
    assert len(page) > 300 and {"Base model", "Train", "Torch Compile Settings"} <= set(page)
    absent = {name: [text for text in page if not texts.covered(text, words)] for name, words in TABLES.items()}
    assert not any(absent.values()), f"add these to kohya_gui/words/*.json: {absent}"


def test_what_the_form_says_later_is_in_every_table():
    said = [text for text in texts.of_sources(FORMS) if re.search("[A-Za-z]", re.sub(r"\{\d\}", "", text))]
    assert len(said) > 40 and "The form is as it was before." in said
    absent = {name: [text for text in said if not texts.covered(text, words)] for name, words in TABLES.items()}
    assert not any(absent.values()), f"add these to kohya_gui/words/*.json: {absent}"


@pytest.mark.parametrize("language", ["en", "xx", "../zh", ""])
def test_only_tables_that_are_there_can_be_asked_for(language):
    with pytest.raises(ConfigError):
        texts.table(language)
    assert Path(texts.FOLDER, "zh.json").is_file()


@pytest.mark.browser
def test_a_browser_gets_its_language_and_can_choose_another(visit):
    visitor = visit(locale="zh-CN")
    page = visitor.page
    page.get_by_role("button", name="开始训练", exact=True).locator("visible=true").wait_for()
    assert page.get_by_label("基础模型", exact=True).locator("visible=true").count() == 1
    page.get_by_placeholder("搜索所有设置").locator("visible=true").fill("秩")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "lora-network_dim"
    page.get_by_role("button", name="开始训练", exact=True).locator("visible=true").click()
    visitor.until("需要先修正 4 项")
    assert page.evaluate(ENGLISH) == []
    page.locator(".language").select_option("ja")
    page.get_by_role("button", name="学習を開始", exact=True).locator("visible=true").wait_for()
    assert page.evaluate(ENGLISH) == [] and page.evaluate("document.documentElement.lang") == "ja"
    visitor.open()
    page.get_by_role("button", name="学習を開始", exact=True).locator("visible=true").wait_for()
    page.locator(".language").select_option("en")
    page.get_by_role("button", name="Train", exact=True).locator("visible=true").wait_for()
    assert page.get_by_label("Base model", exact=True).locator("visible=true").count() == 1


# Labels, headings and buttons on screen that are still sentences or words of English.
ENGLISH = """() => [...document.querySelectorAll('label, h2, h3, .fold p, #work button, #top p')]
  .filter((e) => e.checkVisibility({ visibilityProperty: true }) && !e.querySelector('small, code, ul'))
  .map((e) => e.innerText.trim())
  .filter((t) => /^[\\x20-\\x7e]+$/.test(t) && /[a-z]{4}/.test(t))
  .filter((t) => !/DreamBooth|LoRA|Torch|Hugging Face|Stable Diffusion/.test(t))"""
