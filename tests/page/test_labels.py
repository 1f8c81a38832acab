"""Sentences on the page name an option by its field's label, in every language; in the shell, by its own name."""

import ast
import re
from dataclasses import fields

import pytest

from kohya_gui.form.datasets import FIELD_LABELS
from kohya_gui.form.form import SettingsForm
from kohya_gui.form.tabs import FAMILY_TITLES, TABS
from kohya_gui.i18n import texts
from kohya_gui.i18n.sentences import data
from library.config.dataset import DatasetConfig, SubsetConfig
from library.config.ineffective import ineffective_options
from library.config.names import OF_DATASET_FILES
from library.config.problems import NAMED, Message, Problem, option_name, option_names, option_values
from tests import source
from tests.page import page_texts

# Names that are words as well: only an argument, or the beginning of a sentence in front of a colon, is the option.
WORDS = {"compile", "resume", "resolution", "seed", "vae", "weights", "v2", "ae", "cpu"}
OF_EACH = [(tab, family) for tab in TABS for family in tab.configs]
SHOW = """([html, tab]) => {
  const box = document.createElement('div');
  box.className = 'tried';
  box.innerHTML = html;
  document.querySelector(`.training[data-tab="${tab}"]`).append(box);
}"""
READ = "() => [...document.querySelectorAll('.tried li')].map((one) => one.textContent)"


def places(tab, family):
    return SettingsForm(tab.id, FAMILY_TITLES, tab.configs, tab.basics).places(family)


def show(visitor, tab, messages):
    """Show texts in a tab like messages; returns what is then on screen."""
    html = f"<div{data(*messages)}><ul>" + "".join(f"<li>{text}</li>" for text in messages) + "</ul></div>"
    visitor.page.evaluate("document.querySelector('.tried')?.remove()")
    visitor.page.evaluate(SHOW, [html, tab])
    visitor.page.evaluate("() => new Promise((done) => setTimeout(done, 50))")
    return visitor.page.evaluate(READ)


def sentences(names):
    """Each name as an argument and, where no other word looks like it, within a sentence and as a flag."""
    for name in names:
        yield name, Message("needs {option}", option=option_name(name)), "needs {}"
        yield name, option_values({name: "7"}), "{} = 7"
        if name not in WORDS:
            yield name, Message(f"cannot be used with {name}, or {name} = 7"), "cannot be used with {0}, or {0} = 7"
            yield name, Message(f"add --{name}."), "add {}."
        else:
            yield name, Message(f"{name}: {{why}}", why="so"), "{}: so"


@pytest.mark.browser
@pytest.mark.parametrize("tab", TABS, ids=lambda tab: tab.id)
def test_every_option_is_called_as_its_field_is(visit, tab):
    visitor = visit()
    visitor.tab(tab.title)
    for family in [family for other, family in OF_EACH if other is tab]:
        visitor.family(FAMILY_TITLES[family])
        labels = {name: label for name, (label, _) in places(tab, family).items()}
        assert len(labels) > 100 and labels.keys() >= {"seed", "mixed_precision", "num_processes"}
        tried = [*sentences(labels)]
        expected = [shape.format(labels[name]) for name, _, shape in tried]
        assert show(visitor, tab.id, [text for _, text, _ in tried]) == expected, (tab.id, family)


@pytest.mark.browser
@pytest.mark.parametrize("tab", TABS, ids=lambda tab: tab.id)
def test_an_option_that_only_folders_have_is_called_as_in_their_rows(visit, tab):
    visitor = visit()
    visitor.tab(tab.title)
    in_form = {name for family in tab.configs for name in places(tab, family)}
    only_in_rows = {name: label for name, label in FIELD_LABELS.items() if name not in in_form and "_" in name}
    assert "image_dir" in only_in_rows
    assert ("conditioning_data_dir" in only_in_rows) == (tab.id != "lllite")
    said = show(visitor, tab.id, [Message(f"set {name}") for name in only_in_rows])
    assert said == [f"set {label}" for label in only_in_rows.values()]


@pytest.mark.browser
@pytest.mark.parametrize("language", [name for name in texts.LANGUAGES if name != "en"])
def test_in_other_languages_too(visit, language):
    visitor, table, tab = visit(), texts.load_catalogue(language), TABS[0]
    visitor.page.locator("select.language").select_option(language)
    visitor.page.wait_for_function("language => document.documentElement.lang === language", arg=language)
    # One entry serves both spellings.
    labels = {
        name: table.get(label) or table.get(label[0].lower() + label[1:], label)
        for name, (label, _) in places(tab, "sdxl").items()
    }
    messages = [option_values({name: "7"}) for name in labels]
    assert show(visitor, tab.id, messages) == [f"{label} = 7" for label in labels.values()]
    templates = (
        "needs network_weights, the file to take the ranks from",
        "cannot be used with {name}: set ema_decay = 0",
    )
    for template in templates:
        line = next(line for english, line in table.items() if english.startswith(template[:24]))
        messages = [Message(english) for english in table if english.startswith(template[:24])]
        name = "network_weights" if "network" in template else "ema_decay"
        assert name in line
        assert show(visitor, tab.id, messages)[0].count(labels[name]) == line.count(name)
    visitor.page.locator("select.language").select_option("en")  # English again
    visitor.page.wait_for_function("() => document.documentElement.lang === 'en'")
    assert visitor.page.evaluate(READ)


@pytest.mark.browser
def test_what_is_no_name_of_an_option_stays(visit):
    word = "network_dim"  # also the name of a file, a folder or a word of a caption
    messages = [
        Message("{path} does not exist", path=f"/data/{word}/a.png"),
        Message("{name} is not text", name=word),
        Message("run `kohya train --network_dim 8` in a shell, or set network_dim"),
        Message("the tensor lora.network_dim and network_dim.safetensors"),
        Message("compile the blocks, and lower the resolution"),
        Message("{name}", name=f"{word} of mine"),
        Problem("network_dim", "must be at least {least}", least=1, place="in cat.toml: "),
        Problem("network_dim", "must be at least {least}", least=1, place="--"),
    ]
    assert show(visit(), "lora", messages) == [
        str(messages[0]),
        str(messages[1]),
        "run `kohya train --network_dim 8` in a shell, or set Rank",
        str(messages[3]),
        str(messages[4]),
        str(messages[5]),
        "in cat.toml: Rank (network_dim) must be at least 1",
        "--network_dim must be at least 1",
    ]


@pytest.mark.browser
def test_the_name_is_behind_a_label_that_two_fields_have_and_else_in_the_title(visit):
    visitor = visit()
    messages = [Message("{option} and network_alpha are set", option=option_name("network_dim"))]
    assert show(visitor, "lora", messages) == ["Rank and Alpha are set"]
    assert visitor.page.locator(".tried li").get_attribute("title") == "network_alpha, network_dim"
    visitor.page.evaluate("document.querySelector('label[for=lora-network_alpha]').firstChild.data = 'Rank'")
    visitor.family("FLUX.1")  # makes the page read the labels again
    assert show(visitor, "lora", messages) == ["Rank (network_dim) and Rank (network_alpha) are set"]
    visitor.page.reload()


@pytest.mark.browser
def test_messages_below_fields_and_beside_the_buttons_have_labels(visit, served):
    visitor = visit()
    page = visitor.page
    visitor.put(full_bf16=True, mixed_precision="no")
    page.locator("#lora-full_bf16-help", has_text="Mixed precision").wait_for(state="attached")
    visitor.click("Print command")
    visitor.until("Mixed precision = bf16")
    assert "mixed_precision" not in visitor.said()
    fix = page.locator(".message:visible .fix").first
    assert fix.inner_text().startswith("Fix Mixed precision = bf16") and fix.locator("[title=mixed_precision]").count()
    page.locator("#lora-compile_mode-help", has_text="Enable torch.compile is off").wait_for(state="attached")
    (served[1] / "labels.toml").write_text(
        "lr_restart_cycles = 3\nnetwork_dims = 24\n[a]\ncaption_tag_dropout_rate = 2"
    )
    page.get_by_placeholder("Config file").locator("visible=true").fill(str(served[1] / "labels.toml"))
    visitor.click("Load config")
    visitor.until("Loaded labels.toml").until("Fix Rank = 24")
    # As it has to be written in the file, not as the field calls it.
    visitor.until("lr_restart_cycles is not an option (did you mean lr_scheduler_num_cycles?)")


def test_arguments_that_are_names_of_options_are_reported_to_be():
    """{option} and {options} in a template are always filled by these functions."""
    makers = ("option_name", "option_names", "option_values", "describe", "Message", "shown", "said", "ours", "option")
    wrong = []
    for folder in ("library", "kohya_gui"):
        for path in (source.ROOT / folder).rglob("*.py"):
            for name, call in page_texts.calls(path):
                if name not in ("Message", "Problem", "ConfigError"):
                    continue
                for word in call.keywords:
                    if word.arg in ("option", "options") and isinstance(word.value, ast.Constant | ast.JoinedStr):
                        wrong.append(f"{path}:{call.lineno}")
    assert makers and not wrong, "write option_name(...)"


def test_an_option_without_a_field_comes_with_the_place_to_set_it():
    """Nobody finds on the page what only a dataset file may hold."""
    labels = {*FIELD_LABELS}.union(*(places(tab, family) for tab, family in OF_EACH))
    in_files = {field.name for kind in (DatasetConfig, SubsetConfig) for field in fields(kind)} | {*OF_DATASET_FILES}
    unlabelled = {name for name in in_files - labels if "_" in name}
    assert "control_resolution" in unlabelled
    templates = [text for text in texts.load_catalogue("zh") if unlabelled & {*re.findall(r"\w+", text)}]
    assert len(templates) > 3 and not [text for text in templates if "dataset_config" not in text]


def test_in_the_shell_the_names_stay():
    assert str(Message("needs {option}", option=option_name("network_dim"))) == "needs network_dim"
    assert str(option_values({"network_dim": "8", "seed": "7"})) == "network_dim = 8, seed = 7"
    assert str(option_names(["seed", "network_dim"])) == "seed, network_dim"
    reasons = ineffective_options(TABS[0].configs["sdxl"]())
    assert str(reasons["compile_mode"]) == "compile is off" and all(
        isinstance(reason, Message) for reason in reasons.values()
    )


def test_every_name_without_an_underscore_is_known_as_a_word_or_as_a_name():
    script = (source.ROOT / "kohya_gui/i18n/labels.js").read_text(encoding="utf-8")
    names = set(re.search(r"\)\+\|([\w|]+)\)\(\?", script)[1].split("|"))
    plain = {name for tab, family in OF_EACH for name in places(tab, family) if "_" not in name}
    assert not names & WORDS and plain <= names | WORDS
    assert all(NAMED.search(f"use {name}") for name in names) and not any(map(NAMED.search, WORDS))
