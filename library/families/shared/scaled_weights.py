"""Weights in 8 bits with scales, as ComfyUI's files have them: the marks beside them, and their formats."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import parse_json
from library.config.problems import ConfigError, Message

SCALES = ("scale_weight", "weight_scale")  # names of the scale of an 8-bit weight
FORMAT = "comfy_quant"  # JSON beside a weight: its format
SCALED = (*SCALES, "scaled_fp8", "scale_input", "input_scale", FORMAT)
INT8_FORMAT = "int8_tensorwise"  # one scale, or one of each row; the only format of integers that is read
USUAL_GROUP = 256
TOKENIZERS = ("tekken_model", "spiece_model")  # tokenizer bytes inside ComfyUI's text encoder files


# ---- formats


def parse_format(text: bytes, path: Path) -> JsonObject:
    """Return the format of a weight from the JSON beside it, {} for none. Raises ConfigError if it is damaged."""
    text = text.strip(b"\0 ")
    parsed = parse_json(text, path) if text else {}
    if not isinstance(parsed, dict):
        raise ConfigError("{path} has a damaged {key}: download it again", path=path, key=FORMAT)
    return parsed


def rotated_group(format: JsonMapping, columns: int, path: Path) -> int:
    """Return how many values of a row are rotated together, 0 for none. Raises ConfigError for impossible groups."""
    if not format.get("convrot"):
        return 0
    group = format.get("convrot_groupsize", USUAL_GROUP)
    fits = isinstance(group, int) and group >= 4 and columns % group == 0
    if not fits or not math.log(group, 4).is_integer():
        template = "{path} has rows of {columns} values, rotated by {group}, which is impossible: download it again"
        raise ConfigError(template, path=path, columns=columns, group=group)
    return group


def _formats(path: Path, entries: Mapping[str, JsonMapping]) -> Iterator[JsonObject]:
    """Yield the formats beside the weights of a file."""
    places = [entry["data_offsets"] for name, entry in entries.items() if name.endswith(f".{FORMAT}")]
    if not places or not path.is_file():
        return
    with path.open("rb") as file:
        data = 8 + int.from_bytes(file.read(8), "little")
        for first, last in places:
            file.seek(data + first)
            yield parse_format(file.read(last - first), path)


def unread_integers(path: Path, entries: Mapping[str, JsonMapping]) -> Message | None:
    """Return why the int8 weights of a file cannot be read: without scales, or in another format; None if they can."""
    layers = [name.rpartition(".")[0] for name, entry in entries.items() if entry["dtype"] == "I8"]
    for layer in layers:
        if not any(f"{layer}.{name}" in entries for name in SCALES):
            template = "{path} has weights in int8 without their scales ({key}.weight_scale): download a complete file"
            return Message(template, path=path, key=layer)
    for format in _formats(path, entries) if layers else ():
        if (kind := format.get("format", INT8_FORMAT)) not in (INT8_FORMAT, "float8_e4m3fn"):
            template = (
                "{path} is stored as {kind}, which this trainer does not read: use the bf16 file, fp8 e4m3fn "
                "or int8_tensorwise"
            )
            return Message(template, path=path, kind=kind)
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
    if problem := unread_integers(path, entries):
        return problem
    is_readable = scaled and all(entries[m]["dtype"] in ("F32", "BF16", "F16") for m in marks if m.endswith(SCALES))
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
