"""Import SimpleTuner's data sets (multidatabackend.json) and its prompts."""

import math
from collections.abc import Iterator, Mapping

from library.config.json_types import JsonMapping, JsonObject, JsonValue
from library.config.problems import ConfigError, Message, counted
from library.importers.builder import NOT_HERE, ImportBuilder, is_empty, is_on, to_number
from library.importers.shared import (
    PREPARED,
    dataset_toml,
    guidance,
    guidance_flag,
    load_tables,
    said_of,
    tables,
    told_prompts,
)

TABLES = load_tables("simpletuner")["datasets"]
TRAINER = "SimpleTuner"
OTHER_KINDS = {"video": "videos", "audio": "audio"}
HELPERS = ("text_embeds", "image_embeds", "conditioning", "conditioning_image_embeds", "eval", "caption")


def is_datasets(found: JsonValue) -> bool:
    """Whether this is the list of a multidatabackend.json."""
    listed = tables(found)
    return bool(listed) and all("id" in table for table in listed)


def _datasets(builder: ImportBuilder) -> None:
    key, listed = "data_backend_config", builder.get("data_backend_config")
    if not is_datasets(listed):
        _without_datasets(builder, key)
        return
    used = [
        one
        for one in tables(listed, key, builder.notes)
        if not is_on(one.get("disabled")) and not is_on(one.get("disable"))
    ]
    kinds = {str(one.get("dataset_type") or "image") for one in used}
    if "image" not in kinds and (other := next((OTHER_KINDS[kind] for kind in kinds if kind in OTHER_KINDS), "")):
        raise ConfigError(
            "this file of {trainer} trains on {what}, which is not done here: use {trainer} for it",
            trainer=TRAINER,
            what=other,
        )
    beside = {str(one["id"]): one for one in used if one.get("dataset_type") == "conditioning"}
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
    for one in used:
        table = {**{name: value for name, value in shared.items() if not is_empty(value)}, **one}
        if _is_left_out(builder, table):
            continue
        subset = _subset(builder, table, beside)
        masked = masked or "conditioning_data_dir" in subset
        sets.append((_own(builder, table), [subset]))
        _note(builder, one)
    if sets:
        builder.texts["dataset_config"] = dataset_toml({}, sets)
    values = {"masked_loss": True} if masked else {}
    builder.change(key, Message("{folders}: {place}", folders=counted(len(sets), "folder"), place=PREPARED), values)
    builder.explain(PREPARED, *shared, "aspect_bucket_alignment")


def _without_datasets(builder: ImportBuilder, key: str) -> None:
    """Say why there are no data sets, and take the size of the images from the settings alone."""
    listed = builder.get(key)
    if unnamed := [str(at) for at, table in enumerate(tables(listed), 1) if "id" not in table]:
        template = "data sets in it have no id, by which others name them ({numbers}): give each one, and import again"
        builder.ignore(key, Message(template, numbers=", ".join(unnamed)))
    elif listed:
        builder.ignore(
            key, "this file was not found, or cannot be read; name the images with train_data_dir or dataset_config"
        )
    size = _side(builder.source)
    builder.change("resolution", said_of({"resolution": size}), {"resolution": str(size), "enable_bucket": True})
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
    """Whether a data set is no folder of images; says so of those that hold samples."""
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


def _side(table: JsonMapping) -> int:
    """The side of a square of the size that images are trained at; a resolution of type "area" is in megapixels."""
    size = max(0, to_number(table.get("resolution")) or 0) or 1024
    if str(table.get("resolution_type")) == "area" or size < 16:
        size = math.sqrt(size * 1024 * 1024)
    return max(64, round(size / 64) * 64)


def _own(builder: ImportBuilder, table: JsonMapping) -> JsonObject:
    square = is_on(table.get("crop")) and str(table.get("crop_aspect") or "square") == "square"
    side = _side(table)
    own: JsonObject = {"resolution": side, "enable_bucket": not square, "bucket_no_upscale": True}
    own |= {} if square else {"max_bucket_reso": side * 2}
    if step := to_number(builder.source.get("aspect_bucket_alignment")):
        own["bucket_reso_steps"] = int(step)
    count = to_number(table.get("train_batch_size")) or builder.number("train_batch_size")
    return own | ({"batch_size": int(count)} if count and count > 1 else {})


def _subset(builder: ImportBuilder, table: JsonMapping, beside: Mapping[str, JsonMapping]) -> JsonObject:
    strategy, words = str(table.get("caption_strategy") or "textfile"), table.get("instance_prompt")
    subset: JsonObject = {
        "image_dir": table["instance_data_dir"],
        "num_repeats": max(1, int(to_number(table.get("repeats")) or 0) + 1),
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
    folders = list(_conditions(table, beside))
    references = [folder for kind, folder in folders if kind != "mask"]
    subset |= {"conditioning_data_dir": next((folder for kind, folder in folders if kind == "mask"), None)}
    subset |= {"control_directory": references[0], "more_control_directories": references[1:]} if references else {}
    return {name: value for name, value in subset.items() if not is_empty(value) and value is not False}


def _conditions(table: JsonMapping, beside: Mapping[str, JsonMapping]) -> Iterator[tuple[str, JsonValue]]:
    """The kinds and folders of masks and reference images of a data set."""
    named = table.get("conditioning_data")
    for name in named if isinstance(named, list) else [named]:
        other = beside.get(str(name))
        if other and not is_empty(other.get("instance_data_dir")):
            yield str(other.get("conditioning_type") or "reference_strict"), other["instance_data_dir"]


def _note(builder: ImportBuilder, table: JsonMapping) -> None:
    """A sentence for each key of a data set that has no equivalent."""
    for key in sorted(table.keys() - set(TABLES["known"])):
        value = table[key]
        if not is_empty(value) and value not in (False, 0):
            place = Message("data set {name}", name=table["id"])
            reason = "images of every size are trained" if key in SIZES else NOT_HERE
            builder.notes.append(Message("{place}: {key} is ignored: {reason}", place=place, key=key, reason=reason))


SIZES = (
    "minimum_image_size",
    "maximum_image_size",
    "target_downsample_size",
    "minimum_aspect_ratio",
    "maximum_aspect_ratio",
    "max_upscale_threshold",
    "crop_aspect_buckets",
)


def _samples(builder: ImportBuilder) -> None:
    library, one = builder.get("user_prompt_library"), builder.get("validation_prompt")
    prompts = [str(text) for text in library.values() if not is_empty(text)] if isinstance(library, Mapping) else []
    prompts = [*([str(one)] if one else []), *prompts]
    if "user_prompt_library" in builder.source and not isinstance(library, Mapping):
        builder.ignore(
            "user_prompt_library", "this file was not found, or cannot be read; name the prompts with sample_prompts"
        )
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
    builder.texts["sample_prompts"] = "\n".join(_line(builder, prompt) for prompt in prompts) + "\n"
    builder.explain(told_prompts(len(prompts)), *keys, "user_prompt_library")
    if by_epoch:
        builder.rename("validation_epoch_interval", "sample_every_n_epochs", int(by_epoch))
        builder.explain("sample_every_n_epochs decides", "validation_step_interval")
    else:
        every = int(interval or 100)
        builder.assume("validation_step_interval", every)
        builder.rename("validation_step_interval", "sample_every_n_steps", every)
    builder.explain("samples are generated", "validation_disable")


def _line(builder: ImportBuilder, prompt: str) -> str:
    """A prompt with the settings that SimpleTuner has for all."""
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
    given = (f"{flag} {value}" for flag, value in flags.items() if not is_empty(value))
    return " ".join([*prompt.split(), *given])


PARTS = (_datasets, _samples)
