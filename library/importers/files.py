"""Convert a file of any trainer to a config: detect which trainer wrote it, and call its importer."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from library.config.commented_toml import comments_on_top
from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import load_json, load_toml, load_yaml, read_settings_text
from library.config.problems import ConfigError, Message, MessageLike, Problem
from library.config.run_config import RunConfig
from library.config.schema import option_values, options_of
from library.config.values import did_you_mean
from library.importers import (
    adapter_file,
    aitoolkit,
    aitoolkit_data,
    command_line,
    diffusion_pipe,
    diffusion_pipe_data,
    easy_scripts,
    flat,
    kohya_ss,
    lora_scripts,
    musubi,
    onetrainer,
    simpletuner,
    simpletuner_data,
    simpletuner_env,
)
from library.importers.builder import Configs, settle_values
from library.importers.named_files import MayRead, everything, with_config_file, with_named_files
from library.importers.result import Imported
from library.importers.shared import load_tables, tables_of_list
from library.importers.short_messages import short_errors, short_message, short_report

# The first that recognises a file reads it, so an importer whose test also fits other programs' files comes later.
IMPORTERS = (
    adapter_file,
    simpletuner,
    diffusion_pipe,
    lora_scripts,
    easy_scripts,
    aitoolkit,
    onetrainer,
    musubi,
    kohya_ss,
)
# Modules that convert files of data sets, and the importer of the same program.
DATASETS = {musubi: musubi, aitoolkit_data: aitoolkit, diffusion_pipe_data: diffusion_pipe}
FLAT = flat.TRAINER
PROGRAMS = (*(reader.TRAINER for reader in IMPORTERS), FLAT)
SUFFIXES = (".json", ".toml", ".yaml", ".yml", ".safetensors", *command_line.SUFFIXES, simpletuner_env.ENV_SUFFIX)


@short_errors()
def import_file(
    path: str | Path, configs: Configs, script: str = "", preferred: Sequence[str] = (), may_read: MayRead = everything
) -> Imported:
    """Convert a file of settings of any supported trainer to a config and the outcomes of its keys.

    `configs`: config class by script; `script` overrides the script that the file states; of `preferred` scripts the
    first that fits is chosen if several fit; `may_read` tells which of the files that it names may be read. Raises
    ConfigError for any other file, and for an unsupported model.
    """
    path = Path(path)
    if path.suffix.lower() in command_line.SUFFIXES:
        return _import_command(path, configs, script, may_read)
    file = parse_file(path)
    refuse_dataset(file, path)
    if path.suffix.lower() != ".toml" and not is_foreign_config(file):
        _refuse_prompts(file, path)
        template = (
            "{path} is of none of the programs whose settings are read here ({programs}); files of {flat} are TOML"
        )
        raise ConfigError(template, path=path, programs=", ".join(PROGRAMS), flat=FLAT)
    return import_content(
        with_named_files(file, path, may_read), configs, script or script_in_name(path, configs), preferred
    )


def _import_command(path: Path, configs: Configs, script: str, may_read: MayRead) -> Imported:
    """Convert the command in a file, with the settings of the files that it names."""
    command = command_line.read_command(path)
    flags = with_config_file(command.flags, path, may_read)
    unread = [_unread_config(flags["config_file"])] if "config_file" in flags else []
    settings = with_named_files({name: flags[name] for name in flags if name != "config_file"}, path, may_read)
    is_known = command.script in configs
    if not (script or is_known or any(reader.recognises(settings) for reader in IMPORTERS)):
        template = "{script}.py is not a script whose flags are read here: those of {programs} are"
        raise ConfigError(template, script=command.script, programs=f"{FLAT}, {musubi.TRAINER}")
    imported = import_content(settings, configs, script or (command.script if is_known else ""))
    problems = (*unread, *imported.problems)
    return replace(imported, notes=(*command.notes, *imported.notes), problems=problems, launch=command.launch)


def _unread_config(name: object) -> Problem:
    template = "the command takes its settings from {path}, which cannot be read from here: import that file instead"
    return Problem("", template, path=str(name))


@short_errors()
def refuse_dataset(settings: JsonMapping, path: Path) -> None:
    """Raise ConfigError for a file that contains only data sets and no training."""
    kind = next((kind for kind in DATASETS if kind.is_dataset(settings)), None)
    if kind and (kind is diffusion_pipe_data or not settings.keys() - {"general", "datasets"}):
        template = "kohya import {name} -o data.toml writes it as one of ours; name that in dataset_config"
        advice = Message(template, name=path.name)
        raise ConfigError(
            "{path} is a data set file of {trainer}, not a training: {advice}",
            path=path,
            trainer=DATASETS[kind].TRAINER,
            advice=advice,
        )
    if tables_of_list(settings.get("datasets")) and not settings.keys() - {"general", "datasets"}:
        raise ConfigError("{path} is a data set file, not a training: name it in dataset_config", path=path)


def is_foreign_dataset(settings: JsonMapping) -> bool:
    return any(kind.is_dataset(settings) for kind in DATASETS)


@short_errors()
def convert_foreign_dataset(settings: JsonMapping) -> tuple[str, list[MessageLike]]:
    """Convert data sets of another trainer to the text of a dataset file, and a sentence for each key that was left
    out."""
    kind = next(kind for kind in DATASETS if kind.is_dataset(settings))
    text, notes = kind.convert_dataset(settings)
    if DATASETS[kind].APPLIES_EXIF:
        template = "{trainer} turns images as their EXIF orientation says: set exif_rotation = true in the training"
        notes = [*notes, Message(template, trainer=DATASETS[kind].TRAINER)]
    return text, [short_message(note) for note in notes]


@short_errors()
def import_content(
    settings: JsonMapping, configs: Configs, script: str = "", preferred: Sequence[str] = ()
) -> Imported:
    """Convert the parsed content of a file like `import_file`."""
    if script and script not in configs:
        raise ConfigError(
            "{script} is not a kind of training{hint}; there are {runs}",
            script=script,
            hint=did_you_mean(script, configs),
            runs=", ".join(configs),
        )
    _refuse_programs(settings)
    if reader := next((reader for reader in IMPORTERS if reader.recognises(settings)), None):
        builder = reader.read_config(settings, script)
        if not script:
            flat.refuse_module(builder.values, configs)
        if reader.APPLIES_EXIF and "exif_rotation" not in builder.values:
            builder.assume("exif_rotation", True)
            builder.keep("exif_rotation")
        return short_report(settle_values(builder, configs))
    return short_report(settle_values(flat.read_flat_file(settings, configs, script, preferred), configs))


def _refuse_programs(settings: JsonMapping) -> None:
    """Raise ConfigError for a file of a program that is recognised by its keys, but not supported."""
    keys = {*settings, *(key for table in settings.values() if isinstance(table, Mapping) for key in table)}
    for program in load_tables("others")["program"]:
        if keys >= set(program["keys"]):
            template = "this is a file of {program}, whose settings are not read here; those of {programs} are"
            raise ConfigError(template, program=program["title"], programs=", ".join(PROGRAMS))


def script_in_name(path: Path, configs: Configs) -> str:
    """Return the script that a TOML file states in a comment at its top, as our files do, or in its file name; else
    ""."""
    if path.suffix.lower() != ".toml":
        return ""
    comments = "\n".join(comments_on_top(read_settings_text(path).text))
    named_scripts = re.findall(r"(?:sd-scripts/|kohya train )(\w+)", comments)
    in_name = [script for script in sorted(configs, key=len, reverse=True) if _is_named(script, path.stem, configs)]
    return next((script for script in [*named_scripts, *in_name] if script in configs), "")


def _is_named(script: str, stem: str, configs: Configs) -> bool:
    """Return whether a file name is that of a script. Without its family, such as fine_tune, it could mean any."""
    return script in stem if script.startswith(configs[script].family) else script == stem


@short_errors()
def is_foreign_config(settings: JsonMapping) -> bool:
    """Return whether a config is of another trainer. Raises ConfigError for one of a program that is not read."""
    _refuse_programs(settings)
    return any(reader.recognises(settings) for reader in IMPORTERS)


@short_errors()
def parse_file(path: Path) -> JsonObject:
    """Parse a JSON, TOML or YAML file, a command, or the header of a LoRA. Raises ConfigError when that fails."""
    suffix = path.suffix.lower()
    if suffix == ".toml":
        return load_toml(path)
    if suffix == ".safetensors":
        return adapter_file.load_header(path)
    if suffix in command_line.SUFFIXES:
        return command_line.read_command(path).flags
    if simpletuner_env.ENV_SUFFIX in (suffix, path.name.lower()):
        return simpletuner_env.read_env(path)
    if suffix not in SUFFIXES:
        raise ConfigError("{path} must end in one of {suffixes}", path=path, suffixes=", ".join(SUFFIXES))
    if not read_settings_text(path).text.strip():
        raise ConfigError("{path} is empty", path=path)
    content = simpletuner.unwrapped(load_json(path)) if suffix == ".json" else load_yaml(path)
    if isinstance(content, list):
        _refuse_list(content, path)
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError("{path} holds no settings: it must be one table of names and values", path=path)
    if "algo" in content and content.keys() & {"linear_dim", "full_matrix", "apply_preset"}:
        advice = Message("import the config that names it as lycoris_config")
        raise ConfigError("{path} is a file of LyCORIS settings, not a training: {advice}", path=path, advice=advice)
    return content


def _refuse_list(entries: list[Any], path: Path) -> None:
    """Raise ConfigError for a list, which is only a part of a config of OneTrainer, ai-toolkit or SimpleTuner."""
    first = next(iter(tables_of_list(entries)), {})
    if "folder_path" in first:
        raise ConfigError(
            "{path} is a data set file of ai-toolkit, not a training: put it under a key datasets", path=path
        )
    if "path" in first and {"image", "text"} & first.keys():
        advice = Message("import the config that names it as concept_file_name, which writes it as a dataset_config")
        raise ConfigError(
            "{path} is a data set file of OneTrainer (concepts), not a training: {advice}", path=path, advice=advice
        )
    if simpletuner_data.is_datasets(entries):
        advice = Message("import the config that names it as data_backend_config, which writes it as a dataset_config")
        raise ConfigError(
            "{path} is a data set file of SimpleTuner, not a training: {advice}", path=path, advice=advice
        )
    if "prompt" in first:
        advice = Message("import the config that names it as sample_definition_file_name")
        raise ConfigError("{path} is a file of sample prompts, not a training: {advice}", path=path, advice=advice)


def _refuse_prompts(settings: JsonMapping, path: Path) -> None:
    """Raise ConfigError for SimpleTuner's prompts by name, each a text, or a table with one."""
    values = [value.get("prompt") if isinstance(value, Mapping) else value for value in settings.values()]
    texts = [value for value in values if isinstance(value, str)]
    # Short values could be settings of any program, unless the file's name says what they are.
    is_plain = "prompt" in path.stem.lower() or all(" " in text.strip() for text in texts)
    if texts and len(texts) == len(values) and is_plain:
        advice = Message("import the config that names it as user_prompt_library, which writes it as sample_prompts")
        raise ConfigError("{path} is a file of sample prompts, not a training: {advice}", path=path, advice=advice)


def compare_configs(first: Any, second: Any) -> list[tuple[str, str, str]]:
    """Return the options that differ, as (name, first value, second value); "-" if a config has no such option."""
    first_texts, second_texts = _option_texts(first), _option_texts(second)
    return [
        (name, a, b)
        for name in {**first_texts, **second_texts}
        if (a := first_texts.get(name, "-")) != (b := second_texts.get(name, "-"))
    ]


def _option_texts(config: RunConfig) -> dict[str, str]:
    options = options_of(type(config))
    return {
        name: "(set)" if value and options[name].kind == "secret" else options[name].text(value) or "not set"
        for name, value in option_values(config).items()
    }
