"""Build a config from a file of another trainer, with a report that covers each of its settings."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from library import families
from library.config.building import build_config, draft, understood
from library.config.ineffective import ineffective_options
from library.config.json_types import JsonMapping, JsonObject, JsonValue
from library.config.problems import (
    ConfigError,
    Message,
    MessageLike,
    Problem,
    join_messages,
    option_values,
    together,
)
from library.config.run_config import INEFFECTIVE_EVERYWHERE, RunConfig
from library.config.schema import options_of
from library.config.values import Option, closest, did_you_mean, parse_finite
from library.importers.result import WITHOUT_EFFECT, Imported, KeyOutcome

Configs = Mapping[str, type]  # script -> its config class
NOT_HERE = "not supported by this trainer"
SECRET = "tokens and keys stay out of configs; set the environment variable of the service (WANDB_API_KEY, HF_TOKEN)"

FULL = "finetune"  # the kind of training that trains a whole model
UNETS = ("sdxl", "sd15")  # families with the U-Net of Stable Diffusion


def family_of_script(script: str) -> str:
    """Return the family of a script; "" for a script of another program."""
    return next((facts.name for facts in families.all_families() if script in facts.scripts), "")


def script_of_family(family: str, adapters: bool) -> str:
    """Return the script that trains adapters for a family, or else the whole model."""
    scripts = families.facts_of(family).scripts
    return next(script for script in scripts if families.config_class(script).kind == ("lora" if adapters else FULL))


@dataclass(slots=True)
class ImportBuilder:
    """The settings of one file during the import. Each key gets one outcome, and each option at most one value."""

    source: JsonMapping
    script: str
    trainer: str
    values: JsonObject = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)  # option -> the key that set it
    outcomes: dict[str, KeyOutcome] = field(default_factory=dict)
    notes: list[MessageLike] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)  # of the file itself, to be fixed before a training
    guess: MessageLike = ""  # why the script is only a guess; "" where the file states it
    texts: dict[str, str] = field(default_factory=dict)  # option -> content of a file that it names
    keeps_ineffective: bool = False  # whether options without effect are kept, as in our own files
    absent: frozenset[str] = frozenset()  # keys of `source` that are the trainer's defaults and not in the file
    names: dict[str, str] = field(default_factory=dict)  # key -> its old name, where the file has that

    @property
    def family(self) -> str:
        return family_of_script(self.script)

    @property
    def is_unet(self) -> bool:
        return self.family in UNETS

    @property
    def adapters(self) -> bool:
        return self.script.endswith("_network")

    def get(self, key: str) -> Any:
        value = self.source.get(key)
        return None if is_empty(value) else value

    def number(self, key: str) -> float | None:
        return to_number(self.source.get(key))

    def keep(self, key: str, value: Any = None) -> None:
        self._set(key, KeyOutcome(key, "kept"), {key: self.source.get(key) if value is None else value})

    def rename(self, key: str, option: str, value: Any = None) -> None:
        """Set an option of another name, or of the same if the two happen to agree."""
        value = self.source.get(key) if value is None else value
        outcome = KeyOutcome(key, "kept") if key == option else KeyOutcome(key, "renamed", option)
        self._set(key, outcome, {option: value})

    def change(self, key: str, text: MessageLike, values: JsonMapping | None = None) -> None:
        self._set(key, KeyOutcome(key, "changed", text), values or {})

    def convert(self, key: str, values: JsonMapping) -> None:
        """Set the options that a key becomes; the report lists them with their values."""
        self.change(key, describe(values), values)

    def choice_of_script(self, values: JsonMapping | None = None) -> Message:
        """Return the text of a key that chooses the script, and these options with it."""
        chosen = join_messages([self.script, *([describe(values)] if values else [])])
        return Message("chooses the script: {script}", script=chosen)

    def chooses_script(self, key: str, values: JsonMapping | None = None) -> None:
        self.set_by(key, self.choice_of_script(values), values or {})

    def explain(self, text: MessageLike, *keys: str) -> None:
        """Record that another key's values cover these keys; those not in `source` are skipped."""
        for key in keys:
            if key in self.source:
                self.change(key, text)

    def assume(self, key: str, value: Any) -> None:
        if key not in self.source:
            self.source, self.absent = {**self.source, key: value}, self.absent | {key}

    def ignore(self, key: str, reason: MessageLike) -> None:
        is_off = is_empty(self.source.get(key)) or self.source.get(key) in (False, 0, "0")
        self.outcomes[key] = KeyOutcome(key, "empty") if is_off else KeyOutcome(key, "ignored", reason)

    def empty(self, *keys: str) -> None:
        """Record that the keys set nothing."""
        for key in keys:
            if key in self.source:
                self.outcomes.setdefault(key, KeyOutcome(key, "empty"))

    def left(self) -> list[str]:
        return [key for key in self.source if key not in self.outcomes]

    def given(self, key: str) -> bool:
        return key in self.source and key not in self.absent

    def put(self, key: str, values: JsonMapping) -> None:
        """Set options that a key decides; it gets no outcome by this."""
        for option, value in values.items():
            self.values[option], self.keys[option] = value, key

    def set_by(self, key: str, text: MessageLike, values: JsonMapping) -> None:
        """Set options that follow from the trainer itself, or from a key that is not in the file."""
        if key in self.source:
            self.change(key, text, values)
        else:
            self.put(key, values)
            self.outcomes.setdefault(key, KeyOutcome(key, "changed", text))

    def derive(self, key: str, values: JsonMapping) -> None:
        """Set options like `set_by`; the report lists them with their values."""
        self.set_by(key, describe(values), values)

    def freeze_encoders(self) -> None:
        text = "no text encoder learns: network_train_unet_only"
        self.set_by("network_train_unet_only", text, {"network_train_unet_only": True})

    def import_keys(self, names: Mapping[str, str], read: Callable[[Any], Any] = lambda value: value) -> None:
        """Import keys that are options of the same or another name."""
        for key, option in names.items():
            if (value := self.get(key)) is not None:
                if key == option:
                    self.keep(key, read(value))
                else:
                    self.rename(key, option, read(value))

    def keep_rest(self, ignored: Mapping[str, str]) -> None:
        """Keep all remaining keys but the ignored ones, with their reasons, and those that set nothing."""
        for key in self.left():
            if key in ignored:
                self.ignore(key, ignored[key])
            elif is_empty(self.source[key]):
                self.empty(key)
            else:
                self.keep(key)

    def ignore_rest(self, reasons: Mapping[str, str]) -> None:
        """Ignore all remaining keys; reasons by key, or by a prefix of keys that ends with a dot."""
        for key in self.left():
            starts = (why for start, why in reasons.items() if start.endswith(".") and key.startswith(start))
            self.ignore(key, reasons.get(key) or next(starts, NOT_HERE))

    def _set(self, key: str, outcome: KeyOutcome, values: JsonMapping) -> None:
        self.outcomes[key] = outcome
        self.put(key, values)


def settle_values(builder: ImportBuilder, configs: Configs) -> Imported:
    """Check each value against the options of the script; invalid ones become ignored, with the reason."""
    config, accepted = configs[builder.script], {}
    for name, value in builder.values.items():
        key = builder.keys[name]
        if name == key and name not in understood(config) and not _is_option_elsewhere(name, configs):
            builder.outcomes[key] = _unknown_key_outcome(config, name, value, builder.values)
            continue
        try:
            accepted[name] = _read_value(config, name, value, configs)
            if why := "" if builder.keeps_ineffective else _why_ineffective(config, name, accepted[name]):
                accepted.pop(name)
                raise ConfigError(WITHOUT_EFFECT, why=why)
        except ConfigError as reason:
            is_named = name == key or any(problem.option == name for problem in reason.problems)
            text = reason.said if is_named else Message("{key}: {text}", key=name, text=reason.said)
            builder.outcomes[key] = KeyOutcome(key, "empty") if value is False else _ignored(key, text, reason)
    _drop_shares(builder, accepted)
    _fit_bucket_steps(builder, config, accepted)
    notes, problems = list(builder.notes), list(builder.problems)
    try:
        built = build_config(config, accepted, notes=notes)
    except ConfigError as error:
        built, problems = draft(config, accepted), [*problems, *error.problems]
    texts = {name: text for name, text in builder.texts.items() if name in options_of(config)}
    result = Imported(builder.trainer, built, (), (), (), texts, builder.guess)
    idle_options = _mark_ineffective(builder, result.with_files(dict.fromkeys(texts, "beside the config")).config)
    notes = [note for note in notes if not (isinstance(note, Problem) and note.code and note.option in idle_options)]
    outcomes = _reported_outcomes(builder, config, accepted)
    problems = [
        *_mostly_unknown_problems(builder.trainer, outcomes),
        *_foreign_module_problems(config, accepted, configs),
        *problems,
    ]
    return replace(result, outcomes=outcomes, notes=tuple(notes), problems=tuple(problems))


def _drop_shares(builder: ImportBuilder, values: JsonObject) -> None:
    """Drop strengths of base weights if there are no base weights; other programs' pages always write them."""
    if "base_weights_multiplier" in values and not values.get("base_weights"):
        del values["base_weights_multiplier"]
        builder.ignore(builder.keys["base_weights_multiplier"], "base_weights is not set")


def _fit_bucket_steps(builder: ImportBuilder, config: type[RunConfig], values: JsonObject) -> None:
    """Round the step between sizes to one that the model can compute; files from before sd-scripts' rule have 1."""
    steps = values.get("bucket_reso_steps")
    if builder.keeps_ineffective or not isinstance(steps, int) or not steps % config.grid:
        return
    nearest = max(1, round(steps / config.grid)) * config.grid
    text = Message(
        "{steps} is not possible with this model; the nearest is {option}",
        steps=steps,
        option=option_values({"bucket_reso_steps": str(nearest)}),
    )
    builder.change(builder.keys["bucket_reso_steps"], text)
    values["bucket_reso_steps"] = nearest


def _is_option_elsewhere(name: str, configs: Configs) -> bool:
    return any(name in options_of(other) for other in configs.values())


def _unknown_key_outcome(config: type[RunConfig], name: str, value: Any, settings: JsonMapping) -> KeyOutcome:
    """Return the outcome of a key that is no option anywhere, with the option that was probably meant."""
    options = options_of(config)
    hint, suggestion = did_you_mean(name, understood(config)), closest(name, options)
    fix: JsonObject = {}
    is_argument = suggestion == "optimizer_args" and "=" not in str(value)  # such as weight_decay: 0.01
    if suggestion and suggestion not in settings and not is_argument:
        with contextlib.suppress(ConfigError):
            fix = {suggestion: options[suggestion].read(value)}
    return KeyOutcome(name, "unknown", hint, fix)


def _mark_ineffective(builder: ImportBuilder, config: RunConfig) -> set[str]:
    """Mark keys whose options have no effect in this training as ineffective; return these options."""
    idle, options, marked = ineffective_options(config), options_of(type(config)), set[str]()
    for key, outcome in builder.outcomes.items():
        names = [name for name, its_key in builder.keys.items() if its_key == key and name in options]
        is_idle = all(name in idle and _option_value(config, name) != options[name].default for name in names)
        if outcome.kind in ("kept", "renamed") and names and is_idle:
            builder.outcomes[key] = replace(outcome, kind="ineffective", text=idle[names[0]])
            marked.update(names)
    return marked


def _option_value(config: RunConfig, name: str) -> Any:
    return getattr(getattr(config, options_of(type(config))[name].section), name)


def _foreign_module_problems(config: type[RunConfig], values: JsonMapping, configs: Configs) -> Iterator[Problem]:
    """Yield the problem of a network module that only other families have: the file contradicts itself."""
    module, own_modules = values.get("network_module"), _network_modules(config)
    other_titles = [
        other.title.removesuffix(" LoRA") for other in configs.values() if module in _network_modules(other)
    ]
    if module and own_modules and module not in own_modules and other_titles:
        yield Problem(
            "network_module",
            "{module} is for {others}; for {title} write {own} or leave it empty",
            module=module,
            others=together([*dict.fromkeys(other_titles)]),
            title=config.title,
            own=own_modules[0],
            fix={"network_module": None},
        )


def _network_modules(config: type[RunConfig]) -> tuple[str, ...]:
    option = options_of(config).get("network_module")
    return option.choices if option else ()


def _mostly_unknown_problems(trainer: str, outcomes: tuple[KeyOutcome, ...]) -> Iterator[Problem]:
    """Return the problem of a file mostly of unknown keys, probably from an unrecognised program."""
    in_file = [outcome for outcome in outcomes if outcome.kind != "default"]
    known_count = sum(outcome.kind != "unknown" for outcome in in_file)
    if 2 * known_count < len(in_file):
        template = "only {known} of {count} keys are known here: look whether this is a file of {trainer} at all"
        yield Problem("", template, known=known_count, count=len(in_file), trainer=trainer)


def _reported_outcomes(builder: ImportBuilder, config: type[RunConfig], values: JsonMapping) -> tuple[KeyOutcome, ...]:
    """Return the outcomes by the names in the file, and those of the other trainer's defaults that differ from ours."""
    options, outcomes = options_of(config), []
    differing: dict[str, dict[str, str]] = {}
    for name, key in builder.keys.items():
        if name in values and values[name] != options[name].default:
            differing.setdefault(key, {})[name] = options[name].text(values[name])
    for key in [*builder.source, *(k for k in builder.outcomes if k not in builder.source)]:
        outcome = builder.outcomes[key]
        if key in builder.absent and key in differing:
            outcome = replace(outcome, kind="default", text=option_values(differing[key]))
        if key not in builder.absent or key in differing:
            outcomes.append(replace(outcome, key=builder.names[key]) if key in builder.names else outcome)
    return tuple(outcomes)


def _ignored(key: str, text: MessageLike, reason: ConfigError) -> KeyOutcome:
    fix = {name: value for problem in reason.problems for name, value in problem.fix.items()}
    return KeyOutcome(key, "ignored", text, fix, is_refused=True)


def _read_value(config: type[RunConfig], name: str, value: Any, configs: Configs) -> Any:
    """Parse the value of an option. Raises ConfigError with the reason when it cannot be set."""
    option: Option | None = options_of(config).get(name)
    if option is None:
        raise ConfigError(_why_unknown(config, name, configs))
    if option.kind == "secret":
        raise ConfigError(SECRET)
    try:
        result = option.read(value)
    except ConfigError as error:
        problem = Problem(
            "",
            "{error}; the default is used ({default})",
            fix=error.problems[0].fix,
            error=error.said,
            default=option.text(option.default) or "not set",
        )
        raise ConfigError(problem) from None
    if result != option.default and (why := config.refusal(name, result)):
        raise ConfigError(why)
    return result


def _why_ineffective(config: type[RunConfig], name: str, value: Any) -> str:
    is_set = value != options_of(config)[name].default
    return config.ineffective.get(name) or INEFFECTIVE_EVERYWHERE.get(name, "") if is_set else ""


def _why_unknown(config: type[RunConfig], name: str, configs: Configs) -> MessageLike:
    """Return why a name is no option of this kind of training."""
    reasons = {**config.retired, **config.foreign}
    if name in reasons:
        return reasons[name]
    having = [other for other in configs.values() if name in options_of(other)]
    having.sort(key=lambda other: other.family != config.family)
    if having and all(other.family != config.family for other in having):
        return Message("it is for {title}", title=having[0].title.split()[0])
    return Message("it is for {title} only", title=having[0].title) if having else NOT_HERE


def describe(values: JsonMapping) -> Message:
    return option_values({name: _value_text(value) for name, value in values.items()})


def _value_text(value: JsonValue) -> str:
    if isinstance(value, list):
        return " ".join(map(_value_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value in ([], {}, ())


def is_on(value: JsonValue) -> bool:
    return str(value).strip().casefold() in ("true", "1", "yes", "on")


def to_number(value: Any) -> float | None:
    """Parse a finite number, which may be text; None for anything else."""
    try:
        return parse_finite(value)
    except (ValueError, OverflowError):
        return None
