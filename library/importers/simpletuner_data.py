"""Import SimpleTuner's data sets (multidatabackend.json) and its prompts."""

import math
from collections.abc import Iterator, Mapping

from library.config.json_types import JsonMapping, JsonObject, JsonValue
from library.config.problems import ConfigError, Message, counted
from library.importers.builder import NOT_HERE, ImportBuilder, describe, is_empty, is_on, to_number
from library.importers.shared import (
    NO_FOLDERS,
    NO_IMAGES,
    NO_PROMPTS,
    PREPARED,
    dataset_toml,
    describe_prompts,
    guidance,
    guidance_flag,
    load_tables,
    tables_of_list,
)

DATASET_TABLES = load_tables("simpletuner")["datasets"]
TRAINER_NAME = "SimpleTuner"
OTHER_KINDS = {"video": "videos", "audio": "audio"}
HELPERS = ("text_embeds", "image_embeds", "conditioning", "conditioning_image_embeds", "eval", "caption")


def is_datasets(datasets: JsonValue) -> bool:
    listed = tables_of_list(datasets)
    return bool(listed) and all("id" in table for table in listed)


def _import_simpletuner_datasets(builder: ImportBuilder) -> None:
    key, listed = "data_backend_config", builder.get("data_backend_config")
    if not is_datasets(listed):
        _import_size_alone(builder, key)
        return
    enabled = [
        dataset
        for dataset in tables_of_list(listed, key, builder.notes)
        if not is_on(dataset.get("disabled")) and not is_on(dataset.get("disable"))
    ]
    kinds = {str(dataset.get("dataset_type") or "image") for dataset in enabled}
    if "image" not in kinds and (other := next((OTHER_KINDS[kind] for kind in kinds if kind in OTHER_KINDS), "")):
        raise ConfigError(
            "this file of {trainer} trains on {what}, which is not done here: use {trainer} for it",
            trainer=TRAINER_NAME,
            what=other,
        )
    conditioning = {str(dataset["id"]): dataset for dataset in enabled if dataset.get("dataset_type") == "conditioning"}
    shared = {
        name: builder.source.get(name)
        for name in (
            "resolution",
            "resolution_type",
            "caption_strategy",
            "instance_prompt",
            "prepend_instance_prompt",
            "only_instance_prompt",
        )
    }
    sets, masked = [], False
    for dataset in enabled:
        table = {**{name: value for name, value in shared.items() if not is_empty(value)}, **dataset}
        if _is_left_out(builder, table):
            continue
        subset = _simpletuner_subset(builder, table, conditioning)
        masked = masked or "conditioning_data_dir" in subset
        sets.append((_dataset_options(builder, table), [subset]))
        _note_unknown_keys(builder, dataset)
    if not sets:
        of_images = (table for table in enabled if str(table.get("dataset_type") or "image") == "image")
        _import_size_alone(builder, key, next(of_images, {}))
        return
    builder.texts["dataset_config"] = dataset_toml({}, sets)
    values = {"masked_loss": True} if masked else {}
    builder.change(key, Message("{folders}: {place}", folders=counted(len(sets), "folder"), place=PREPARED), values)
    builder.explain(PREPARED, *shared, "aspect_bucket_alignment")


def _import_size_alone(builder: ImportBuilder, key: str, example: JsonMapping | None = None) -> None:
    """Report why there are no data sets, and take the size of the images from a data set that is left out, or from the
    settings alone."""
    listed = builder.get(key)
    if unnamed := [str(at) for at, table in enumerate(tables_of_list(listed), 1) if "id" not in table]:
        template = "data sets in it have no id, by which others name them ({numbers}): give each one, and import again"
        builder.ignore(key, Message(template, numbers=", ".join(unnamed)))
    elif listed:
        builder.ignore(key, NO_IMAGES if example is None else NO_FOLDERS)
    sizes = {name: value for name, value in (example or {}).items() if not is_empty(value)}
    size = _square_side({**builder.source, **sizes})
    values = {"resolution": str(size), "enable_bucket": True, "caption_extension": ".txt"}
    builder.change("resolution", describe({"resolution": size}), values)
    builder.explain(
        "is part of resolution",
        "resolution_type",
        "aspect_bucket_alignment",
        "caption_strategy",
        "instance_prompt",
        "prepend_instance_prompt",
        "only_instance_prompt",
    )


def _is_left_out(builder: ImportBuilder, table: JsonMapping) -> bool:
    """Return whether a data set is left out, as it is no local folder of images; note it unless it only supports
    others."""
    kind = str(table.get("dataset_type") or "image")
    if kind in HELPERS:
        return True
    name = str(table["id"])
    reason: Message | str = ""
    if kind != "image":
        reason = "videos are not trained; images are"
    elif str(table.get("type") or "local") != "local":
        reason = "only folders of this computer are read: download the images, and name their folder"
    elif is_empty(table.get("instance_data_dir")):
        reason = Message("it names no folder ({key})", key="instance_data_dir")
    if reason:
        builder.notes.append(Message("data set {name} is left out: {reason}", name=name, reason=reason))
    return bool(reason)


def _square_side(table: JsonMapping) -> int:
    """Return the side of a square of the trained size; a resolution of type "area" is in megapixels."""
    size = max(0, to_number(table.get("resolution")) or 0) or 1024
    if str(table.get("resolution_type")) == "area" or size < 16:
        size = math.sqrt(size * 1024 * 1024)
    return max(64, round(size / 64) * 64)


def _dataset_options(builder: ImportBuilder, table: JsonMapping) -> JsonObject:
    square = is_on(table.get("crop")) and str(table.get("crop_aspect") or "square") == "square"
    side = _square_side(table)
    options: JsonObject = {"resolution": side, "enable_bucket": not square, "bucket_no_upscale": True}
    options |= {} if square else {"max_bucket_reso": side * 2}
    if step := to_number(builder.source.get("aspect_bucket_alignment")):
        options["bucket_reso_steps"] = int(step)
    count = to_number(table.get("train_batch_size")) or builder.number("train_batch_size")
    return options | ({"batch_size": int(count)} if count and count > 1 else {})


def _simpletuner_subset(
    builder: ImportBuilder, table: JsonMapping, conditioning: Mapping[str, JsonMapping]
) -> JsonObject:
    strategy, words = str(table.get("caption_strategy") or "textfile"), table.get("instance_prompt")
    subset: JsonObject = {
        "image_dir": table["instance_data_dir"],
        "num_repeats": max(1, int(to_number(table.get("repeats")) or 0) + 1),  # SimpleTuner counts additional repeats
        "caption_extension": ".txt",
        "random_crop": is_on(table.get("crop")) and table.get("crop_style") == "random",
        "is_reg": is_on(table.get("is_regularisation_data")) or is_on(table.get("is_regularization_data")),
    }
    if strategy == "instanceprompt" or is_on(table.get("only_instance_prompt")):
        subset |= {"caption_extension": ".none", "class_tokens": words}
    elif is_on(table.get("prepend_instance_prompt")) and words:
        subset["caption_prefix"] = f"{words} "
    elif strategy != "textfile":
        template = "data set {name}: captions come from text files beside the images here, not from {source}"
        builder.notes.append(Message(template, name=table["id"], source=strategy))
    folders = list(_condition_folders(table, conditioning))
    references = [folder for kind, folder in folders if kind != "mask"]
    subset |= {"conditioning_data_dir": next((folder for kind, folder in folders if kind == "mask"), None)}
    subset |= {"control_directory": references[0], "more_control_directories": references[1:]} if references else {}
    return {name: value for name, value in subset.items() if not is_empty(value) and value is not False}


def _condition_folders(table: JsonMapping, conditioning: Mapping[str, JsonMapping]) -> Iterator[tuple[str, JsonValue]]:
    """Yield the kinds and folders of a data set's masks and reference images."""
    names = table.get("conditioning_data")
    for name in names if isinstance(names, list) else [names]:
        dataset = conditioning.get(str(name))
        if dataset and not is_empty(dataset.get("instance_data_dir")):
            yield str(dataset.get("conditioning_type") or "reference_strict"), dataset["instance_data_dir"]


def _note_unknown_keys(builder: ImportBuilder, table: JsonMapping) -> None:
    """Add a note for each key of a data set that has no equivalent."""
    for key in sorted(table.keys() - set(DATASET_TABLES["known"])):
        value = table[key]
        if not is_empty(value) and value not in (False, 0):
            place = Message("data set {name}", name=table["id"])
            reason = "images of every size are trained" if key in SIZE_KEYS else NOT_HERE
            builder.notes.append(Message("{place}: {key} is ignored: {reason}", place=place, key=key, reason=reason))


SIZE_KEYS = (
    "minimum_image_size",
    "maximum_image_size",
    "target_downsample_size",
    "minimum_aspect_ratio",
    "maximum_aspect_ratio",
    "max_upscale_threshold",
    "crop_aspect_buckets",
)


def _import_simpletuner_samples(builder: ImportBuilder) -> None:
    library, single_prompt = builder.get("user_prompt_library"), builder.get("validation_prompt")
    prompts = [str(text) for text in library.values() if not is_empty(text)] if isinstance(library, Mapping) else []
    prompts = [*([str(single_prompt)] if single_prompt else []), *prompts]
    if "user_prompt_library" in builder.source and not isinstance(library, Mapping):
        builder.ignore("user_prompt_library", NO_PROMPTS)
    keys = (
        "validation_prompt",
        "validation_negative_prompt",
        "validation_guidance",
        "validation_num_inference_steps",
        "validation_seed",
        "validation_resolution",
    )
    interval, by_epoch = builder.number("validation_step_interval"), builder.number("validation_epoch_interval")
    if not prompts or is_on(builder.get("validation_disable")):
        builder.explain(
            "there are no prompts to sample",
            *keys,
            "validation_step_interval",
            "validation_epoch_interval",
            "validation_disable",
            "user_prompt_library",
        )
        return
    builder.texts["sample_prompts"] = "\n".join(_simpletuner_prompt_line(builder, prompt) for prompt in prompts) + "\n"
    builder.explain(describe_prompts(len(prompts)), *keys, "user_prompt_library")
    if by_epoch:
        builder.rename("validation_epoch_interval", "sample_every_n_epochs", int(by_epoch))
        builder.explain("sample_every_n_epochs decides", "validation_step_interval")
    else:
        steps = int(interval or 100)
        builder.assume("validation_step_interval", steps)
        builder.rename("validation_step_interval", "sample_every_n_steps", steps)
    builder.explain("samples are generated", "validation_disable")


def _simpletuner_prompt_line(builder: ImportBuilder, prompt: str) -> str:
    """Return a prompt with the flags for SimpleTuner's settings, which apply to all prompts."""
    sides = str(builder.get("validation_resolution") or "1024x1024").split(",")[0].casefold().split("x")
    width, height = (int(to_number(side) or 1024) for side in (sides[0], sides[-1]))
    chroma = builder.values.get("model_type") == "chroma" or builder.get("model_family") == "chroma"
    scale = builder.number("validation_guidance")
    flags = {
        "--w": width,
        "--h": height,
        "--s": builder.get("validation_num_inference_steps") or 30,
        guidance_flag(builder, chroma=chroma): guidance(builder, 7.5 if scale is None else scale),
        "--d": builder.get("validation_seed"),
        "--n": builder.get("validation_negative_prompt"),
    }
    words = (f"{flag} {value}" for flag, value in flags.items() if not is_empty(value))
    return " ".join([*prompt.split(), *words])


DATA_IMPORTS = (_import_simpletuner_datasets, _import_simpletuner_samples)
