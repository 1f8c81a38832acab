"""Weights in 8 bits with scales, as ComfyUI's files have them: the marks beside them, and their formats."""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path

from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import parse_json
from library.config.problems import ConfigError, Message

SCALES = ("scale_weight", "weight_scale")  # names of the scale of an 8-bit weight
SCALE_TYPES = ("F32", "BF16", "F16")
FORMAT = "comfy_quant"  # JSON beside a weight: its format
SCALED = (*SCALES, "scaled_fp8", "scale_input", "input_scale", FORMAT)
EIGHT_BITS = ("I8", "F8_E4M3")  # dtypes of weights that have scales
INT8_FORMAT = "int8_tensorwise"  # one scale, or one of each row; the only format of integers that is read
USUAL_GROUP = 256
TOKENIZERS = ("tekken_model", "spiece_model")  # tokenizer bytes inside ComfyUI's text encoder files


# ---- formats


def parse_format(text: bytes, path: Path) -> JsonObject:
    """Return the format of a weight from the JSON beside it, {} for none. Raises ConfigError if it is damaged."""
    text = text.strip(b"\0 ")
    try:
        parsed = parse_json(text, path) if text else {}
    except ConfigError:  # of a JSON file
        parsed = None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("format", ""), str):
        raise ConfigError("{path} has a damaged {key}: download it again", path=path, key=FORMAT)
    return parsed


def rotated_group(format: JsonMapping, columns: int, path: Path) -> int:
    """Return how many values of a row are rotated together, 0 for none. Raises ConfigError for impossible groups."""
    if not format.get("convrot"):
        return 0
    group = format.get("convrot_groupsize", USUAL_GROUP)
    fits = type(group) is int and group >= 4 and columns % group == 0
    if not fits or group & (group - 1) or group.bit_length() % 2 == 0:  # no power of 4
        template = "{path} has rows of {columns} values, rotated by {group}, which is impossible: download it again"
        raise ConfigError(template, path=path, columns=columns, group=group)
    return group


def _contents(path: Path, entries: Mapping[str, JsonMapping], ending: str) -> Iterator[tuple[str, bytes]]:
    """Yield the layer and the bytes of each tensor of a file whose name ends so."""
    places = {name: entry["data_offsets"] for name, entry in entries.items() if name.endswith(f".{ending}")}
    if not places or not path.is_file():
        return
    with path.open("rb") as file:
        data = 8 + int.from_bytes(file.read(8), "little")
        for name, (first, last) in places.items():
            file.seek(data + first)
            yield name.rpartition(".")[0], file.read(last - first)


def unreadable_scales(path: Path, entries: Mapping[str, JsonMapping]) -> Message | None:
    """Return why the 8-bit weights of a file cannot be read: scales that are missing, damaged or of other rows, or
    another format; None if they can.
    """
    weights = {name.removesuffix(".weight"): entry for name, entry in entries.items() if entry["dtype"] in EIGHT_BITS}
    for layer, entry in weights.items():
        scale = next((entries[key] for name in SCALES if (key := f"{layer}.{name}") in entries), None)
        kind = "int8" if entry["dtype"] == "I8" else "fp8"
        if scale is None and (kind == "int8" or _is_scaled(layer, entries)):
            template = (
                "{path} has weights in {kind} without their scales ({key}.weight_scale): download a complete file"
            )
            return Message(template, path=path, kind=kind, key=layer)
        if scale and scale["dtype"] in SCALE_TYPES and not _fits(scale["shape"], entry["shape"]):
            template = "{path} has scales of {key} that do not fit its weight: download a complete file"
            return Message(template, path=path, key=layer)
    return _damaged_scale(path, entries, weights) or _unread_format(path, entries, weights)


def _is_scaled(layer: str, entries: Mapping[str, JsonMapping]) -> bool:
    """Return whether a file says that a weight in fp8 has a scale: by another mark beside it, or, in files without any
    scale, by the mark of the whole file.
    """
    if any(f"{layer}.{mark}" in entries for mark in ("scale_input", "input_scale", FORMAT)):
        return True
    whole = any(name.rpartition(".")[2] == "scaled_fp8" for name in entries)
    return whole and not any(name.endswith(SCALES) for name in entries)


def _fits(scale: Sequence[int], weight: Sequence[int]) -> bool:
    """Return whether scales are one, or one of each row, or of each of equal blocks of a row."""
    count, values = math.prod(scale), math.prod(weight)
    if count == 1 or not values or not weight:
        return count == 1
    blocks, rest = divmod(count, weight[0])
    return not rest and blocks > 0 and values // weight[0] % blocks == 0


def _damaged_scale(path: Path, entries: Mapping[str, JsonMapping], layers: Container[str]) -> Message | None:
    """Return which scale of a file is NaN or infinite; None if all are numbers."""
    import numpy as np  # only for files with scales, as commands that read none start without it

    for ending in SCALES:
        for layer, content in _contents(path, entries, ending):
            kind = entries[f"{layer}.{ending}"]["dtype"]
            # The exponent of such a number has all bits set.
            words, bits = ("<u4", 0x7F800000) if kind == "F32" else ("<u2", 0x7F80 if kind == "BF16" else 0x7C00)
            if layer not in layers or kind not in SCALE_TYPES:
                continue
            if ((np.frombuffer(content, words) & bits) == bits).any():
                template = "{path} is damaged: the scale of {key} is NaN or infinite; download it again"
                return Message(template, path=path, key=layer)
    return None


def _unread_format(
    path: Path, entries: Mapping[str, JsonMapping], weights: Mapping[str, JsonMapping]
) -> Message | None:
    """Return which format of a file with int8 weights is not read; None if all are. Raises ConfigError if a format is
    damaged, or its rotation impossible.
    """
    if all(entry["dtype"] != "I8" for entry in weights.values()):
        return None
    for layer, text in _contents(path, entries, FORMAT):
        format = parse_format(text, path)
        if (kind := format.get("format", INT8_FORMAT)) not in (INT8_FORMAT, "float8_e4m3fn"):
            template = (
                "{path} is stored as {kind}, which this trainer does not read: use the bf16 file, fp8 e4m3fn "
                "or int8_tensorwise"
            )
            return Message(template, path=path, kind=kind)
        if layer in weights and weights[layer]["dtype"] == "I8" and weights[layer]["shape"]:
            rotated_group(format, weights[layer]["shape"][-1], path)
    return None


def stored_oddly(path: Path, entries: Mapping[str, JsonMapping], scaled: bool = False) -> Message | None:
    """Return why the dtypes of a file are not supported, None if they are: 8 bits with scales (unless `scaled`), other
    8-bit formats, 4 bits.
    """
    marks = {name for name in entries if name.rpartition(".")[2] in SCALED}
    types = {entry["dtype"] for name, entry in entries.items() if name not in marks and name not in TOKENIZERS}
    integers = {"U8"} if scaled else {"U8", "I8"}
    if types & integers or any(name.endswith((".absmax", ".quant_map")) for name in entries):
        return Message(
            "{path} is quantised to integers or 4 bits, which is not trained: use the bf16 file, or fp8 e4m3fn",
            path=path,
        )
    if problem := unreadable_scales(path, entries):
        return problem
    is_readable = scaled and all(entries[m]["dtype"] in SCALE_TYPES for m in marks if m.endswith(SCALES))
    if marks and not is_readable:
        return Message(
            "{path} is a scaled fp8 file, which is not read: use the bf16 file, or plain fp8 (e4m3fn) without scales",
            path=path,
        )
    if unsupported := types & {"F8_E5M2", "F8_E5M2FNUZ", "F8_E4M3FNUZ"}:
        return Message(
            "{path} is stored as {kind}, which is too coarse here: use the bf16 file, or fp8 e4m3fn",
            path=path,
            kind=min(unsupported).lower(),
        )
    return None
