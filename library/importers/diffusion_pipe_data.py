"""Import diffusion-pipe's file of data sets."""

import math
from collections.abc import Mapping
from typing import Any

from library.config.json_types import JsonMapping, JsonObject, JsonValue
from library.config.problems import ConfigError, Message, MessageLike, counted, option_name
from library.importers.builder import NOT_HERE, ImportBuilder, is_empty, is_on, to_number
from library.importers.shared import NO_IMAGES, PREPARED, dataset_toml, describe_datasets, load_tables, tables_of_list

DATASET_TABLES = load_tables("diffusion_pipe")["datasets"]
BUCKET_MULTIPLE = 32  # of buckets


def is_dataset(settings: JsonMapping) -> bool:
    return "model" not in settings and any("path" in table for table in tables_of_list(settings.get("directory")))


def convert_dataset(settings: JsonMapping) -> tuple[str, list[MessageLike]]:
    return _pipe_dataset_file(settings, {})


def read_data_file(builder: ImportBuilder, data: Any) -> None:
    """Import the file of data sets, if it could be read, and the size of batches."""
    sizes = _batch_sizes(builder)
    key = "dataset"
    if isinstance(data, Mapping) and is_dataset(data):
        text, notes = _pipe_dataset_file(data, sizes)
        builder.texts["dataset_config"] = text
        builder.notes += notes
        settings = _pipe_run_options(data)
        if builder.family != "sdxl" and (count := _count_variants(data)) > 1:  # its captions are not encoded once
            settings["cached_caption_variants"] = count
        builder.change(key, describe_datasets(text), settings)
    elif builder.get(key):
        builder.ignore(key, NO_IMAGES)
        builder.put(key, {"caption_extension": ".txt"})


def _pipe_run_options(data: JsonMapping) -> JsonObject:
    masked = any(not is_empty(table.get("mask_path")) for table in tables_of_list(data.get("directory")))
    return {"masked_loss": True} if masked else {}


def _count_variants(data: JsonMapping) -> int:
    """Return in how many orders of its tags each caption is encoded, at most over all folders, the written order
    included."""
    tables = [{**data, **table} for table in tables_of_list(data.get("directory"))]
    counts = [int(to_number(table.get("cache_shuffle_num")) or is_on(table.get("shuffle_tags"))) for table in tables]
    return 1 + max(counts, default=0)


def _batch_sizes(builder: ImportBuilder) -> dict[int, int]:
    """Return the batch size by resolution; 0 stands for all others."""
    keys = ("image_micro_batch_size_per_gpu", "micro_batch_size_per_gpu")
    key_in_use = next((key for key in keys if builder.get(key)), "")
    value = builder.get(key_in_use) if key_in_use else None
    sizes: dict[int, int] = {}
    if isinstance(value, list):
        for pair in value:
            if isinstance(pair, list) and len(pair) == 2:
                sizes[int(to_number(pair[0]) or 0)] = int(to_number(pair[1]) or 1)
        template = "{sizes} of batches by resolution: {place}"
        builder.change(key_in_use, Message(template, sizes=counted(len(sizes), "size"), place=PREPARED))
    elif key_in_use:
        sizes[0] = max(1, int(to_number(value) or 1))
        builder.rename(key_in_use, "train_batch_size", sizes[0])
    for key in keys:
        if key in builder.left():
            builder.ignore(key, Message("another key says {option}", option=option_name("train_batch_size")))
    return sizes


def _pipe_dataset_file(settings: JsonMapping, batches: Mapping[int, int]) -> tuple[str, list[MessageLike]]:
    sets: list[tuple[JsonObject, list[JsonObject]]] = []
    notes: list[MessageLike] = []
    for table in tables_of_list(settings.get("directory"), "directory", notes):
        folder_table = {**{key: value for key, value in settings.items() if key != "directory"}, **table}
        if is_empty(folder_table.get("path")):
            reason = Message("it names no folder ({key})", key="path")
            notes.append(Message("data set {name} is left out: {reason}", name="directory", reason=reason))
            continue
        _note_ignored_keys(folder_table, notes)
        for size in _parse_resolutions(folder_table.get("resolutions")):
            options: JsonObject = {"resolution": size, **_pipe_buckets(folder_table, size)}
            if (count := batches.get(size[0], batches.get(0, 1))) > 1:
                options["batch_size"] = count
            sets.append((options, [_pipe_subset(folder_table)]))
    if not sets:
        raise ConfigError("no data set in this file has a folder of images (path)")
    return dataset_toml({"caption_extension": ".txt"}, sets), notes


def _parse_resolutions(value: JsonValue) -> list[list[int]]:
    """Return resolutions as [width, height]; a single number is a square."""
    sizes = []
    for size in value if isinstance(value, list) and value else [512]:
        sides = [int(side) for side in map(to_number, size if isinstance(size, list) else [size]) if side and side > 0]
        sizes += [[sides[0], sides[1] if len(sides) > 1 else sides[0]]] if sides else []
    return sizes or [[512, 512]]


def _pipe_buckets(table: JsonMapping, size: list[int]) -> JsonObject:
    """Return bucket options that admit its narrowest and widest aspect ratio at the same area."""
    if not is_on(table.get("enable_ar_bucket")):
        return {"enable_bucket": False}
    min_ratio, max_ratio = (to_number(table.get(key)) for key in ("min_ar", "max_ar"))
    side = math.sqrt(size[0] * size[1])
    widest = max(max_ratio or 2.0, 1 / (min_ratio or 0.5), 1.0)
    shortest = max(BUCKET_MULTIPLE, int(side / math.sqrt(widest) // BUCKET_MULTIPLE * BUCKET_MULTIPLE))
    longest = int(-(-side * math.sqrt(widest) // 64) * 64)
    return {"enable_bucket": True, "min_bucket_reso": min(256, shortest), "max_bucket_reso": longest}


def _pipe_subset(table: JsonMapping) -> JsonObject:
    shuffles = is_on(table.get("shuffle_tags")) or bool(to_number(table.get("cache_shuffle_num")))
    separator = str(table.get("cache_shuffle_delimiter") or ",").strip() or ","
    subset: JsonObject = {
        "image_dir": table["path"],
        "num_repeats": max(1, round(to_number(table.get("num_repeats")) or 1)),
        "conditioning_data_dir": table.get("mask_path"),
        "control_directory": table.get("control_path"),
        "caption_prefix": table.get("caption_prefix"),
        "shuffle_caption": shuffles,
        "caption_separator": separator if shuffles and separator != "," else None,
    }
    return {key: value for key, value in subset.items() if not is_empty(value) and value is not False}


def _note_ignored_keys(table: JsonMapping, notes: list[MessageLike]) -> None:
    """Add a note for each key of a folder that has no equivalent."""
    place = Message("datasets of {folder}", folder=table["path"])
    repeats = to_number(table.get("num_repeats"))
    if repeats is not None and repeats != round(repeats):
        notes.append(Message("{place}: num_repeats = {repeats} is rounded", place=place, repeats=f"{repeats:g}"))
    reasons = {key: NOT_HERE for key in table if key not in DATASET_TABLES["known"]}
    if "ar_buckets" in table or "size_buckets" in table:
        reasons |= dict.fromkeys(
            ("ar_buckets", "size_buckets"),
            "buckets of all shapes are made here, by min_bucket_reso and max_bucket_reso",
        )
    if any(to_number(count) not in (None, 1) for count in table.get("frame_buckets") or ()):
        reasons["frame_buckets"] = "videos are not trained; images are"
    for key, reason in reasons.items():
        if not is_empty(table.get(key)) and table.get(key) is not False:
            line = Message("{place}: {key} is ignored: {reason}", place=place, key=key, reason=reason)
            if str(line) not in map(str, notes):
                notes.append(line)
