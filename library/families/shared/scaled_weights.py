"""Weights in 8 bits with scales, as ComfyUI's files have them: the marks beside them, and their formats."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import parse_json
from library.config.problems import ConfigError, Message
from library.families.shared.raw_header import header_metadata
from library.families.shared.tensor_names import DENOISER_PREFIXES

if TYPE_CHECKING:
    import numpy as np

# Of a header, by name. Those of several files have the path of their own under IN_FILE.
Entries = Mapping[str, JsonMapping]
IN_FILE = "in_file"
SCALES = ("scale_weight", "weight_scale")  # names of the scale of an 8-bit weight
SCALE_TYPES = ("F32", "BF16", "F16")
# Other dtypes of scales, by name: powers of 2 for each 32 values, which some files declare as bytes.
BLOCK_SCALES = {"F8_E8M0": "mxfp8", "U8": "mxfp8"}
FORMAT = "comfy_quant"  # JSON beside a weight: its format
# In a header's metadata: the formats of all layers, which count before those marks.
HEADER_FORMATS = "_quantization_metadata"
SCALED = (*SCALES, "scaled_fp8", "scale_input", "input_scale", FORMAT)
EIGHT_BITS = ("I8", "F8_E4M3")  # dtypes of weights that have scales
INT8_FORMAT = "int8_tensorwise"  # one scale, or one of each row; the only format of integers that is read
READ_FORMATS = (INT8_FORMAT, "float8_e4m3fn", "float8_e4m3fn_rowwise")
USUAL_GROUP = 256
UNREAD_FORMAT = (
    "{path} is stored as {kind}, which this trainer does not read: use the bf16 file, fp8 e4m3fn or int8_tensorwise"
)
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


def formats_in_header(path: Path) -> dict[str, JsonObject]:
    """Return the formats by layer that the metadata of a .safetensors file has. Raises ConfigError for damaged ones."""
    if (text := header_metadata(path).get(HEADER_FORMATS)) is None:
        return {}
    damaged = ConfigError("{path} has a damaged {key}: download it again", path=path, key=HEADER_FORMATS)
    try:
        layers = parse_json(text.encode(), path)["layers"].items()
    except (ConfigError, AttributeError, LookupError, TypeError):
        raise damaged from None
    if not all(isinstance(format, dict) and isinstance(format.get("format", ""), str) for _, format in layers):
        raise damaged
    return {str(layer): format for layer, format in layers}


def format_in_header(formats: Mapping[str, JsonObject], layer: str) -> JsonObject | None:
    """Return the format of a layer, whose name there may lack the prefix that the file's tensors have."""
    names = (layer, *(layer.removeprefix(prefix) for prefix in DENOISER_PREFIXES))
    return next((formats[name] for name in names if name in formats), None)


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


def _contents(path: Path, entries: Entries, ending: str) -> Iterator[tuple[str, bytes]]:
    """Yield the layer and the bytes of each tensor whose name ends so."""
    for source, own in _by_file(path, entries).items():
        places = {name: entry["data_offsets"] for name, entry in own.items() if name.endswith(f".{ending}")}
        if not places:
            continue
        with source.open("rb") as file:
            data = 8 + int.from_bytes(file.read(8), "little")
            for name, (first, last) in places.items():
                file.seek(data + first)
                yield name.rpartition(".")[0], file.read(last - first)


def _by_file(path: Path, entries: Entries) -> dict[Path, dict[str, JsonMapping]]:
    """Return the entries of each of their files: `path` itself, or those that it stands for."""
    files: dict[Path, dict[str, JsonMapping]] = {}
    for name, entry in entries.items():
        files.setdefault(Path(entry.get(IN_FILE, path)), {})[name] = entry
    return {file: own for file, own in files.items() if file.is_file()}


def unreadable_scales(path: Path, entries: Entries) -> Message | None:
    """Return why the 8-bit weights of a file cannot be read: scales that are missing, damaged, of other rows or in
    another dtype, or another format; None if they can.
    """
    weights = {name.removesuffix(".weight"): entry for name, entry in entries.items() if entry["dtype"] in EIGHT_BITS}
    if problem := _unread_format(path, entries, weights):
        return problem
    for layer, entry in weights.items():
        scale = next((entries[key] for name in SCALES if (key := f"{layer}.{name}") in entries), None)
        kind = "int8" if entry["dtype"] == "I8" else "fp8"
        if scale is None and (kind == "int8" or _is_scaled(layer, entries)):
            template = (
                "{path} has weights in {kind} without their scales ({key}.weight_scale): download a complete file"
            )
            return Message(template, path=path, kind=kind, key=layer)
        if scale and scale["dtype"] not in SCALE_TYPES:
            return _unread_scale(path, kind, scale["dtype"])
        if scale and not _fits(scale["shape"], entry["shape"]):
            template = "{path} has scales of {key} that do not fit its weight: download a complete file"
            return Message(template, path=path, key=layer)
    return _damaged_scale(path, entries, weights)


def unreadable_weights(path: Path, entries: Entries) -> Message | None:
    """Return why the weights of a file cannot be read, where other tensors may have any dtype: integers without a
    format that is read, 4 bits, too coarse ones, or what `unreadable_scales` returns; None if they can.
    """
    endings = (".weight", ".absmax", ".quant_map")
    weights = {name: entry for name, entry in entries.items() if name.endswith(endings)}
    types = {entry["dtype"] for entry in weights.values()}
    return _find_integer_weights(path, weights, {"U8"}) or unreadable_scales(path, entries) or _too_coarse(path, types)


def _marks_of_scales(entries: Entries) -> set[str]:
    return {name for name in entries if name.rpartition(".")[2] in SCALED}


def _find_integer_weights(path: Path, entries: Entries, integers: set[str]) -> Message | None:
    """Return that weights of a file have one of the dtypes `integers`, or 4 bits of bitsandbytes; None if not."""
    marks = _marks_of_scales(entries)
    types = {entry["dtype"] for name, entry in entries.items() if name not in marks and name not in TOKENIZERS}
    if types & integers or any(name.endswith((".absmax", ".quant_map")) for name in entries):
        return Message(
            "{path} is quantised to integers or 4 bits, which is not trained: use the bf16 file, or fp8 e4m3fn",
            path=path,
        )
    return None


def _unread_scale(path: Path, kind: str, dtype: str) -> Message:
    """Return that a file has scales in a dtype that is not read, or the name of its format."""
    if kind == "fp8" and dtype in BLOCK_SCALES:
        return Message(UNREAD_FORMAT, path=path, kind=BLOCK_SCALES[dtype])
    template = (
        "{path} has {kind} weights whose scales are in {dtype}, and only {types} are read: use the bf16 file, or one "
        "with such scales"
    )
    return Message(template, path=path, kind=kind, dtype=dtype, types=", ".join(SCALE_TYPES))


def _is_scaled(layer: str, entries: Entries) -> bool:
    """Return whether a file says that a weight in fp8 has a scale: by another mark beside it, or, in files without any
    scale, by the mark of the whole file.
    """
    if any(f"{layer}.{mark}" in entries for mark in ("scale_input", "input_scale", FORMAT)):
        return True
    whole = any(name.rpartition(".")[2] == "scaled_fp8" for name in entries)
    return whole and not any(name.endswith(SCALES) for name in entries)


def _fits(scale: Sequence[int], weight: Sequence[int]) -> bool:
    """Return whether scales are one, or one of each row, or of each of equal blocks of a row.

    Their first dimension must be the rows: scales [1, columns] of a square matrix are as many, and belong to columns.
    """
    count, values = math.prod(scale), math.prod(weight)
    if count == 1 or not values or not weight:
        return count == 1
    if not count or scale[0] != weight[0]:
        return False
    return values // weight[0] % (count // weight[0]) == 0


def _damaged_scale(path: Path, entries: Entries, weights: Entries) -> Message | None:
    """Return which scale of a file is NaN or infinite, or 0 where the weight is not; None if all are usable."""
    import numpy as np  # only for files with scales, as commands that read none start without it

    for ending in SCALES:
        for layer, content in _contents(path, entries, ending):
            kind = entries[f"{layer}.{ending}"]["dtype"]
            # The exponent of a number that is NaN or infinite has all bits set, and zero has none but its sign.
            words, bits = ("<u4", 0x7F800000) if kind == "F32" else ("<u2", 0x7F80 if kind == "BF16" else 0x7C00)
            if layer not in weights or kind not in SCALE_TYPES:
                continue
            scales = np.frombuffer(content, words)
            if ((scales & bits) == bits).any():
                template = "{path} is damaged: the scale of {key} is NaN or infinite; download it again"
                return Message(template, path=path, key=layer)
            if (zeros := np.flatnonzero(scales << 1 == 0)).size and _has_numbers(path, weights[layer], scales, zeros):
                template = "{path} is damaged: the scale of {key} is 0, and its weight is not; download it again"
                return Message(template, path=path, key=layer)
    return None


def _has_numbers(path: Path, weight: JsonMapping, scales: "np.ndarray", zeros: "np.ndarray") -> bool:
    """Return whether an 8-bit weight has other values than 0 where its scale is 0: rows of 0 may have such a scale."""
    import numpy as np

    with Path(weight.get(IN_FILE, path)).open("rb") as file:
        data = 8 + int.from_bytes(file.read(8), "little")
        first, last = weight["data_offsets"]
        file.seek(data + first)
        values = np.frombuffer(file.read(last - first), np.uint8).reshape(len(scales), -1)[zeros]
    signless = values if weight["dtype"] == "I8" else values & 0x7F
    return bool(signless.any())


def _unread_format(path: Path, entries: Entries, weights: Entries) -> Message | None:
    """Return which format of a file's 8-bit weights is not read; None if all are. Raises ConfigError if a format is
    damaged, or its rotation impossible.
    """
    in_header = {layer: format for file in _by_file(path, weights) for layer, format in formats_in_header(file).items()}
    marks = {layer: parse_format(text, path) for layer, text in _contents(path, entries, FORMAT)}
    for layer, entry in weights.items():
        format = format_in_header(in_header, layer) or marks.get(layer, {})
        if (kind := format.get("format", READ_FORMATS[0])) not in READ_FORMATS:
            return Message(UNREAD_FORMAT, path=path, kind=kind)
        if "format" in format and (kind == INT8_FORMAT) != (entry["dtype"] == "I8"):
            template = "{path} is damaged: {key} is stored in {stored} and marked as {kind}; download it again"
            stored = "int8" if entry["dtype"] == "I8" else "fp8"
            return Message(template, path=path, key=layer, stored=stored, kind=kind)
        if entry["dtype"] == "I8" and entry["shape"]:
            rotated_group(format, entry["shape"][-1], path)
    return None


def stored_oddly(path: Path, entries: Entries, scaled: bool = False) -> Message | None:
    """Return why the dtypes of a file are not supported, None if they are: 8 bits with scales (unless `scaled`), other
    8-bit formats, 4 bits.
    """
    if problem := _find_integer_weights(path, entries, {"U8"} if scaled else {"U8", "I8"}):
        return problem
    marks = _marks_of_scales(entries)
    types = {entry["dtype"] for name, entry in entries.items() if name not in marks and name not in TOKENIZERS}
    # Where no scales are read, those that are damaged or missing make no difference.
    if scaled and (problem := unreadable_scales(path, entries)):
        return problem
    is_readable = scaled and all(entries[m]["dtype"] in SCALE_TYPES for m in marks if m.endswith(SCALES))
    if marks and not is_readable:
        return Message(
            "{path} is a scaled fp8 file, which is not read: use the bf16 file, or plain fp8 (e4m3fn) without scales",
            path=path,
        )
    return _too_coarse(path, types)


def _too_coarse(path: Path, types: set[str]) -> Message | None:
    """Return that weights have one of the 8-bit dtypes that are not read; None if none has."""
    if unsupported := types & {"F8_E5M2", "F8_E5M2FNUZ", "F8_E4M3FNUZ"}:
        return Message(
            "{path} is stored as {kind}, which is too coarse here: use the bf16 file, or fp8 e4m3fn",
            path=path,
            kind=min(unsupported).lower(),
        )
    return None
