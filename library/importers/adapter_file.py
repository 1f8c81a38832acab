"""Import the metadata of a LoRA file: how it was trained, as sd-scripts, its relatives and this trainer write it."""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from library import families
from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import open_outside, parse_json
from library.config.problems import ConfigError, Message, Problem, option_name
from library.config.reading import resolution
from library.importers.builder import (
    ImportBuilder,
    describe,
    family_of_script,
    is_empty,
    is_on,
    script_of_family,
    to_number,
)
from library.importers.shared import (
    ONLY,
    equal,
    equivalent_optimizer,
    load_tables,
    optimizer_args,
    say_nearest,
    tables_of_list,
    takes_precedence,
)

TRAINER = "LoRA metadata"
APPLIES_EXIF = False  # as sd-scripts, which trains images as they are stored
METADATA_TABLES = load_tables("adapter_file")
METADATA = "__metadata__"
MAX_HEADER_BYTES = 100_000_000  # bytes of a header; that of a LoRA has a few hundred thousand
ENCODER_PREFIXES = ("lora_te", "text_encoder", "te1", "te2")
OLD_MODULES = ("networks.dylora", "networks.loha", "networks.lokr", "networks.oft", "networks.oft_flux")
MODEL_NAME_KEYS = ("ss_sd_model_name", "ss_vae_name")
OF_IMAGES = (
    *("resolution", "enable_bucket", "min_bucket_reso", "max_bucket_reso", "bucket_no_upscale", "shuffle_caption"),
    *("keep_tokens", "color_aug", "flip_aug", "random_crop", "caption_dropout_rate", "face_crop_aug_range"),
)


def load_header(path: Path) -> JsonObject:
    """Read the header of a .safetensors file. Raises ConfigError for another file, or one without metadata."""
    with open_outside(path) as file:
        size = int.from_bytes(file.read(8), "little")
        text = file.read(size) if 2 <= size <= MAX_HEADER_BYTES else b""
    if len(text) < max(size, 2):
        raise ConfigError("{path} is not a safetensors file", path=path)
    header = parse_json(text, path)
    metadata = header.get(METADATA) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not any(key.startswith("ss_") for key in metadata):
        raise ConfigError(
            "{path} does not say how it was trained, as it has no metadata of a training (ss_...); "
            "choose a base model at Base model",
            path=path,
        )
    return header


def with_header(text: str) -> bytes:
    header = text.encode()
    return len(header).to_bytes(8, "little") + header


def recognises(settings: JsonMapping) -> bool:
    return isinstance(settings.get(METADATA), Mapping)


def read_config(settings: JsonMapping, script: str = "") -> ImportBuilder:
    """Convert every key of the metadata to our values and an outcome. Raises ConfigError for unsupported models."""
    facts = {key: value for key, value in settings[METADATA].items()}
    version = _base_model_version(facts)
    family = family_of_script(script) or _find_stored_family(facts, version)
    builder = ImportBuilder(
        {key: _parse_stored_value(value) for key, value in facts.items()},
        script or script_of_family(family, True),
        TRAINER,
    )
    for part in (
        _import_stored_model,
        _import_stored_network,
        _import_stored_optimizer,
        _import_stored_length,
        _import_stored_images,
        _import_modelspec,
    ):
        part(builder)
    _import_stored_kind(builder, version)
    if builder.adapters and not any(name.startswith(ENCODER_PREFIXES) for name in settings):
        builder.set_by(
            "network_train_unet_only",
            "the file has no adapters of text encoders: network_train_unet_only",
            {"network_train_unet_only": True},
        )
    for key in builder.left():
        option = key.removeprefix("ss_")
        if key in METADATA_TABLES["ignored"] or not key.startswith("ss_"):
            continue
        if is_empty(builder.source[key]):
            builder.empty(key)
        else:
            builder.rename(key, METADATA_TABLES["renamed"].get(option, option))
    builder.ignore_rest(METADATA_TABLES["ignored"])
    return builder


def _parse_stored_value(text: Any) -> Any:
    # Metadata holds only texts. Numbers stay texts, which options can read.
    return {"None": None, "True": True, "False": False, "null": None}.get(text, text) if isinstance(text, str) else text


def _base_model_version(facts: JsonMapping) -> str:
    """Return ss_base_model_version, or its equivalent of modelspec.architecture; "" without either."""
    if version := str(facts.get("ss_base_model_version") or "").casefold():
        return version
    architecture = str(facts.get("modelspec.architecture") or "").casefold()
    stated = {family.architecture.casefold(): family.base_model_version for family in families.all_families()}
    versions = {**METADATA_TABLES["architectures"], **stated}
    return next((version for start, version in versions.items() if architecture.startswith(start)), "")


def _find_stored_family(facts: JsonMapping, version: str) -> str:
    stated = {family.base_model_version: family.name for family in families.all_families()}
    by_version = {**METADATA_TABLES["versions"], **stated}
    family = by_version.get(max(filter(version.startswith, by_version), key=len, default=""), "")
    if not family:
        if not version:
            template = (
                "this LoRA does not say which model it was trained on ({key}); "
                "name the training with kohya import --script"
            )
            raise ConfigError(template, key="ss_base_model_version")
        unsupported_versions = METADATA_TABLES["other_versions"].items()
        model = next((title for start, title in unsupported_versions if version.startswith(start)), version)
        raise ConfigError(
            "this LoRA was trained on {model}, which is not trained here; {advice}", model=model, advice=ONLY
        )
    return family


def _import_stored_kind(builder: ImportBuilder, version: str) -> None:
    """Choose among models whose files look the same."""
    values: JsonObject = {}
    if builder.family == "flux" and (kind := version.removeprefix("flux_")) in ("kontext", "fill", "chroma"):
        values["model_type"] = kind
    elif builder.family == "flux_2":
        name = version.removeprefix("flux_2_").replace("_", "-")
        values["model_version"] = name if name == "dev" else name.replace("klein-", "klein-base-")
    elif builder.family == "qwen_image" and "edit" in version:
        values["model_version"] = _edit_version(str(builder.get("modelspec.architecture") or ""))
    builder.chooses_script("ss_base_model_version", values)
    builder.explain("is part of ss_base_model_version", "modelspec.architecture")
    if builder.values.get("model_type") == "chroma":
        builder.put("ss_base_model_version", {"apply_t5_attn_mask": True, "guidance_scale": 0.0})


def _edit_version(architecture: str) -> str:
    number = re.search(r"2509|2511", architecture)
    return f"edit-{number[0]}" if number else "edit"


def _import_stored_model(builder: ImportBuilder) -> None:
    for key, option in zip(MODEL_NAME_KEYS, ("pretrained_model_name_or_path", "vae"), strict=True):
        name = str(builder.get(key) or "")
        if name.count("/") == 1 and not name.endswith((".safetensors", ".ckpt")):  # an id of the Hugging Face Hub
            builder.rename(key, option)
        elif name:
            builder.ignore(
                key,
                Message(
                    "it was {name}, without its folder: choose it in {option}", name=name, option=option_name(option)
                ),
            )


def _import_stored_network(builder: ImportBuilder) -> None:
    module = str(builder.get("ss_network_module") or "")
    arguments = _parse_stored_table(builder.get("ss_network_args"))
    network_args = optimizer_args({key: value for key, value in arguments.items() if key != "dropout"})
    values: JsonObject = {"network_args": network_args} if network_args else {}
    if values:
        builder.convert("ss_network_args", values)
    else:
        builder.empty("ss_network_args")
    if module in OLD_MODULES:
        other = "lycoris.kohya, network_args = algo=..."
        builder.problems.append(
            Problem("network_module", "{module} is not offered; write {other}", module=module, other=other)
        )
    if module:
        builder.rename("ss_network_module", "network_module")
    rates = builder.get("ss_text_encoder_lr")
    if isinstance(rates, str):
        numbers = [number for part in re.split(r"[\s,\[\]()]+", rates) if (number := to_number(part)) is not None]
        builder.rename("ss_text_encoder_lr", "text_encoder_lr", numbers) if numbers else None


def _parse_stored_table(text: Any) -> JsonObject:
    """Parse a table that is written as JSON; return an empty one for anything else."""
    try:
        table = parse_json(text, "metadata") if isinstance(text, str) else text
    except ConfigError:
        return {}
    return table if isinstance(table, dict) else {}


def _import_stored_optimizer(builder: ImportBuilder) -> None:
    """Import the optimizer, which is stored as its class with arguments in parentheses."""
    stored = str(builder.get("ss_optimizer") or "")
    if not stored:
        return
    path, _, inside = stored.partition("(")
    name, why = equivalent_optimizer(path.rpartition(".")[2])
    settings = re.findall(r"(\w+)=(\([^)]*\)|\[[^\]]*\]|[^,()]+)", inside)
    arguments = [f"{key}={value.strip('()[] ').replace(' ', '')}" for key, value in settings]
    values: JsonObject = {"optimizer_type": name} | ({"optimizer_args": arguments} if arguments else {})
    builder.change("ss_optimizer", why or equal(path, describe(values)), values)
    schedule = str(builder.get("ss_lr_scheduler") or "")
    if "." in schedule:
        builder.rename("ss_lr_scheduler", "lr_scheduler_type")


def _import_stored_length(builder: ImportBuilder) -> None:
    if not builder.number("ss_max_train_steps") and (epochs := builder.number("ss_num_epochs")):
        builder.rename("ss_num_epochs", "max_train_epochs", int(epochs))
    elif "ss_num_epochs" in builder.source:
        builder.ignore("ss_num_epochs", takes_precedence("max_train_steps"))


def _import_stored_images(builder: ImportBuilder) -> None:
    """Import how images were read. Their folders are stored without a path, so the user must choose them."""
    listed = builder.get("ss_datasets")
    try:
        sets = parse_json(listed, "metadata") if isinstance(listed, str) else []
    except ConfigError:
        sets = []
    sets = tables_of_list(sets, "ss_datasets", builder.notes)
    if sets:
        first = sets[0]
        subsets = tables_of_list(first.get("subsets"), "subsets", builder.notes)
        options = {**(subsets[0] if subsets else {}), **first}
        values: JsonObject = {name: options[name] for name in OF_IMAGES if not is_empty(options.get(name))}
        if isinstance(size := values.get("resolution"), list):
            values["resolution"] = ",".join(map(str, size))
        if len(sets) > 1 and all(dataset.get("subsets") == first.get("subsets") for dataset in sets):
            with contextlib.suppress(ConfigError):  # the same images at several sizes
                values["resolution"] = resolution([dataset.get("resolution") for dataset in sets])
                sets = [first]
        if count := to_number(options.get("batch_size_per_device")):
            values["train_batch_size"] = int(count)
        builder.convert("ss_datasets", values)
        if len(sets) > 1:
            builder.notes.append(Message("only the first of {count} data sets is read", count=len(sets)))
    if size := builder.get("ss_resolution"):
        sides = re.findall(r"\d+", str(size))
        builder.rename("ss_resolution", "resolution", ",".join(sides)) if sides else None
    for key in ("ss_dataset_dirs", "ss_reg_dataset_dirs"):
        if folders := _parse_stored_table(builder.get(key)):
            template = "its folders were {names}: choose them in {option}"
            option = "train_data_dir" if key == "ss_dataset_dirs" else "reg_data_dir"
            builder.ignore(key, Message(template, names=", ".join(folders), option=option_name(option)))
        elif key in builder.source:
            builder.change(key, "it names no folder")


def _import_modelspec(builder: ImportBuilder) -> None:
    for name, option in METADATA_TABLES["modelspec"].items():
        if builder.get(f"modelspec.{name}") is not None:
            builder.rename(f"modelspec.{name}", option)
    kind = str(builder.get("modelspec.prediction_type") or "")
    if kind == "v":
        builder.convert("modelspec.prediction_type", {"v_parameterization": True})
    else:
        is_noise = kind == "epsilon"
        text = equal(kind, "v_parameterization = false") if is_noise else say_nearest(kind, "epsilon")
        builder.explain(text, "modelspec.prediction_type")
    if match := re.fullmatch(r"(\d+),(\d+)", str(builder.get("modelspec.timestep_range") or "")):
        builder.convert("modelspec.timestep_range", {"min_timestep": int(match[1]), "max_timestep": int(match[2])})
    for key, option in (("modelspec.encoder_layer", "clip_skip"), ("modelspec.resolution", "resolution")):
        if key in builder.source:
            builder.explain(Message("is {option} here", option=option_name(option)), key)
            builder.values.setdefault(option, str(builder.source[key]).replace("x", ","))
            builder.keys.setdefault(option, key)
    if "modelspec.is_negative_embedding" in builder.source:
        is_negative = is_on(builder.get("modelspec.is_negative_embedding"))
        builder.rename("modelspec.is_negative_embedding", "metadata_is_negative_embedding", is_negative)
