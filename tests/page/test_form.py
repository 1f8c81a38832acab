"""The form: the fields that it shows, what it sends, and that nothing is lost or added between the two."""

import json
from html.parser import HTMLParser

import pytest

from kohya_gui.form import start_preset
from kohya_gui.form.form import SettingsForm
from kohya_gui.form.tabs import FAMILY_TITLES, TABS
from library.config.building import build_config, find_missing
from library.config.formats import to_toml
from library.config.problems import ConfigError
from library.config.schema import changed, flatten_sections, option_values, options_of
from library.recipes import preset_files
from tests.families.expectations import expected

FORMS = {tab.id: SettingsForm(tab.id, FAMILY_TITLES, tab.configs, tab.basics) for tab in TABS}
CASES = [(tab, family) for tab, form in FORMS.items() for family in form.configs]


class Page(HTMLParser):
    """A form's fields as a browser would have them: element id -> its option and its value."""

    VOID = ("input", "option")

    def __init__(self, markup):
        super().__init__()
        self.fields, self.ids, self.words, self.classes = {}, [], [], {}
        self._open, self._last = [], None
        self.feed(markup)

    def handle_starttag(self, tag, attributes):
        by_name = dict(attributes)
        inside = [by_name.get("class", "").split(), *(c for _, c in self._open)]
        if "id" in by_name:
            self.ids.append(by_name["id"])
        if "data-option" in by_name or "data-launch" in by_name:
            value = "checked" in by_name if by_name.get("type") == "checkbox" else by_name.get("value", "")
            self.fields[by_name["id"]] = {**by_name, "value": value}
            self.classes[by_name["id"]] = {c for classes in inside for c in classes}
            self._last = by_name["id"]
        if tag == "option" and "selected" in by_name:
            self.fields[self._last]["value"] = by_name["value"]
        if tag not in self.VOID:
            self._open.append((tag, by_name.get("class", "").split()))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self._open.pop()[0] == tag, f"{tag} closes nothing"

    def handle_data(self, data):
        self.words.append(data)

    def send(self, family):
        """What page.js would send."""
        mine = [f for f in self.fields.values() if family in f["data-families"].split()]
        return json.dumps(
            {
                "family": family,
                "values": {f["data-option"]: f["value"] for f in mine if "data-option" in f},
                "launch": {f["data-launch"]: f["value"] for f in mine if "data-launch" in f},
            }
        )


PAGES = {tab: Page(form.markup()) for tab, form in FORMS.items()}


def sent(family, **values):
    return json.dumps({"family": family, "values": values, "launch": {}})


STARTS = {tab.id: start_preset.starts(tab.id, tab.configs) for tab in TABS}


@pytest.mark.parametrize("tab", TABS, ids=lambda tab: tab.id)
def test_options_that_every_training_of_a_tab_refuses_are_not_shown(tab):
    for field in FORMS[tab.id].fields:
        hidden = {family for family in field.families if field.option.name in tab.configs[family].unfit}
        assert hidden <= {*field.ineffective}, field.option.name


@pytest.mark.parametrize(("tab", "family"), CASES)
def test_an_untouched_form_is_exactly_its_start_preset_and_without_one_exactly_the_defaults(tab, family):
    """How page.js applies a start is tested in test_starting.py; here, how the server parses the fields."""
    form, start = FORMS[tab], STARTS[tab][family]
    text = PAGES[tab].send(family)
    bare, notes = form.collect(form.parse_submission(text))
    assert changed(bare) == {} and notes == []
    assert set(form.parse_submission(text).values) == set(options_of(form.configs[family]))  # every option has a field
    begun = json.loads(text)
    begun["values"] |= start["values"]
    config, notes = form.collect(form.parse_submission(json.dumps(begun)))
    preset = next(p for p in preset_files.of_kind(tab, [family]) if p.id == start["id"])
    preset_options = flatten_sections(changed(start_preset.apply_preset(preset, form.configs[family], {}, [])))
    assert flatten_sections(changed(config)) == {**preset_options, "output_name": f"{family}-{tab}"} and notes == []


@pytest.mark.parametrize(("tab", "family"), CASES)
def test_every_option_comes_back_as_it_was_filled_in(tab, family):
    form, tried = FORMS[tab], 0
    config_class = form.configs[family]
    for name, option in options_of(config_class).items():
        try:
            config = build_config(config_class, {name: another(option)}, notes=[])
        except ConfigError:
            continue  # only valid together with other options
        filled = json.loads(form.fill(config))
        back, _ = form.collect(form.parse_submission(json.dumps({**filled, "launch": {}})))
        assert back == config, name
        tried += changed(config) != {}
    assert tried > 0.75 * len(options_of(config_class))


def another(option):
    """Some value that is not the default."""
    if others := [choice for choice in option.choices if choice != option.default]:
        return others[0]
    if option.many:
        return ("a b=1", 'say "x"') if option.type is str else (0.5, 0.25)
    return {bool: not option.default, int: 7, float: 0.5}.get(option.type, "512")


@pytest.mark.parametrize("tab", FORMS)
def test_ids_are_unique_and_every_field_is_explained(tab):
    page = PAGES[tab]
    assert len(page.ids) == len(set(page.ids))
    assert all(f["aria-describedby"] in page.ids for f in page.fields.values())


@pytest.mark.parametrize(("tab", "family"), CASES)
def test_every_place_that_a_message_names_exists(tab, family):
    for name, (label, element) in FORMS[tab].places(family).items():
        field = PAGES[tab].fields[element]
        assert name in (field.get("data-option"), field.get("data-launch")) and label


COMPILE = (
    "compile",
    "compile_backend",
    "compile_mode",
    "compile_dynamic",
    "compile_fullgraph",
    "compile_cache_size_limit",
    "compile_fallback",
)


@pytest.mark.parametrize("tab", FORMS)
def test_torch_compile_settings_are_in_every_tab_for_every_family(tab):
    page = PAGES[tab]
    assert "Torch Compile Settings" in page.words
    for name in COMPILE:
        assert page.fields[f"{tab}-{name}"]["data-families"].split() == [*FORMS[tab].configs]
        assert not any(c.startswith(("only-", "advanced")) for c in page.classes[f"{tab}-{name}"])


def test_auto_and_zero_are_not_written():
    values = {"compile": True, "compile_dynamic": "auto", "compile_cache_size_limit": "0"}
    config, _ = FORMS["lora"].collect(FORMS["lora"].parse_submission(sent("flux", **values)))
    assert to_toml(config) == "[compile]\ncompile = true\n"


def test_a_typed_zero_survives():
    config, _ = FORMS["lora"].collect(
        FORMS["lora"].parse_submission(sent("sdxl", max_grad_norm="0", network_alpha="0"))
    )
    assert flatten_sections(changed(config)) == {"max_grad_norm": 0.0, "network_alpha": 0.0}


def test_a_family_shows_only_what_means_something_to_it():
    page = PAGES["lora"]
    assert "only-flux" in page.classes["lora-flux-clip_l"]
    assert "only-sdxl" in page.classes["lora-noise_offset"]  # FLUX.1 has the option, without effect
    assert not page.classes["lora-learning_rate"] & {"only-sdxl", "only-flux"}


def problems(tab, text):
    form = FORMS[tab]
    with pytest.raises(ConfigError) as error:
        form.ready(form.parse_submission(text))
    return str(error.value).splitlines()


@pytest.mark.parametrize(("tab", "family"), CASES)
def test_an_empty_form_names_everything_that_is_missing(tab, family):
    named = {line.split()[0] for line in problems(tab, PAGES[tab].send(family))}
    required = {"pretrained_model_name_or_path", "train_data_dir", "output_dir", "resolution"}
    tab_options = {
        "textual-inversion": {"token_string"},
        "lllite": {"conditioning_data_dir", "cond_emb_dim", "network_dim"},
    }
    assert named == required | {*expected(family, "parts")} | tab_options.get(tab, set())
    assert all(FORMS[tab].places(family)[name][1] in PAGES[tab].fields for name in named)


def test_wrong_and_missing_values_are_all_reported_at_once():
    text = sent("sdxl", resolution="foo", max_train_steps="-5", learning_rate="abc", train_batch_size="", seed="1.5")
    reported = problems("lora", text)
    named = [line.split()[0] for line in reported]
    for name in ("resolution", "max_train_steps", "learning_rate", "train_batch_size", "seed", "output_dir"):
        assert named.count(name) == 1, reported


def test_launch_options_are_checked_with_the_rest():
    text = json.dumps({"family": "sdxl", "values": {}, "launch": {"num_processes": "none"}})
    assert any(line.startswith("num_processes") for line in problems("lora", text))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"family": "sdxl"}',
        "x" * 10,
        None,
        3,
        "[" * 100_000,
        '{"family":"sdxl","values":3,"launch":{}}',
        '{"family":"../x","values":{},"launch":{}}',
        '{"family":["sdxl"],"values":{},"launch":{}}',
    ],
)
def test_whatever_is_not_a_form_is_refused_in_words(text):
    with pytest.raises(ConfigError):
        FORMS["lora"].parse_submission(text)


@pytest.mark.parametrize("value", [[], {}, [1, 2], {"a": 1}, None, 1e999, True, "\0", "9" * 5000, "<b>"])
def test_no_value_breaks_the_form(value):
    form = FORMS["lora"]
    for name in options_of(form.configs["flux"]):
        try:
            config, _ = form.collect(
                form.parse_submission(json.dumps({"family": "flux", "values": {name: value}, "launch": {}}))
            )
        except ConfigError:
            continue
        assert option_values(config)[name] is not None or value in (None, [], "")


def test_secrets_are_not_shown():
    for element, field in PAGES["lora"].fields.items():
        if field.get("data-option") in ("wandb_api_key", "huggingface_token"):
            assert field["type"] == "password", element


@pytest.mark.parametrize("tab", FORMS)
def test_required_files_are_shown_beside_the_base_model_of_their_family_only(tab):
    form, page = FORMS[tab], PAGES[tab]
    for family, config in form.configs.items():
        needed = {problem.option for problem in find_missing(build_config(config, {}, notes=[]))}
        for name in options_of(config):
            if options_of(config)[name].section == "model":
                classes = page.classes[form.places(family)[name][1]]
                assert ("basics" in classes) == (name in needed) == ("required" in classes), (family, name)
