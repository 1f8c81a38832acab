"""Import flat TOML files of sd-scripts: current option names, and old ones or those of forks."""

import re
from collections.abc import Iterable, Mapping, Sequence

from library.config import building, schema
from library.config.converted import OLD_BLOCKS, convert_blocks_to_swap
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike, Problem, join_messages
from library.config.reading import parse_resolution
from library.config.run_config import RunConfig, configs_of_kind
from library.config.schema import options_of
from library.config.values import did_you_mean
from library.importers.builder import Configs, ImportBuilder, family_of_script, is_empty, is_on
from library.importers.shared import load_tables, other_model_error, own_name

TRAINER = "sd-scripts"
APPLIES_EXIF = False  # as sd-scripts
MAX_SIDE_OF_SD15 = 640  # pixels of a side; files for SDXL have 768 or more
RATES_OF_ENCODERS = ("text_encoder_lr1", "text_encoder_lr2")  # in guides of sd-scripts, for SDXL
DESCRIBES = "it describes the preset"
SD_SCRIPTS_TABLES = load_tables("sd_scripts")


def read_flat_file(
    flat: JsonMapping, configs: Configs, script: str = "", preferred: Sequence[str] = ()
) -> ImportBuilder:
    """Convert every key of a flat file to our values and an outcome. `preferred`: scripts to choose if several fit."""
    described = _description_of_preset(flat)
    flat = schema.flatten_sections(_without_repeats(flat))
    _refuse_other_training(flat, configs, script)
    guess = ""
    if not script:
        script = find_best_script(flat, configs, preferred)
        guess = _explain_guess(flat, script, configs)
    builder = ImportBuilder(flat, script, TRAINER, keeps_ineffective=True, guess=guess)
    _note_lycoris_algorithm(builder)
    aliases = configs[builder.script].aliases
    for key, value in flat.items():
        if value is None or value == "":
            builder.empty(key)
        elif key == "torch_compile":
            text = "is compile, which compiles block by block and leaves the saved names alone"
            builder.change(key, text, {"compile": value})
        elif key in described:
            builder.ignore(key, DESCRIBES)
        elif key in RATES_OF_ENCODERS and {"text_encoder_lr", *RATES_OF_ENCODERS} - flat.keys() == {"text_encoder_lr"}:
            rates = [flat[name] for name in RATES_OF_ENCODERS]
            builder.change(key, "text_encoder_lr takes one rate for each text encoder", {"text_encoder_lr": rates})
        elif key in OLD_BLOCKS and builder.family == "flux":
            convert_old_blocks(builder, OLD_BLOCKS, is_set=builder.get("blocks_to_swap") is not None)
        elif key in aliases:
            builder.rename(key, aliases[key])
        else:
            builder.keep(key)
    return builder


def _without_repeats(settings: JsonMapping) -> JsonObject:
    """Leave out what a table repeats with the value of one before it, which sd-scripts accepts."""
    seen: JsonObject = {}
    kept: JsonObject = {}
    for title, table in settings.items():
        inner = table if isinstance(table, Mapping) else {title: table}
        left = {key: value for key, value in inner.items() if key not in seen or seen[key] != value}
        seen |= left
        if left or not inner:
            kept[title] = left if isinstance(table, Mapping) else table
    return kept


def _description_of_preset(settings: JsonMapping) -> set[str]:
    """Return the keys that describe a preset of lora-scripts, one that leaves the kind of training open."""
    description = settings.get("metadata")
    is_preset = isinstance(description, Mapping) and isinstance(settings.get("data"), Mapping)
    return {*description} if is_preset else set()


def convert_old_blocks(builder: ImportBuilder, keys: Iterable[str], is_set: bool) -> None:
    """Convert old keys to blocks_to_swap; `is_set`: the file has that option as well."""
    unreadable: list[Problem] = []
    settings = {key: builder.source[key] for key in keys if builder.get(key) is not None}
    old = building.read_section(OLD_BLOCKS, building.Layer(settings), unreadable)
    values, problems = convert_blocks_to_swap(old, is_set)
    text = join_messages(problems, "; ")
    for key in settings:
        if old.get(key) and values:
            builder.change(key, text, values)
        else:
            builder.ignore(key, text if key in old else join_messages(unreadable, "; "))


def _refuse_other_training(settings: JsonMapping, configs: Configs, script: str) -> None:
    """Raise ConfigError for anything but a training of a supported model."""
    other = next((what for key, what in SD_SCRIPTS_TABLES["other_keys"].items() if not is_empty(settings.get(key))), "")
    if (
        other := other
        or SD_SCRIPTS_TABLES["other_modules"].get(module_of(settings))
        or ("" if script else _older_model(settings))
    ):
        raise other_model_error(TRAINER, other)
    if not script:
        refuse_module(settings, configs)
    names = {name for config in configs.values() for name in (*options_of(config), *config.aliases, *config.foreign)}
    if names.isdisjoint(settings) and (settings or not script):
        near = (join_messages([f": {name}", hint], "") for name in settings if (hint := did_you_mean(name, names)))
        raise ConfigError("no setting of any training is in this file{hint}", hint=next(near, ""))


def module_of(settings: JsonMapping) -> str:
    return str(settings.get("network_module") or "")


def _older_model(settings: JsonMapping) -> str:
    """Return the older model that a file with SDXL's options is for, by its switch or its model's name; "" for none."""
    if is_on(settings.get("v2")):
        return "Stable Diffusion 2"
    name = own_name(settings.get("pretrained_model_name_or_path"))
    return next((title for word, title in SD_SCRIPTS_TABLES["other_names"].items() if re.search(word, name)), "")


def _family_of_name(settings: JsonMapping) -> str:
    """Return the family with SDXL's options that the base model's name says; "" for none."""
    name = own_name(settings.get("pretrained_model_name_or_path"))
    families_by_word = SD_SCRIPTS_TABLES["family_names"].items()
    return next((family for word, family in families_by_word if re.search(word, name)), "")


def _is_small(settings: JsonMapping) -> bool:
    """Return whether images are of a size for which SD 1.5 is made, and nothing speaks for SDXL."""
    try:
        sizes = parse_resolution(settings.get("resolution"))
    except ConfigError:
        return False
    is_named = "xl" in own_name(settings.get("pretrained_model_name_or_path"))
    caches_captions = is_on(settings.get("cache_text_encoder_outputs"))  # in sd-scripts, SD 1.5 cannot
    return not (is_named or caches_captions) and max(max(size) for size in sizes) <= MAX_SIDE_OF_SD15


def refuse_module(settings: JsonMapping, configs: Configs) -> None:
    """Raise ConfigError for a network module that no training here has."""
    module = module_of(settings)
    known_modules = _known_network_modules(configs)
    if (
        module
        and module not in known_modules
        and module not in SD_SCRIPTS_TABLES["algorithms"]
        and not module.startswith("lycoris.")
    ):
        advice = "a training that this trainer has no adapters for cannot be imported"
        raise ConfigError(
            Problem(
                "network_module",
                "= {module} is not known here; there are {known}: {advice}",
                module=module,
                known=", ".join(known_modules),
                advice=advice,
            )
        )


def _known_network_modules(configs: Configs) -> list[str]:
    """Return the network modules of all trainings."""
    option_choices = (
        options_of(config)["network_module"].choices
        for config in configs.values()
        if "network_module" in options_of(config)
    )
    return [*dict.fromkeys(module for choices in option_choices for module in choices)]


def _note_lycoris_algorithm(builder: ImportBuilder) -> None:
    """Note that a module of sd-scripts is an algorithm of LyCORIS here."""
    module = module_of(builder.source)
    if algorithm := SD_SCRIPTS_TABLES["algorithms"].get(module):
        other = f"lycoris.kohya, network_args = algo={algorithm}"
        fix = {"network_module": "lycoris.kohya", "network_args": [f"algo={algorithm}"]}
        template = "{module} is not offered; write {other}"
        builder.problems.append(Problem("network_module", template, module=module, other=other, fix=fix))


def find_best_script(settings: JsonMapping, configs: Configs, preferred: Sequence[str] = ()) -> str:
    """Return the script whose options include most of the keys, among those that have the network module. If several
    fit, the first of `preferred` wins. Raises ConfigError when it is ambiguous."""
    with_module = {script: config for script, config in configs.items() if _has_module(config, module_of(settings))}
    candidates = with_module or configs
    fit = {script: len(settings.keys() & options_of(config).keys()) for script, config in candidates.items()}
    best = max(fit.values(), default=0)
    fitting = [script for script, count in fit.items() if count == best]
    if chosen := next((script for script in preferred if script in fitting), ""):
        return chosen
    if len(fitting) > 1:
        # FLUX.1 needs options for its own files. A file without any of them is for SDXL, unless its model's name or the
        # size of its images says otherwise.
        named = _family_of_name(settings) or ("sd15" if _is_small(settings) else "sdxl")
        fitting = [script for script in fitting if family_of_script(script) == named] or fitting
    if len(fitting) > 1:
        fitting = [*configs_of_kind(settings, {script: configs[script] for script in fitting})] or fitting
    if len(fitting) > 1:
        raise ConfigError(
            "this file names no training script; choose it with kohya import --script: {fitting}",
            fitting=", ".join(fitting),
        )
    return fitting[0]


def _has_module(config: type[RunConfig], module: str) -> bool:
    return "network_module" in options_of(config) and module in options_of(config)["network_module"].choices


def _explain_guess(settings: JsonMapping, script: str, configs: Configs) -> MessageLike:
    """Return a sentence that the script is a guess, and why; "" if the network module belongs to one model alone."""
    module = module_of(settings)
    if (
        module not in SD_SCRIPTS_TABLES["shared_modules"]
        and sum(_has_module(config, module) for config in configs.values()) == 1
    ):
        return ""
    known_count = len(settings.keys() & options_of(configs[script]).keys())
    template = (
        "{script} ({title}) is a guess: the file names no script, and {known} of its {count} keys are options of it"
    )
    return Message(template, script=script, title=configs[script].title, known=known_count, count=len(settings))
