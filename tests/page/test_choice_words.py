"""Choices of options and of tools as words: the page shows no raw value, and sends what sd-scripts knows."""

import re
from html.parser import HTMLParser

import pytest

from kohya_gui.form.form import SettingsForm, as_sentence
from kohya_gui.form.tabs import FAMILY_TITLES, TABS
from kohya_gui.tools.commands import COMMANDS, tools_tab_html
from library.config.schema import options_of
from library.families import RUNS, config_class

NAME = re.compile(r"256 tokens|(?:fp|bf|float|bfloat)\d+|\d+|\.\w+|[a-z]\w*[A-Z]\w*|networks\.lora\w*|lycoris\.kohya")


class Choices(HTMLParser):
    """The choices of lists and suggestions in a piece of HTML: value -> text."""

    def __init__(self, markup):
        super().__init__()
        self.found, self.value = {}, None
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        """A choice begins, with the value that is sent."""
        self.value = dict(attrs).get("value", "") if tag == "option" else None

    def handle_data(self, data):
        """The words of a choice."""
        if self.value is not None:
            self.found.setdefault(self.value or data, set()).add(data)


@pytest.mark.parametrize("place", [*(tab.id for tab in TABS), "tools"])
def test_no_list_shows_a_raw_value(place):
    tab = next((tab for tab in TABS if tab.id == place), None)
    markup = SettingsForm(tab.id, FAMILY_TITLES, tab.configs, tab.basics).markup() if tab else tools_tab_html()
    found = Choices(markup).found
    raw = {text for texts in found.values() for text in texts if not re.match(r"[A-Z(]", text)}
    assert len(found) > 8
    assert {text for text in raw if not NAME.fullmatch(text)} <= {"not set", "as in the input"}
    assert not {text for text in raw if "_" in text and not text.startswith("networks.")}


def test_the_words_of_an_option_differ():
    for script in RUNS:
        for option in options_of(config_class(script)).values():
            words = [option.word(choice) for choice in option.choices]
            assert len(set(words)) == len(words), (script, option.name)
            assert all(option.read(choice) == choice for choice in option.choices)


@pytest.mark.parametrize(
    ("script", "name", "value", "word"),
    [
        ("sdxl_train_network", "lr_scheduler", "cosine_with_restarts", "Cosine with restarts"),
        ("sdxl_train_network", "optimizer_type", "AdamW8bit", "AdamW8bit"),
        ("sdxl_train_network", "compile_dynamic", "false", "One graph per size"),
        ("sdxl_train_network", "cuda_graphs", "false", "Off"),
        ("sdxl_train_network", "learning_rate", 1e-4, "0.0001"),
        ("sdxl_train_network", "lr_scheduler", "my.Scheduler", "my.Scheduler"),
        ("flux_train_network", "timestep_sampling", "flux_shift", "FLUX shift"),
        ("flux_train_network", "model_type", "kontext", "FLUX.1 Kontext"),
        ("sdxl_train", "save_model_as", "diffusers", "Diffusers folder"),
    ],
)
def test_a_value_is_shown_in_words(script, name, value, word):
    assert options_of(config_class(script))[name].word(value) == word


def letters(text):
    """What two spellings of the same word share."""
    return re.sub("[^a-z0-9]", "", text.lower())


@pytest.mark.parametrize("script", RUNS)
def test_help_of_a_list_speaks_of_what_the_list_shows(script):
    """Its values were explained by names that the list does not have, and "Empty" for a list that never is."""
    for option in options_of(config_class(script)).values():
        help_text = as_sentence(option.help, option.choices)
        if option.choices and not option.open:
            assert "mpty" not in help_text, option.name
        for value in map(str, option.choices):
            if not letters(option.word(value)).endswith(letters(value)):
                name = re.escape(value)
                explained = re.compile(rf"(^|(?<=[.;:] )){name}(?=:| )|\({name}\)")
                assert not explained.search(help_text), (option.name, value)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_tool_fits_its_field(command):
    """No default is in it that the field shows, nor a value for which a list has words."""
    for form in COMMANDS[command].all().values():
        values = {value for field in form.fields for value in field.choices if "_" in value}
        for field in form.fields:
            assert not field.default or not field.help.endswith(f"({field.default})"), field
            assert not any(value in field.help for value in values - {"alpha_mask"}), field
            if field.kind == "choice":
                assert "empty" not in field.help and "default" not in field.help, field
