"""The page in other languages: every text has its line in every table, and a browser shows them."""

import ast
import re
from pathlib import Path

import pytest

from kohya_gui.form import compile_summary, presets
from kohya_gui.i18n import texts
from library.config import idle
from library.config.schema import ConfigError
from library.config.sections.run import IDLE_EVERYWHERE
from library.families import RUNS, config_class
from library.runs import explain
from tests import source

TABLES = {name: texts.table(name) for name in texts.LANGUAGES if name != "en"}
FORMS = ("compare", "compile_summary", "form", "api", "messages", "paths", "presets", "probe", "start_preset",
         "tab", "page.js", "live.js", "search.js", "start_preset.js", "compare.js", "probe.js", "messages.js",
         "print_command.js", "sections.js", "elements.js")  # fmt: skip
# What is wrong with a form is said by these.
RULES = ("library/config/sections/*.py", "library/config/values.py", "library/config/reading.py",
         "library/config/command.py", "library/families/*/options.py")  # fmt: skip
# What is wrong with a training whose form is well filled in: files, names, packages, this machine.
PREFLIGHT = ("library/outputs/paths.py", "library/optim/optimizers.py", "library/optim/lr_schedule.py",
             "library/outputs/hub.py",
             "library/check/preflight.py", "library/outputs/trackers.py", "library/data/preflight.py",
             "library/data/folders.py", "library/methods/__init__.py", "library/methods/network_args.py",
             "library/families/*/family.py", "library/families/*/checkpoint.py", "library/families/shared/hub.py",
             "library/families/sdxl/model.py", "library/families/shared/weights.py", "library/data/buckets.py",
             "library/compiler/checks.py", "library/check/isolated.py")  # fmt: skip
# What a translator keeps: options, values that are numbers or code, files.
CODE = re.compile(r"(?<![\w{])(?:\w+(?:_\w+)+|\d+(?:\.\d+)?(?:e-\d+)?|\w+=\w+|<\w+>|\.\w+)(?![\w}])")


def absent(wanted):
    """The texts that a table lacks, by language; nothing when all is well."""
    found = {name: [text for text in dict.fromkeys(wanted) if not texts.covered(text, name)] for name in TABLES}
    return {f"kohya_gui/i18n/words/{name}.json": lacking for name, lacking in found.items() if lacking}


@pytest.mark.parametrize("language", TABLES)
def test_a_table_has_the_lines_of_the_others_with_the_same_places_and_names(language):
    words = TABLES[language]
    assert set(words) == set(next(iter(TABLES.values())))
    for english, other in words.items():
        places = set(re.findall(r"\{\d\}", english))
        assert set(re.findall(r"\{\d\}", other)) <= places, english
        assert {f"{{{place}}}" for place in re.findall(r"(?<!\w)\{(\d)\}", english)} <= set(places), english
        assert other.strip() and not other.startswith("{name}"), english
        kept = set(CODE.findall(re.sub(r"\{\d\}", " ", english)))
        assert all(name in other for name in kept), (english, other)


def test_every_text_of_the_page_is_in_every_table_and_so_is_all_help():
    from kohya_gui.app import build

    page = list(texts.of_page(build().config))
    assert len(page) > 600 and {"Base model", "Train", "Torch Compile Settings", "not set"} <= set(page)
    assert "The rank of the adapter; higher learns more detail and makes a larger file. Empty: 4." in page
    assert not absent(page), "add these"


def test_what_each_preset_sets_and_needs_is_in_every_table():
    every = [*presets.presets(adapters=True), *presets.presets(adapters=False)]
    said = [text for one in every if one.is_profile for text in (compile_summary.name(one), compile_summary.about(one))]
    pieces = [re.split("[,;] ", compile_summary.about(one)) for one in every if not one.is_profile]
    said += [one.title for one in every if not one.is_profile] + [piece for found in pieces for piece in found]
    assert len(said) > 60 and not absent(said), "add these"


def test_what_the_form_says_later_is_in_every_table():
    said = [text for text in texts.of_sources(FORMS) if re.search("[A-Za-z]", re.sub(r"\{\d\}", "", text))]
    assert len(said) > 40 and "The form is as it was before." in said
    assert not absent(said), "add these"


def test_why_an_option_has_no_effect_is_in_every_table():
    rules = (*idle.SHARED, *idle.FLOW, *idle.ADAPTERS, *idle.WHOLE)
    why = [reason for *_, reason in rules] + list(IDLE_EVERYWHERE.values())
    why += [reason for script in RUNS for reason in config_class(script).idle.values()]
    assert len(why) > 80 and not absent(why), "add these"
    assert not absent(f"No effect: {reason}" for reason in why)


def test_what_is_wrong_with_a_form_is_in_every_table():
    said = [re.sub(r"^\{0\}", "an_option", text) for text in problems(RULES) if " " in text]
    assert len(said) > 70 and "an_option cannot be used with cache_latents: switch one of them off" in said
    assert not absent(said), "add these, with {name} for the option they begin with"


def test_what_is_wrong_with_a_training_is_in_every_table():
    own = {text: re.sub(r"\{\d\}|\w+_\w+", "", text) for text in problems(PREFLIGHT, ast.Return)}
    said = [text for text, words in own.items() if re.search(r"[a-z]{2} [a-z]{2}", words)]
    assert len(said) > 100 and "output_dir is not set: choose a folder for the results" in said
    for text in (re.sub(r"'\{\d\}$", "'", text) for text in said):  # whatever may be added at the end is left off
        # What stands first may be a number or an option.
        named = [re.sub(r"^(--|in \w+: )?\{0\}", r"\1an_option", text), f"an_option {text}", f"an_option: {text}"]
        assert any(not absent([one]) for one in (text, *named)), f"add this: {text}"


def test_why_a_training_failed_is_in_every_table():
    assert not absent(advice for _, advice in (*explain.KNOWN, *explain.ENDINGS)), "add these"


# Callables that make a problem -> which argument is its template, and whether an option's name stands in front.
MAKERS = {
    "Problem": (1, True),
    "ConfigError": (0, False),
    "about_images": (0, False),
    "_wrong": (-1, True),
    "_about": (1, True),
    "_flag": (1, True),
    "_wide": (0, True),
    "_budget": (0, True),
    "_no_blocks": (0, True),
}


def problems(rules, *more):
    """The sentences that checks and readers of options make (and `more` do); what is put in is {0} and so on."""
    for path in (path for rule in rules for path in source.ROOT.glob(rule)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            made = node.value if isinstance(node, more) else None
            if isinstance(node, ast.Call) and (maker := MAKERS.get(ast.unparse(node.func))):
                yield from made_by(node, *maker, in_arguments=path.name == "network_args.py")
            told = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "told" and node.value
            if isinstance(told, ast.Constant) and isinstance(told.value, str):
                yield numbered(told.value, "" if re.match(r"[{A-Zn]", told.value) else "an_option")
            if isinstance(made, ast.Constant) and isinstance(made.value, str):
                yield made.value
            elif isinstance(made, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else counted(p) for p in made.values]
                text = "".join(f"{{{parts[:at].count(None)}}}" if p is None else p for at, p in enumerate(parts))
                yield re.sub(r"(?:1_)?(\{\d\})(?::?\{\d\})*", r"\1", text)


def made_by(call, at, about_option, in_arguments):
    """The sentence that a call makes, if it is written there."""
    given = [arg.value if isinstance(arg, ast.Constant) else None for arg in call.args]
    template = given[at] if len(given) > at else None
    if isinstance(template, str):
        option = (given[0] if at and given[0] is not None else "an_option") if about_option else ""
        yield ("in network_args: " if in_arguments and at == -1 else "") + numbered(template, option)


# What stands in places of templates, where it is not a number or a name.
SAMPLES = {"count": "1 image", "captions": "1 caption", "lines": "1 line", "photos": "1 photo", "buckets": "1 bucket",
           "what": "= a_9", "others": "", "hint": "", "more": ""}  # fmt: skip


def numbered(template, option):
    """A template as a sentence with samples in its places, behind an option's name if that is not ""."""
    text = re.sub(r"\{(\w+)\}", lambda found: SAMPLES.get(found[1], "a_9"), template)
    return f"{option}{text}" if not option or text.startswith(":") else f"{option} {text}"


def counted(part):
    """What `number` says of things, as far as a source tells that."""
    call = part.value
    is_number = isinstance(call, ast.Call) and ast.unparse(call.func) == "number"
    return f"1 {call.args[1].value}" if is_number and isinstance(call.args[1], ast.Constant) else None


@pytest.mark.parametrize(("text", "covers"), [
    ("resolution is not set: 1024 is usual", True),
    ("Is not set: 1024 is usual", True),  # below its field
    (": must be at least 1, got -5", True),  # behind its name
    ("in cat.toml: --seed must be a whole number, got -5", True),
    ("full_fp16 and full_bf16 exclude each other: choose one", True),
    ("And full_bf16 exclude each other: choose one", True),
    ("Image folder: /a b/c does not exist", True),
    ("train_data_dir: /x/1_y is empty; it should hold images, or folders named 10_words with images", True),
    ("1 image very large and slow to read; scale them down: 1.png", True),
    ("14 graphs, about 75 s once, kept for next time (an estimate).", True),
    ("2 graphs, about 3 min for each image size, kept for next time (as in fox-1).", True),
    ("all are trained without words", True),
    ("each is trained with the words of its folder, 1_a, and the others without words", True),
    ("A cat that is asleep", False),
])  # fmt: skip
def test_a_sentence_about_an_option_is_found_with_its_name_or_without(text, covers):
    assert {texts.covered(text, name) for name in TABLES} == {covers}


@pytest.mark.parametrize("language", ["en", "xx", "../zh", ""])
def test_only_tables_that_are_there_can_be_asked_for(language):
    with pytest.raises(ConfigError):
        texts.table(language)
    assert Path(texts.FOLDER, "zh.json").is_file()


@pytest.mark.browser
def test_a_browser_gets_its_language_and_can_choose_another(visit, served):
    (served[1] / "images").mkdir(exist_ok=True)
    visitor = visit(locale="zh-CN")
    page = visitor.page
    page.get_by_role("button", name="开始训练", exact=True).locator("visible=true").wait_for()
    assert page.get_by_label("基础模型", exact=True).locator("visible=true").count() == 1
    page.get_by_placeholder("搜索所有设置").locator("visible=true").fill("秩")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "lora-network_dim"
    visitor.fill(resolution="")
    page.get_by_role("button", name="开始训练", exact=True).locator("visible=true").click()
    visitor.until("需要先修正 4 项")
    assert "resolution：未设置" in visitor.said().replace(" ：", "：")
    visitor.fill(max_train_steps="-5")
    below = page.locator("#lora-max_train_steps-help", has_text="应为不小于 1 的数，现在是 -5")
    below.wait_for()
    assert page.evaluate(ENGLISH) == []
    page.get_by_label("浏览：图像文件夹").locator("visible=true").click()
    page.locator(".picker li", has_text=re.compile("^images$")).wait_for()  # a name is no word, even where it is one
    page.keyboard.press("Escape")
    page.locator(".language").select_option("ja")
    page.get_by_role("button", name="学習を開始", exact=True).locator("visible=true").wait_for()
    assert page.evaluate(ENGLISH) == [] and page.evaluate("document.documentElement.lang") == "ja"
    assert page.locator("#lora-max_train_steps-help").inner_text() == "1 以上を指定してください（指定値：-5）"
    visitor.open()
    page.get_by_role("button", name="学習を開始", exact=True).locator("visible=true").wait_for()
    page.locator(".language").select_option("en")
    page.get_by_role("button", name="Train", exact=True).locator("visible=true").wait_for()
    assert page.get_by_label("Base model", exact=True).locator("visible=true").count() == 1
    visitor.fill(max_train_steps="5")
    page.locator("#lora-max_train_steps-help", has_text="Optimizer steps to train.").wait_for()


# Labels, help, headings and buttons on screen that are still sentences or words of English.
ENGLISH = """() => [...document.querySelectorAll('label, h2, h3, .fold p, .field small, #work button, #top p')]
  .filter((e) => e.checkVisibility({ visibilityProperty: true }) && !e.querySelector('small, code, ul'))
  .map((e) => e.innerText.trim())
  .filter((t) => /^[\\x20-\\x7e]+$/.test(t) && /[a-z]{4}/.test(t))
  .filter((t) => !/DreamBooth|LoRA|Torch|Hugging Face|Stable Diffusion/.test(t))"""
