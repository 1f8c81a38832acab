"""The header of a safetensors file as it is written, with its metadata."""

from pathlib import Path

from library.config.json_types import JsonObject
from library.config.outside_files import parse_json


def raw_header(path: Path) -> JsonObject:
    with path.open("rb") as file:
        return parse_json(file.read(int.from_bytes(file.read(8), "little")), path)


def header_metadata(path: Path) -> JsonObject:
    metadata = raw_header(path).get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}
