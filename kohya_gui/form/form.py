"""Options -> a form, a form -> a config, a config -> the form's values. Only this file knows both sides.

The form is plain HTML, generated from the options, and collected and filled in the browser by page.js. Gradio's own
widgets would be one component each, and three tabs of two hundred options would take seconds to show (docs/decisions).

One form serves several families. An option that looks the same in all of them has one field, so that switching the
family keeps its value; one that differs, or that a family does not have, has a field per family. Style rules alone
decide which fields are visible (classes `only-<family>`), so switching costs nothing.
"""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from kohya_gui.form.recipes import OF_PURPOSES, REFERENCES, missing_references
from kohya_gui.form.sections import GROUPS, POSITIONS
from kohya_gui.i18n.sentences import data
from kohya_gui.server import picker
from library import families
from library.config.building import Layer, Reading, build_config, draft, find_missing, read_layers
from library.config.command import Launch
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike, Problem, either, raise_if_any
from library.config.run_config import RunConfig
from library.config.schema import changed, flatten_sections, option_values, options_of, section_options
from library.config.values import Option
from library.runs import gpu_slots

NOT_SET = "not set"
REPLACES_REQUIRED = "dataset_config"  # replaces fields that are required without it
IMAGE_SOURCES = ("train_data_dir", "reg_data_dir", "conditioning_data_dir", "in_json", REPLACES_REQUIRED, REFERENCES)
LAUNCH_FIELDS = {
    name: option for name, option in section_options(Launch, "distributed").items() if name != "mixed_precision"
}


@dataclass(frozen=True)
class FormField:
    """A field of the form: an option, and the families that it serves."""

    option: Option
    families: tuple[str, ...]  # the families in which the option looks like this
    ineffective: tuple[str, ...] = ()  # families among them in which it has no effect, or is always refused
    pending: str = ""  # why it cannot be used yet

    @property
    def is_advanced(self) -> bool:
        return self.option.advanced or bool(self.pending)


PRESET_ID = re.compile(r"[\w.-]{1,40}/[\w.-]{1,60}")  # unlike "defaults", and no id of a loaded config


@dataclass(frozen=True)
class Submission:
    """The contents of a form: the chosen family, its options, and the launch settings."""

    family: str
    values: JsonMapping
    launch: JsonMapping
    typed: frozenset[str] = frozenset()  # options that differ from the form's start
    anyway: bool = False  # whether images without captions were confirmed
    preset: str = ""  # the id of the preset that the form started from
    purpose: str = ""  # of the recipe on top of that preset


# Why: docs/decisions/2026-11-20-form-is-plain-html.md
class SettingsForm:
    """The form of one tab."""

    def __init__(
        self,
        tab: str,
        families: Mapping[str, str],
        configs: Mapping[str, type],
        basics: Mapping[str, int],
        extra: Mapping[str, str] = {},
        below: Mapping[str, str] = {},
    ) -> None:
        """`families` and `configs` give each family its title and config class; `basics` are the options on top, with
        their widths in sixths of a row; `extra` is HTML that comes first in a section, or below the images among
        these options ("images"), or last among them ("basics"), and `below` is HTML below an option."""
        self.tab, self.families, self.configs, self.basics, self.extra = tab, families, configs, basics, extra
        self.below = below
        self.fields = form_fields(configs)
        self.required = {family: _required_options(config) for family, config in configs.items()}
        config_classes = configs.values()
        self.replaced = set().union(*self.required.values()) - set().union(
            *(_required_options(c, {REPLACES_REQUIRED: "a file"}) for c in config_classes)
        )
        # Files that a family's base model needs come right after it.
        beside = [f for f in self.fields if f.option.section == "model" and f.option.name not in basics]
        self.parts = [field for field in beside if self._is_required(field)]

    # ---- from the browser

    def parse_submission(self, sent: Any) -> Submission:
        """Parse what the browser sent. Raises ConfigError for anything without a form's structure."""
        try:
            contents = json.loads(sent)
            launch, anyway = dict(contents["launch"]), contents.get("anyway") is True
            typed = frozenset(map(str, contents.get("typed", ())))
            start = PRESET_ID.fullmatch(str(contents.get("start") or ""))
            about = (launch, typed, anyway, start[0] if start else "", str(contents.get("purpose") or ""))
            submission = Submission(str(contents["family"]), dict(contents["values"]), *about)
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
            raise ConfigError("This is not what the form sends: load the page again.") from None
        if submission.family not in self.configs:
            template = "{family} is not a model family: choose {configs}"
            raise ConfigError(template, family=repr(submission.family), configs=either(self.configs))
        return submission

    def collect(self, submission: Submission) -> tuple[Any, list[MessageLike]]:
        notes: list[MessageLike] = []
        return build_config(self.configs[submission.family], submission.values, notes=notes), notes

    def ready(self, submission: Submission) -> tuple[Any, list[Problem]]:
        """Like `collect`, for a training about to start: missing required fields are problems, too."""
        reading = self.reading(submission)
        raise_if_any(reading.problems)
        return reading.config, reading.notes

    def reading(self, submission: Submission) -> Reading[Any]:
        """Return the reading of a form for a training about to start, with all its problems."""
        reading = read_layers(self.configs[submission.family], [Layer(submission.values)])
        problems = [*reading.problems, *gpu_slots.find_launch_problems(submission.launch)]
        # Do not report a field with a mistake as missing, too.
        named = reading.wrong.union(*(problem.options for problem in problems))
        missing = [*find_missing(reading.config), *missing_references(submission.purpose, reading.config)]
        problems += [problem for problem in missing if problem.option not in named]
        return replace(reading, problems=problems)

    def lenient_config(self, submission: Submission) -> Any:
        """Return the config of all values that are valid by themselves, even if they contradict each other; others are
        not set."""
        options, values = options_of(self.configs[submission.family]), {}
        for name, value in submission.values.items():
            if name in options:
                with contextlib.suppress(ConfigError):
                    values[name] = options[name].read(value)
        return draft(self.configs[submission.family], values)

    def wrong(self, submission: Submission) -> list[Problem]:
        reading = read_layers(self.configs[submission.family], [Layer(submission.values)])
        return [*reading.problems, *gpu_slots.find_launch_problems(submission.launch)]

    # ---- to the browser

    def fill(self, config: RunConfig, start: JsonMapping | None = None, named: Iterable[str] = ()) -> str:
        """Return a value for every field of a config's family, in the shape that page.js expects. `start` names the
        config and has the values from which the form marks changes; without it the form's start stays. `named` are
        options that the config's file sets, possibly to their defaults: they carry over to other families."""
        filled: JsonObject = {"family": config.family, "values": self.shown(config.family, option_values(config))}
        set_names = sorted({*named, *flatten_sections(changed(config))} & filled["values"].keys())
        return json.dumps({**filled, "start": dict(start), "given": set_names} if start else filled, default=str)

    def shown(self, family: str, values: JsonMapping) -> dict[str, bool | str]:
        options = options_of(self.configs[family])
        return {name: shown_value(options[name], value) for name, value in values.items() if name in options}

    def shown_launch(self, values: JsonMapping) -> dict[str, bool | str]:
        return {name: shown_value(LAUNCH_FIELDS[name], value) for name, value in values.items()}

    def places(self, family: str) -> dict[str, tuple[str, str]]:
        """Return the label and the element of each option of a family, in the order of the form."""
        fields = sorted(self.fields, key=self._position)
        placed = {f.option.name: (f.option.label, self._id(f)) for f in fields if family in f.families}
        return placed | {name: (option.label, f"{self.tab}-{name}") for name, option in LAUNCH_FIELDS.items()}

    def markup(self, starts: Mapping[str, Any] = {}) -> str:
        """Return the whole form as HTML; `starts` are its initial values by family."""
        first = next(iter(self.configs))
        scripts = {family: config.script for family, config in self.configs.items()}
        radios = "".join(
            f'<label><input type="radio" name="family" value="{family}"{" checked" * (family == first)}'
            f' data-defaults="{escape(defaults_title(family))}">'
            f"<span>{escape(self.families[family])}</span></label>"
            for family in self.configs
        )
        return (
            f'<form id="{self.tab}-form" class="settings" novalidate autocomplete="off"'
            f' data-starts="{escape(json.dumps(dict(starts), default=str))}"'
            f' data-scripts="{escape(json.dumps(scripts))}"'
            f"{data(starts)}>"
            f'<div class="choose"><fieldset class="family"><legend>Model family</legend>{radios}</fieldset>'
            f'<div class="recipe" hidden></div></div><p class="start"></p><div class="recipe-about"></div>'
            f"{self._basics()}"
            f'<div class="find">{self._search()}<label class="all"><input type="checkbox" name="advanced">'
            "<span>Show rarely used settings</span></label></div>"
            f"{''.join(self._group(*group) for group in GROUPS)}</form>"
        )

    def _search(self) -> str:
        hits = f"{self.tab}-hits"
        return (
            '<div class="search"><input type="search" role="combobox" aria-label="Search all settings"'
            f' placeholder="Search all settings" aria-controls="{hits}" aria-expanded="false" aria-autocomplete="list"'
            f' spellcheck="false"><ul id="{hits}" role="listbox" aria-label="Settings found" hidden></ul></div>'
        )

    def _basics(self) -> str:
        """Return the fields on top, in the order model, images, training."""
        first_field, *other_fields = [f for name in self.basics for f in self.fields if f.option.name == name]
        together = Counter(family for part in self.parts for family in part.families)
        spans = [
            self.basics[first_field.option.name],
            *(6 // together[part.families[0]] for part in self.parts),
            *(self.basics[f.option.name] for f in other_fields),
        ]
        members = zip((first_field, *self.parts, *other_fields), spans, strict=True)
        cards = {"model": "", "images": "", "training": self.extra.get("basics", "")}
        for field, span in reversed([*members]):
            card = "model" if field is first_field or field in self.parts else "training"
            card = "images" if field.option.name in IMAGE_SOURCES else card
            cards[card] = self._field(field, f"span-{span}") + cards[card]
        model, images, training = (f'<div class="card basics">{card}</div>' for card in cards.values())
        return model + images + self.extra.get("images", "") + training

    def _position(self, field: FormField) -> tuple[int, int]:
        at = [*self.basics].index(name) if (name := field.option.name) in self.basics else -1
        if field in self.parts or at == 0:
            return 0, -at  # the model before its parts
        return (1 if name in IMAGE_SOURCES else 2, at) if at > 0 else (3, POSITIONS[field.option.section])

    def _is_required(self, field: FormField) -> bool:
        return any(field.option.name in self.required[family] for family in field.families)

    def _group(self, heading: str, sections: Iterable[tuple[str, str, str]]) -> str:
        sections_html = "".join(self._section(*section) for section in sections)
        return f"<h2>{heading}</h2>{sections_html}"

    def _section(self, section: str, title: str, about: str) -> str:
        shown = [field for field in self.fields if field.option.name not in self.basics and field not in self.parts]
        members = [field for field in shown if field.option.section == section]
        if not members:
            return ""
        inside = self.extra.get(section, "") + "".join(self._field(f) for f in members)
        if section == "distributed":
            members += [FormField(option, tuple(self.configs)) for option in LAUNCH_FIELDS.values()]
            inside += "".join(
                self._field(FormField(option, tuple(self.configs)), launch=True) for option in LAUNCH_FIELDS.values()
            )
        panel = f"{self.tab}-section-{section}"
        # Why: docs/decisions/2026-11-20-family-switch-is-css.md
        return (
            f'<section class="{" ".join(["section", *self._classes(members)])}"><div class="fold"><h3><button'
            f' type="button" aria-expanded="false" aria-controls="{panel}">{title}</button></h3>'
            f'<p class="about">{about}</p><p class="set"></p></div>'
            f'<div class="grid" id="{panel}" hidden="until-found">{inside}</div></section>'
        )

    def _classes(self, members: list[FormField]) -> list[str]:
        """Return the style classes that control when these fields, or the section around them, are visible."""
        visible_families = [
            name for name in self.configs if any(name in m.families and name not in m.ineffective for m in members)
        ]
        is_rare = all(field.is_advanced for field in members)
        only = (
            [f"only-{name}" for name in visible_families or ("none",)]
            if len(visible_families) < len(self.configs)
            else []
        )
        return only + ["advanced"] * is_rare

    def _id(self, field: FormField) -> str:
        is_family_specific = len(field.families) < len(self.configs)
        return "-".join([self.tab, *(field.families if is_family_specific else ()), field.option.name])

    def _field(self, field: FormField, span: str = "", launch: bool = False) -> str:
        option, element = field.option, self._id(field)
        wide = ["wide"] if option.kind in ("file", "files", "folder", "text") else []
        required = ["required"] if self._is_required(field) else []
        # Options on top of the form are shown even if they are advanced.
        visibility_classes = [name for name in self._classes([field]) if not (span and name == "advanced")]
        classes = " ".join(["field", *required, *visibility_classes, *([span] if span else wide)])
        facts = {
            "id": element,
            "data-launch" if launch else "data-option": option.name,
            "data-families": " ".join(field.families),
            "data-default": as_text(shown_value(option, option.default)),
            "aria-describedby": f"{element}-help",
        }
        if required:
            facts["aria-required"] = "true"
        if option.name in self.replaced:
            facts["data-unless"] = REPLACES_REQUIRED
        shown_with = option.shown_with or (OF_PURPOSES.get(option.name, {}) if span else {})
        shown = attributes({"data-shown-with": condition(shown_with)} if shown_with else {})
        if field.pending:
            facts["disabled"] = ""
        text = (
            Message("Not usable yet: {pending}.", pending=field.pending)
            if field.pending
            else Message(as_sentence(option.help, option.choices))
        )
        about = f'<small id="{element}-help"{data(text)}>{escape(str(text))}</small>'
        if option.type is bool:
            box = f'<input type="checkbox"{attributes(facts)}{" checked" if option.default else ""}>'
            label = f"<label>{box}<span>{escape(option.label)}</span></label>"
            return f'<div class="{classes} check"{shown}>{label}{about}{self.below.get(option.name, "")}</div>'
        return (
            f'<div class="{classes}"{shown}><label for="{element}">{escape(option.label)}</label>'
            f"{control(option, facts)}{picker.browse_button(option.name, option.label, option.kind)}{about}"
            f"{self.below.get(option.name, '')}</div>"
        )


def defaults_title(family: str) -> str:
    return "sd-scripts' defaults" if families.facts_of(family).has_sd_scripts_defaults else "Defaults"


def condition(shown_with: Mapping[str, Iterable[str]]) -> str:
    # The conditions as page.js parses them.
    return ";".join(f"{name}={' '.join(values)}" for name, values in shown_with.items())


def _required_options(config: type, values: Mapping[str, Any] = {}) -> set[str]:
    return {problem.option for problem in find_missing(build_config(config, values))}


def form_fields(configs: Mapping[str, type]) -> list[FormField]:
    """Return the fields for these families, in the order of declaration."""
    faces: dict[Any, FormField] = {}
    names = dict.fromkeys(name for config in configs.values() for name in options_of(config))
    for name in names:
        for family, config in configs.items():
            if not (option := options_of(config).get(name)):
                continue
            reason = config.pending.get(name, "")
            appearance = (option.label, option.help, option.default, option.choices, condition(option.shown_with))
            face = (name, option.section, *appearance, reason)
            field = faces.get(face, FormField(option, ()))
            ineffective = (family,) if name in config.ineffective or name in config.unfit else ()
            faces[face] = FormField(option, (*field.families, family), (*field.ineffective, *ineffective), reason)
    return list(faces.values())


# Why: docs/decisions/2026-11-20-numbers-are-text-fields.md
def control(option: Option, facts: Mapping[str, str]) -> str:
    """Return the input element of a field.

    Numbers are text boxes on purpose. A browser's number box swallows letters, so that "abc" arrives as nothing and the
    default runs instead of what is on screen; it also changes its value under the mouse wheel. As text, a number is
    parsed and refused by the same rules, in the same words, as in the shell.
    """
    value = as_text(shown_value(option, option.default))
    if option.choices and not option.many and not option.open:
        unset = [("", NOT_SET)] if option.optional else []
        entries = unset + [(str(choice), option.word(choice)) for choice in option.choices]
        chosen = "".join(
            f"<option{attributes({'value': v})}{' selected' * (v == value)}>{escape(t)}</option>" for v, t in entries
        )
        return f"<select{attributes(facts)}>{chosen}</select>"
    plain = {"spellcheck": "false", "autocapitalize": "off", "autocorrect": "off", "autocomplete": "off"}
    if option.kind == "text":
        return f'<textarea rows="3"{attributes({**facts, **plain})}>{escape(value)}</textarea>'
    if option.optional and option.type in (int, float):
        plain["placeholder"] = NOT_SET
    if option.type in (int, float) and not option.many:
        plain["inputmode"] = "numeric" if option.type is int else "decimal"
    if option.kind == "secret":
        plain |= {"type": "password", "autocomplete": "new-password"}
    datalist = ""
    if option.choices:
        plain["list"] = f"{facts['id']}-list"
        suggestions = "".join(_suggestion(str(choice), option.word(choice)) for choice in option.choices)
        datalist = f'<datalist id="{plain["list"]}">{suggestions}</datalist>'
    return f"<input{attributes({**facts, **plain, 'value': value})}>{datalist}"


def _suggestion(value: str, word: str) -> str:
    return f"<option{attributes({'value': value} if word != value else {})}>{escape(word)}</option>"


def attributes(values: Mapping[str, str]) -> str:
    return "".join(f' {name}="{escape(value)}"' for name, value in values.items())


def shown_value(option: Option, value: Any) -> bool | str:
    # A checkbox holds a boolean, every other field a text, "" if the option is not set.
    return bool(value) if option.type is bool else option.text(value)


def as_text(value: bool | str) -> str:
    # page.js compares a checkbox's value as the text "true" or "false".
    return str(value).lower() if isinstance(value, bool) else value


def as_sentence(text: str, names: Iterable[Any] = ()) -> str:
    """Return a help text with a capital first letter and a final full stop, unless it begins with a sign or name."""
    for name in names:
        text = text.replace(f" ({name})", "")  # the page shows words for it
    first = text.split(" ", 1)[0].rstrip(",:")
    start = text[:1].upper() + text[1:] if first.isalpha() and first.islower() and first not in names else text
    return start if start.endswith((".", ")")) else start + "."
