"""Import OneTrainer's JSON files of presets and configs, as far as this trainer has equivalent options."""

import re

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import Message, MessageLike
from library.importers import onetrainer_data, onetrainer_learning, onetrainer_model
from library.importers.builder import ImportBuilder, describe, family_of_script, is_on, script_of_family, to_number
from library.importers.onetrainer_embedding import EMBEDDING, EMBEDDING_IMPORTS, EMBEDDING_SCRIPTS
from library.importers.shared import (
    chooses_chroma,
    chooses_version,
    equal,
    flatten_tables,
    load_tables,
    other_method_error,
    other_model_error,
    other_networks,
    own_name,
    precision,
    split_path,
    transformer_of,
)

TRAINER = "OneTrainer"
APPLIES_EXIF = True  # its LoadImage (mgds) applies it
HUB_FILE = re.compile(r"https://huggingface\.co/(?P<repository>[^/]+/[^/]+)/(?:blob|resolve)/[^/]+/(?P<file>.+)")
ONETRAINER_TABLES = load_tables("onetrainer")
# Keys of old versions -> current keys.
OLD = ONETRAINER_TABLES["old"] | {
    old.format(part=part): new.format(part=part)
    for part in ONETRAINER_TABLES["parts"]
    for old, new in ONETRAINER_TABLES["old_of_parts"].items()
}


def recognises(settings: JsonMapping) -> bool:
    keys = settings.keys() & {"training_method", "base_model_name", "output_model_destination", "concept_file_name"}
    return str(settings.get("model_type") or "").isupper() or "training_method" in keys or len(keys) > 1


def read_config(settings: JsonMapping, script: str = "") -> ImportBuilder:
    """Convert every key to our values and an outcome. Raises ConfigError for unsupported models and methods."""
    flat, names = use_current_keys(flatten_tables(settings))
    flat, names = _fill_optimizer_defaults(flat, names)
    source, absent, notes = fill_missing(flat)
    builder = ImportBuilder(
        source, _onetrainer_script(source, script), TRAINER, absent=absent, names=names, notes=notes
    )
    kind = ONETRAINER_TABLES["model_types"].get(str(source["model_type"]))
    builder.chooses_script("training_method")
    text = describe({"model_type": kind}) if kind else builder.choice_of_script()
    builder.change("model_type", text, {"model_type": kind} if kind else {})
    names_given = " ".join(own_name(builder.get(key)) for key in ("transformer.model_name", "base_model_name"))
    chooses_version(builder, "model_type", names_given)
    if is_on(builder.get("masked_training")) and kind != "fill":
        text = "masked_loss = true; <name>-masklabel.png beside <name> is its mask, as in OneTrainer"
        builder.change("masked_training", text, {"masked_loss": True})
        if is_on(builder.get("normalize_masked_area_loss")):
            builder.keep("normalize_masked_area_loss")
    builder.import_keys(ONETRAINER_TABLES["renamed"] | ({"vae.model_name": "ae"} if builder.family == "flux" else {}))
    _import_transformer(builder)
    _import_onetrainer_output(builder)
    of_networks = (*onetrainer_model.MODEL_IMPORTS, *onetrainer_learning.LEARNING_IMPORTS)
    if builder.script in EMBEDDING_SCRIPTS.values():
        of_networks = EMBEDDING_IMPORTS
    for part in (*of_networks, *onetrainer_data.DATA_IMPORTS):
        part(builder)
    unet = {} if builder.is_unet else {"unet.": "it is not a part of this model"}
    builder.ignore_rest(ONETRAINER_TABLES["ignored"] | unet)
    if source["model_type"] == "CHROMA_1" and builder.family == "flux":
        chooses_chroma(builder, "model_type")
    return builder


def _onetrainer_script(source: JsonMapping, script: str) -> str:
    method, model = str(source["training_method"]), str(source["model_type"])
    family = family_of_script(script) or ONETRAINER_TABLES["models"].get(model)
    if method == EMBEDDING and family in EMBEDDING_SCRIPTS:
        return script or EMBEDDING_SCRIPTS[family]
    if method not in ("LORA", "FINE_TUNE"):
        raise other_method_error(TRAINER, ONETRAINER_TABLES["other_methods"].get(method, method))
    if family is None:
        titles = ONETRAINER_TABLES["other_models"]
        model = f"{titles[model]} ({model})" if model in titles else model
        raise other_model_error(TRAINER, model)
    return script or script_of_family(family, method == "LORA")


def _import_transformer(builder: ImportBuilder) -> None:
    """Import a separate transformer; the base model then provides the other networks."""
    key, base = "transformer.model_name", builder.get("base_model_name")
    options = transformer_of(builder).parts
    if not builder.get(key) or not options:
        return
    name = str(builder.get(key))
    if match := HUB_FILE.fullmatch(name):
        name = match["repository"]
        builder.notes.append(
            Message(
                "the transformer is taken from {name}; OneTrainer takes its file {file}", name=name, file=match["file"]
            )
        )
    if str(builder.source["model_type"]) == "CHROMA_1":
        options = [option for option in options if option != "clip_l"]
    parts = {option: base for option in options if base and option not in builder.values}
    builder.convert(key, {"pretrained_model_name_or_path": name})
    if parts:
        builder.change("base_model_name", other_networks(parts), parts)


def _import_onetrainer_output(builder: ImportBuilder) -> None:
    if path := builder.get("output_model_destination"):
        folder, name = split_path(str(path))
        values = {"output_dir": folder, "output_name": name} if builder.given("output_model_destination") else {}
        text = describe({"output_dir": folder, "output_name": name})
        builder.change("output_model_destination", text, values)
    builder.import_keys({"output_dtype": "save_precision"}, lambda value: precision(value, "float"))
    kind = str(builder.get("output_model_format") or "")
    if kind and not builder.adapters and builder.is_unet:
        ours = {"DIFFUSERS": "diffusers_safetensors", "CKPT": "ckpt"}.get(kind, "safetensors")
        builder.change("output_model_format", equal(kind, describe({"save_model_as": ours})), {"save_model_as": ours})
    elif kind:
        builder.change(
            "output_model_format", Message("{kind}: saved as a .safetensors file with sd-scripts' names", kind=kind)
        )


def use_current_keys(flat: JsonMapping) -> tuple[JsonObject, dict[str, str]]:
    """Return a file's dotted keys by their current names, and the old names by current name of those renamed."""
    current: JsonObject = {}
    names: dict[str, str] = {}
    for key, value in flat.items():
        new = OLD.get(key, key)
        if key.startswith("optimizer_") and "." not in key and key != "optimizer_defaults":
            new = f"optimizer.{key.removeprefix('optimizer_')}"
        if new.startswith("prior."):
            new = new.replace("prior.", "transformer.", 1)
        if new in flat and new != key:  # both names: the current one takes precedence
            current[key] = value
            continue
        current[new] = value
        if new != key:
            names[new] = key
    return current, names


def _fill_optimizer_defaults(settings: JsonObject, names: dict[str, str]) -> tuple[JsonObject, dict[str, str]]:
    """Fill the optimizer's missing settings from the file's optimizer_defaults."""
    # Presets name only the optimizer.
    start = f"optimizer_defaults.{settings.get('optimizer.optimizer')}."
    current_keys = {key: f"optimizer.{key.removeprefix(start)}" for key in settings if key.startswith(start)}
    missing = {key: current_key for key, current_key in current_keys.items() if current_key not in settings}
    filled = {missing.get(key, key): value for key, value in settings.items()}
    return filled, {**names, **{current_key: key for key, current_key in missing.items()}}


def fill_missing(settings: JsonMapping) -> tuple[JsonObject, frozenset[str], list[MessageLike]]:
    """Return the settings, with OneTrainer's defaults for missing and invalid ones; the keys of the missing ones; and a
    sentence for each invalid one."""
    filled, notes = dict(settings), []
    for key, default in ONETRAINER_TABLES["defaults"].items():
        value = settings.get(key)
        if key in ONETRAINER_TABLES["nullable"] and key in settings and value is None:
            continue
        if value is None:
            filled[key] = default
        elif isinstance(default, float | int) and not isinstance(default, bool) and to_number(value) is None:
            filled[key] = default
            template = "{key}: {value} is not a number, so OneTrainer's default {default} is used"
            notes.append(Message(template, key=key, value=repr(value), default=f"{default:g}"))
    return filled, frozenset(ONETRAINER_TABLES["defaults"].keys() - settings.keys()), notes
