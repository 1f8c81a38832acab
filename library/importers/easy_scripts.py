"""Import files of LoRA_Easy_Training_Scripts: options of sd-scripts in tables of its page, and a list of subsets."""

import dataclasses
from collections.abc import Mapping

from library.config.dataset import SubsetConfig
from library.config.json_types import JsonMapping, JsonObject, JsonValue
from library.config.problems import Message, counted
from library.importers.builder import NOT_HERE, ImportBuilder, describe, is_empty, is_on
from library.importers.shared import (
    PREPARED,
    dataset_toml,
    equal,
    equivalent_optimizer,
    load_tables,
    optimizer_args,
    other_model_error,
    say_nearest,
    tables_of_list,
)

TRAINER = "LoRA_Easy_Training_Scripts"
APPLIES_EXIF = False  # as sd-scripts
EASY_TABLES = load_tables("easy_scripts")
SHARED_ARGUMENTS = ("betas", "eps", "weight_decay")  # of an optimizer and the nearest to it
ARGUMENT_TABLES = {"args", "dataset_args"}
SUBSET = {field.name for field in dataclasses.fields(SubsetConfig)}
REPLACED = "${replace}"  # in names and folders, for easy_name


def recognises(settings: JsonMapping) -> bool:
    """Return whether this is a file of LoRA_Easy_Training_Scripts."""
    return any(
        key.endswith("_args") and isinstance(value, Mapping) and not ARGUMENT_TABLES.isdisjoint(value)
        for key, value in settings.items()
    )


def read_config(settings: JsonMapping, script: str = "") -> ImportBuilder:
    """Convert every key, without its table, to our values and an outcome. Raises ConfigError for unsupported models."""
    flat, general = _collect_options(settings, "args"), _collect_options(settings, "dataset_args")
    mode = settings.get("train_mode")
    mode = str(mode.get("train_mode") if isinstance(mode, Mapping) else mode or "lora").casefold()
    script = script or _easy_script(settings, flat, is_word=mode not in ("lora", "none"))
    source = {**general, **flat, **{key: settings[key] for key in ("subsets", "train_mode") if key in settings}}
    builder = ImportBuilder(source, script, TRAINER, keeps_ineffective=True)
    builder.explain(builder.choice_of_script(), "sdxl", "v2", "train_mode")
    _import_placeholder_names(builder)
    _import_easy_network(builder)
    _import_easy_optimizer(builder)
    _import_easy_images(builder, general, tables_of_list(settings.get("subsets"), "subsets", builder.notes))
    builder.keep_rest(EASY_TABLES["ignored"])
    return builder


def _collect_options(settings: JsonMapping, part: str) -> JsonObject:
    """Return the options of all tables. An option that was typed into its page is stored as a table with its value."""
    leaves: JsonObject = {}
    for table in settings.values():
        inner = table.get(part) if isinstance(table, Mapping) else None
        for key, value in inner.items() if isinstance(inner, Mapping) else ():
            leaves[key] = value.get("value") if isinstance(value, Mapping) and "is_dataset" in value else value
    return leaves


def _easy_script(settings: JsonMapping, flat: JsonMapping, is_word: bool) -> str:
    if is_on(flat.get("sdxl")):
        return "sdxl_train_textual_inversion" if is_word else "sdxl_train_network"
    if isinstance(settings.get("flux_args"), Mapping) and settings["flux_args"].get("args") and not is_word:
        return "flux_train_network"
    if is_on(flat.get("v2")):
        raise other_model_error(TRAINER, "Stable Diffusion 2")
    return "train_textual_inversion" if is_word else "train_network"


def _fill_placeholder(builder: ImportBuilder, value: JsonValue) -> JsonValue:
    name = str(builder.get("easy_name") or "")
    return value.replace(REPLACED, name) if isinstance(value, str) else value


def _import_placeholder_names(builder: ImportBuilder) -> None:
    for key, value in builder.source.items():
        if isinstance(value, str) and REPLACED in value:
            changed = _fill_placeholder(builder, value)
            builder.change(key, f"{key} = {changed}", {key: changed})


def _import_easy_network(builder: ImportBuilder) -> None:
    """Import the adapter: its arguments tell its kind."""
    if not builder.adapters:
        return
    stored_args = builder.get("network_args")
    pairs = {}
    if isinstance(stored_args, Mapping):
        pairs = {EASY_TABLES["arguments"].get(key, key): value for key, value in stored_args.items()}
    arguments = optimizer_args({key: value for key, value in pairs.items() if value is not False})
    if not isinstance(stored_args, Mapping):
        arguments = [str(argument) for argument in stored_args] if isinstance(stored_args, list) else []
    usual = "networks.lora_flux" if builder.family == "flux" else "networks.lora"
    if "block_size" in pairs:
        arguments, module = ["algo=dylora", *arguments], "lycoris.kohya"
    else:
        module = "lycoris.kohya" if any(argument.startswith("algo=") for argument in arguments) else usual
    if is_on(builder.get("fa")):
        module = "networks.lora_fa"
        builder.explain(describe({"network_module": module}), "fa")
    builder.explain(describe({"network_module": module}), "lora_fa")
    values: JsonObject = {"network_module": module} | ({"network_args": arguments} if arguments else {})
    texts = {name: " ".join(value) if isinstance(value, list) else value for name, value in values.items()}
    builder.set_by("network_args", describe(texts), values)


def _import_easy_optimizer(builder: ImportBuilder) -> None:
    their_name = str(builder.get("optimizer_type") or "")
    is_same = True
    if their_name:
        name, why = equivalent_optimizer(their_name.rpartition(".")[2])
        is_same = not why
        builder.change("optimizer_type", why or equal(their_name, name), {"optimizer_type": name})
    for key in ("optimizer_args", "lr_scheduler_args"):
        if isinstance(settings := builder.get(key), Mapping):
            of_both = is_same or key != "optimizer_args"
            shared = {name: value for name, value in settings.items() if of_both or name in SHARED_ARGUMENTS}
            builder.convert(key, {key: optimizer_args(shared)})
            left = ", ".join(name for name in settings if name not in shared)
            if left:
                builder.notes.append(Message("only {optimizer} has {names}", optimizer=their_name, names=left))
    schedule = str(builder.get("lr_scheduler_type") or "")
    if near := EASY_TABLES["schedules"].get(schedule.rpartition(".")[2]):
        builder.change(
            "lr_scheduler_type", say_nearest(schedule, describe({"lr_scheduler": near})), {"lr_scheduler": near}
        )
        builder.ignore("lr_scheduler", "lr_scheduler_type names another")
        builder.ignore("lr_scheduler_args", Message("it is for {name}, which is not offered here", name=schedule))
        builder.values.pop("lr_scheduler_args", None)
    if (share := builder.number("warmup_ratio")) is not None:
        builder.rename("warmup_ratio", "lr_warmup_steps", min(share, 1.0))


def _import_easy_images(builder: ImportBuilder, general: JsonMapping, subsets: list[JsonMapping]) -> None:
    """Convert the folders and their options to a dataset file."""
    listed = [subset for subset in subsets if not is_empty(subset.get("image_dir"))]
    if not listed:
        if (count := builder.number("batch_size")) is not None:
            builder.rename("batch_size", "train_batch_size", int(count))
        builder.empty("subsets")
        return
    sets = []
    for subset in listed:
        sets.append(
            {
                key: _fill_placeholder(builder, value)
                for key, value in subset.items()
                if key in SUBSET and not is_empty(value) and value is not False
            }
        )
        for key in sorted(subset.keys() - SUBSET - {"name"}):
            if not is_empty(subset[key]) and subset[key] is not False:
                place = Message("datasets of {folder}", folder=subset["image_dir"])
                line = Message("{place}: {key} is ignored: {reason}", place=place, key=key, reason=NOT_HERE)
                builder.notes.append(line)
    dataset_options = {key: value for key, value in general.items() if not is_empty(value)}
    builder.texts["dataset_config"] = dataset_toml({}, [(dataset_options, sets)])
    builder.change("subsets", Message("{folders}: {place}", folders=counted(len(sets), "folder"), place=PREPARED))
    builder.explain(PREPARED, *dataset_options)
