"""The page in other languages: every catalogue has every text, and a browser shows the translations."""

import ast
import re
from pathlib import Path
from unicodedata import east_asian_width

import pytest

from kohya_gui.form import adapter, adapter_size, compile_summary
from kohya_gui.form.form import as_sentence
from kohya_gui.i18n import sentences, texts
from library import families
from library.check import report
from library.config import ineffective
from library.config.problems import ConfigError, Message, Problem
from library.config.run_config import INEFFECTIVE_EVERYWHERE
from library.config.schema import options_of
from library.families import RUNS, adapter_kinds, config_class
from library.importers.builder import NOT_HERE
from library.importers.shared import load_tables
from library.recipes import preset_files
from library.runs import explain, queue, reader
from library.runs.record import Record
from tests import source
from tests.page import page_texts

TABLES = {name: texts.load_catalogue(name) for name in texts.LANGUAGES if name != "en"}
# What is said in a shell alone: by its commands, in its set-up, of its flags.
SHELL = ("library/cli", "library/demo", "library/setup/installer", "library/bench/diffusers")
LOGGED = ("say",)  # a line of a log in the library, but a text in the page's scripts
FORMS = (
    "adapter",
    "adapter_size",
    "compare",
    "compile_summary",
    "form",
    "api",
    "messages",
    "paths",
    "presets",
    "probe",
    "start_preset",
    "tab",
    "search",
    "live",
    "page",
    "buttons",
    "models",
    "print_command",
    "sections",
    "section_summary",
    "text_editor",
    "undo",
    "elements",
)
# What a translator keeps: options, values that are numbers or code, files.
CODE = re.compile(r"(?<![\w{])(?:\w+(?:_\w+)+|\d+(?:\.\d+)?(?:e-\d+)?|\w+=\w+|<\w+>|\.\w+)(?![\w}])")


NOTE_IN_JS = re.compile(r"/\*.*?\*/|(?m:^\s*//[^\n]*$)", re.DOTALL)
# Words in scripts that stay as they are: keys, values of options, names of the browser's, a language, a beginning.
NOT_SHOWN = ("Backspace", "Enter", "Escape", "True", "False", "Notification", "Webhook", "English") + (
    "The page's server does not answer",
)


def lower(text):
    # One entry of a catalogue serves both spellings.
    return text[:1].lower() + text[1:]


def absent(required):
    """The texts missing from catalogues, by language."""
    required = [text for text in dict.fromkeys(required) if page_texts.needs_one(text)]
    lacking_by_language = {
        name: [t for t in required if not {t, lower(t)} & words.keys()] for name, words in TABLES.items()
    }
    return {f"kohya_gui/i18n/words/{name}.po": lacking for name, lacking in lacking_by_language.items() if lacking}


def sources(*folders, suffixes=(".py", ".js")):
    """The modules and scripts below some folders."""
    paths = (path for folder in folders for path in (source.ROOT / folder).rglob("*"))
    return sorted(path for path in paths if path.suffix in suffixes)


def page():
    """The texts of the opened page, and the titles of trainings."""
    from kohya_gui.app import build_page

    built_page = build_page()
    tabs = [text for tab in built_page.training.tabs.values() for text in page_texts.of_markup(tab.markup)]
    return [*page_texts.of_page(built_page.config), *tabs, *(config_class(script).title for script in RUNS)]


def of_presets():
    """The pieces of each preset's description, as templates."""
    presets = preset_files.all_presets()
    profile_texts = [
        text
        for preset in presets
        if preset.is_profile
        for text in (compile_summary.name(preset), str(preset.description.short()))
    ]
    lists = [preset.description for preset in presets if not preset.is_profile]
    return [
        *profile_texts,
        *(preset.title.template for preset in presets if not preset.is_profile),
        *(preset_files.as_message(text).template for listed in lists for text in (*listed.settings, listed.figures)),
        *(listed.figures_alone().template for listed in lists),
    ]


def of_adapters():
    """The texts of the adapters' fields: types, arguments, choices of layers, and groups of blocks."""
    for family in families.FAMILIES:
        yield from (group.title for group in families.facts_of(family).blocks)
        for kind in adapter_kinds.kinds(family):
            yield from (kind.title, kind.about)
            yield from (text for option in kind.options for text in (option.label, as_sentence(option.help)))
            yield from (text for preset in kind.presets for text in (preset.title, preset.about))


@pytest.mark.parametrize("language", TABLES)
def test_a_catalogue_has_the_lines_of_the_others_with_the_same_places_and_names(language):
    words = TABLES[language]
    assert set(words) == set(next(iter(TABLES.values())))
    for english, other in words.items():
        places = set(page_texts.PLACE.findall(english))
        # The form for one thing may name no number in English, where other languages have one form for all.
        assert places <= set(page_texts.PLACE.findall(other)) <= places | {"{count}"}, english
        assert other.strip(), english
        names = set(CODE.findall(page_texts.PLACE.sub(" ", english)))
        assert all(name in other for name in names), (english, other)


@pytest.mark.parametrize("language", TABLES)
def test_help_takes_two_lines_of_a_column_in_every_language(language):
    """Counted in letters, as fonts differ: a Chinese or Japanese character is as wide as two English letters, and 48
    letters fill a line."""
    help_texts = {
        as_sentence(o.help, o.choices) for script in RUNS for o in options_of(families.config_class(script)).values()
    }
    translations = {help: TABLES[language][help] for help in help_texts}
    width = {
        help: sum(1 + (east_asian_width(letter) in "WF") for letter in translations[help]) for help in translations
    }
    assert not {translations[help]: wide for help, wide in width.items() if wide > 96}


def test_no_catalogue_has_a_line_that_nothing_says():
    files = sources("kohya_gui", "library", suffixes=(".py", ".js", ".html"))
    tables = sources("library/importers", suffixes=(".toml",))
    written = "\n".join(path.read_text(encoding="utf-8") for path in (*files, *tables))
    known_texts = {text for path in files if path.suffix != ".html" for text in page_texts.templates(path)}
    for path in files:
        if path.suffix == ".py":
            literals = [node.value for node in page_texts.nodes(path) if isinstance(node, ast.Constant)]
            known_texts |= {text for text in literals if isinstance(text, str)}
    html = [text for text in known_texts if re.match("<[a-z]", text)]
    known_texts |= {text for markup in html for text in page_texts.Words(markup).found}
    known_texts |= {
        *page(),
        *of_presets(),
        *of_adapters(),
        *(advice for _, advice in (*explain.KNOWN, *explain.ENDINGS)),
    }
    known_texts |= {lower(text) for text in known_texts}
    stale = [text for text in TABLES["zh"] if text not in known_texts and text not in written]
    assert not stale, "delete these"


def test_every_text_of_the_page_is_in_every_catalogue_and_so_is_all_help():
    shown = page()
    assert len(shown) > 600 and {"Base model", "Train", "Torch Compile Settings", "not set"} <= set(shown)
    assert "16 or 32 suits most. Higher learns more detail, in a larger file. Empty: 4." in shown
    assert not absent(shown), "add these"


def test_what_each_preset_sets_and_needs_is_in_every_catalogue():
    assert len(set(of_presets())) > 30 and not absent(of_presets()), "add these"


def test_what_the_fields_of_adapters_say_is_in_every_catalogue():
    labels = [*of_adapters(), adapter.OTHER, adapter_size.UNKNOWN, adapter_size.CANNOT_COUNT]
    assert len(set(labels)) > 90 and not absent(labels), "add these"


def test_what_the_page_says_later_is_in_every_catalogue():
    forms = [path for path in sources("kohya_gui") if path.stem in FORMS]
    fixed_texts = [text for path in forms for text in page_texts.sentences(path)]
    templates = [
        text for path in sources("kohya_gui") for text in page_texts.templates(path) if re.match("[A-Z{].", text)
    ]
    assert len(fixed_texts) > 40 and "The form is as it was before." in fixed_texts
    assert len(templates) > 80 and "{images} chosen" in templates and "Saved {path}." in templates
    own = [path for path in sources("kohya_gui", suffixes=(".js",)) if "vendor" not in path.parts]
    scripts = [path.read_text(encoding="utf-8") for path in own]
    words = [word for text in scripts for word in re.findall(r"(?:translated|[bB]utton)\(\s*\"([^\"]+)\"", text)]
    words += [word for text in scripts for word in re.findall(r"\"([A-Z][a-z][^\"\\\n]*)\"", NOTE_IN_JS.sub("", text))]
    assert {"Pause", "Waiting", "Looking", "Next sample", "Open in form", "Operation"} <= set(words)
    assert not absent([*fixed_texts, *templates, *(word for word in words if word not in NOT_SHOWN)]), "add these"


def test_the_topics_of_the_doctor_and_of_the_check_are_in_every_catalogue():
    calls = [call for path in sources("library/doctor") for call in page_texts.calls(path)]
    firsts = [call.args[0] for name, call in calls if name in ("ok", "hint", "bad") and call.args]
    topics = [first.value for first in firsts if isinstance(first, ast.Constant) and first.value != "torch"]
    assert {"driver", "folders", "packages"} <= {*topics} and not absent([*topics, *report.ORDER]), "add these"


@pytest.mark.parametrize("language", TABLES)
def test_a_blank_stands_between_words_and_a_number(language):
    """As in all other sentences; it is easily forgotten for numbers inserted by `counted`."""
    counted = set()
    for path in sources("kohya_gui", "library", suffixes=(".py",)):
        for name, call in page_texts.calls(path):
            if name in page_texts.MAKERS and len(call.args) > page_texts.MAKERS[name]:
                numbers = [word.arg for word in call.keywords if ast.unparse(word.value).startswith("counted(")]
                for template in page_texts.constants(call.args[page_texts.MAKERS[name]], {}):
                    counted |= {(template.removeprefix(":").lstrip(), number) for number in numbers}
    assert len(counted) > 40
    word = "[\u3040-\u30fa\u30fc-\u30ff\u4e00-\u9fff]"
    translations = {(TABLES[language].get(template, ""), number) for template, number in counted}
    glued = [other for other, number in translations if re.search(f"{word}\\{{{number}\\}}", other)]
    assert not glued


# What follows a name inside of another sentence, without a colon: "{file} {why}", "{optimizer} {unusable}".
INSIDE = (
    *(
        "is ignored",
        "is also read",
        "is read as part",
        "is not a known sampler",
        "is not a known variant",
        "is not for generating images",
        "becomes {used}",
        "is neither an image",
    ),
    *(
        "is empty",
        "has more than {most} MB",
        "names the package",
        "needs a GPU",
        "is no way",
        "is not a known variant",
        "yes",
    ),
)


def test_no_japanese_sentence_begins_with_a_particle_after_the_colon_behind_an_option():
    particles = re.compile(r"[：:\s]*(は|が|を|に|の|と|で|へ|も|から|より|まで|によって)(?!で|れ|っ)")
    begins = {
        english: japanese
        for english, japanese in TABLES["ja"].items()
        if re.match(r"[a-z:=(]", english) and not english.startswith(INSIDE) and particles.match(japanese)
    }
    assert not begins


def test_why_an_option_has_no_effect_is_in_every_catalogue():
    family_rules = [rule for script in RUNS for rule in config_class(script).ineffective_rules]
    rules = (
        *ineffective.SHARED,
        *ineffective.ADAPTER_RULES,
        *ineffective.ADAPTERS,
        *ineffective.EMBEDDING_RULES,
        *ineffective.WHOLE_MODEL_RULES,
        *family_rules,
    )
    why = [reason.template if isinstance(reason, Message) else reason for *_, reason in rules] + list(
        INEFFECTIVE_EVERYWHERE.values()
    )
    why += [reason for script in RUNS for reason in config_class(script).ineffective.values()]
    assert len(why) > 80 and not absent([*why, "No effect: {reason}"]), "add these"


def test_why_a_name_of_an_old_file_is_ignored_or_gone_is_in_every_catalogue():
    classes = [config_class(script) for script in RUNS]
    why = [reason for config in classes for reason in (*config.foreign.values(), *config.retired.values())]
    assert len(set(why)) > 20 and "no script reads it" in why and not absent(why), "add these"


def of_library():
    """The modules whose sentences the page may show: those of a form, a check, a job, a training or its record."""
    shell = tuple(str(source.ROOT / folder) for folder in SHELL)
    return [path for path in sources("library", suffixes=(".py",)) if not str(path).startswith(shell)]


def test_what_is_wrong_with_a_form_a_job_or_a_training_is_in_every_catalogue():
    templates = [text for path in of_library() for text in page_texts.templates(path, LOGGED)]
    templates = [text for text in templates if re.search(r"[a-z]{2} [a-z]{2}", page_texts.PLACE.sub("", text))]
    assert len(templates) > 700 and "cannot be used with cache_latents: switch one of them off" in templates
    assert not absent(templates), "add these"
    plain = list(page_texts.templates(source.ROOT / "library/check/report.py", makers={"Finding": 2}))
    assert "torch.compile is off" in plain and not absent(plain), "add these"


def test_why_an_image_cannot_be_used_is_in_every_catalogue():
    modules = [source.ROOT / "library" / name for name in ("curation/scanning.py", "data/pixels.py")]
    returned = [node for path in modules for node in page_texts.nodes(path) if isinstance(node, ast.Return)]
    reasons = [
        part.value
        for node in returned
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value
    ]
    assert "this cannot be read as an image" in reasons and not absent(reasons), "add these"


def test_what_became_of_the_keys_of_other_trainers_is_in_every_catalogue():
    """Sentences of the importers, and the reasons in their tables, which are shown inside other sentences."""
    modules = sources("library/importers", suffixes=(".py",))
    templates = [text for path in modules for text in page_texts.templates(path, makers=page_texts.IMPORTERS)]
    tables = [load_tables(path.stem) for path in sources("library/importers/tables", suffixes=(".toml",))]
    templates += [NOT_HERE, *(reason for table in tables for reason in table["ignored"].values())]
    templates = [text for text in templates if re.search(r"[a-z]{2} [a-z]{2}", page_texts.PLACE.sub("", text))]
    assert len(templates) > 250 and "becomes one of optimizer_args" in templates and not absent(templates), "add these"
    modules = [path for path in modules if path.stem != "result"]  # its summary for the shell is English only
    filled = (
        ast.unparse(node) for path in modules for node in page_texts.nodes(path) if isinstance(node, ast.JoinedStr)
    )
    assert not [text for text in filled if re.search(r"[a-z]{2} [a-z]{2}", re.sub(r"{[^}]*}", "", text))], (
        "use a Message"
    )


def test_what_jobs_and_trainings_do_is_reported_by_texts_that_are_in_every_catalogue():
    templates, untranslatable = [], []
    for path in of_library():
        for call, text in page_texts.progress(path):
            templates += [text] if isinstance(text, str) else []
            untranslatable += [f"{path.name}: {call}"] if text is None else []
    templates += page_texts.templates(source.ROOT / "library" / "config" / "phases.py")
    assert len(templates) > 45 and {"generating", "caching latents", "waiting for {trainings}"} <= set(templates)
    assert not untranslatable, "these are no Message"
    assert not absent(templates), "add these"


def test_sentences_that_are_shown_are_made_of_templates():
    filled = [f"{path.name}: {call}" for path in of_library() for call in page_texts.filled_by_hand(path)]
    assert not filled, "these cannot be translated: use {places} and arguments"


def test_why_a_training_failed_is_in_every_catalogue():
    without_a_word = [text for path in (reader, queue) for text in page_texts.sentences(Path(path.__file__))]
    assert "The training was interrupted: its process is gone." in without_a_word and not absent(without_a_word)
    assert not absent(advice for _, advice in (*explain.KNOWN, *explain.ENDINGS)), "add these"


def test_nothing_takes_sentences_apart():
    scripts = {path.name: path.read_text(encoding="utf-8") for path in sources("kohya_gui/i18n")}
    assert not [name for name, text in scripts.items() if re.search(r"new RegExp|\bre\.|patterns", text)]


def test_an_answer_says_how_its_texts_were_made():
    count = Message("{count} images", count=2)
    problem = Problem("seed", "must be {limits}, got {value}", limits=Message("at least {low}", low=1), value=0)
    stored = list(sentences.how_made({"a": [count, "plain"], "b": {"c": problem}, "d": Message("as it stands")}))
    assert [message["text"] for message in stored] == ["2 images", "seed must be at least 1, got 0"]
    assert stored[1]["option"] == "seed" and stored[1]["arguments"]["limits"]["arguments"] == {"low": "1"}
    assert sentences.data("plain") == "" and "&quot;{count} images&quot;" in sentences.data(count)


@pytest.mark.parametrize("language", ["en", "xx", "../zh", ""])
def test_only_existing_catalogues_can_be_requested(language):
    with pytest.raises(ConfigError):
        texts.load_catalogue(language)
    assert (texts.CATALOGUES_FOLDER / "zh.po").is_file()


@pytest.mark.browser
def test_a_browser_gets_its_language_and_can_choose_another(visit, served, tmp_path):
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
    visitor.until("需要修正 3 项")
    assert "分辨率：未设置" in visitor.said().replace(" ：", "：")
    visitor.fill(max_train_steps="-5")
    below = page.locator("#lora-max_train_steps-help", has_text="应为不小于 1 的数，现在是 -5")
    below.wait_for()
    assert page.evaluate(ENGLISH) == []
    page.get_by_label("浏览：图像文件夹").locator("visible=true").click()
    page.locator(".picker li", has_text=re.compile("^images$")).wait_for()  # a folder's name stays
    page.keyboard.press("Escape")
    page.locator(".language").select_option("ja")
    page.get_by_role("button", name="学習を開始", exact=True).locator("visible=true").wait_for()
    assert page.evaluate(ENGLISH) == [] and page.evaluate("document.documentElement.lang") == "ja"
    assert page.locator("#lora-max_train_steps-help").inner_text() == "1 以上を指定してください（指定値：-5）"
    visitor.open()
    page.get_by_role("button", name="学習を開始", exact=True).locator("visible=true").wait_for()
    with Record.start({}, "sdxl_train_network", tmp_path, "cat") as record:
        record.plan(9)
        for number in (1, 2, 3):  # from the second step on Gradio replaces the text in place
            record.step({"step": number, "loss": 0.5})
            visitor.until(f"ステップ {number} / 9", ".live .line")
    label = Message("{name} · {state}", name="cat", state=Message("running"))  # in lower case, as in the list of runs
    shown = f"<i id='label'{sentences.data(label)}>{label}</i>"
    page.evaluate("shown => document.querySelector('#top').insertAdjacentHTML('beforeend', shown)", shown)
    page.locator("#label", has_text=f"cat · {TABLES['ja']['Running']}").wait_for()
    page.get_by_role("tab", name="学習履歴", exact=True).click()
    page.locator(".queue .how", has_text="キューは空です").wait_for()
    page.locator(".language").select_option("en")
    page.locator(".queue .how", has_text="The queue is empty.").wait_for()  # queue.js had written it in Japanese
    visitor.tab("LoRA")
    page.get_by_role("button", name="Train", exact=True).locator("visible=true").wait_for()
    assert page.get_by_label("Base model", exact=True).locator("visible=true").count() == 1
    visitor.fill(max_train_steps="5")
    page.locator("#lora-max_train_steps-help", has_text="1000 to 3000").wait_for()


# Labels, help, headings and buttons on screen that are still sentences or words of English.
NAMES = "|".join(re.escape(family.title) for family in families.all_families())
ENGLISH = """() => [...document.querySelectorAll('label, h2, h3, .fold p, .field small, #work button, #top p')]
  .filter((e) => e.checkVisibility({ visibilityProperty: true }) && !e.querySelector('small, code, ul'))
  .map((e) => e.innerText.trim())
  .filter((t) => /^[\\x20-\\x7e]+$/.test(t) && /[a-z]{4}/.test(t))
  .filter((t) => !/DreamBooth|LoRA|Torch|Hugging Face|Stable Diffusion|NAMES/.test(t))""".replace("NAMES", NAMES)
