"""The header of a safetensors file as it is written, with its metadata. Needs no torch."""

from pathlib import Path

from library.config.json_types import JsonObject
from library.config.outside_files import open_outside, parse_json
from library.config.problems import ConfigError
from library.families.shared.known_files import no_tensors

LARGEST_HEADER = 100_000_000  # bytes, the format's own limit


def read_raw_header(path: Path) -> tuple[JsonObject, int]:
    """Return the header of a .safetensors file, and where its data begins, in bytes.

    Raises ConfigError if the file is missing or unreadable, is not a safetensors file or ends within its header.
    """
    if not path.is_file():
        raise ConfigError("{path}: no such file", path=path)
    with open_outside(path) as file:
        start = file.read(8)
        length = int.from_bytes(start, "little") if len(start) == 8 else 0
        if not 2 <= length <= LARGEST_HEADER:
            raise ConfigError(no_tensors(start), path=path)
        text = file.read(length)
    try:
        table = parse_json(text, path)
    except (ConfigError, UnicodeError) as e:
        template = "{path} is not a safetensors file: give a .safetensors checkpoint"
        if len(text) < length:
            template = "{path} was cut short: download it again"
        raise ConfigError(template, path=path) from e
    if not isinstance(table, dict):
        raise ConfigError("{path} is not a safetensors file: its header is not a table", path=path)
    return table, 8 + length


def header_metadata(path: Path) -> JsonObject:
    """Return the metadata, {} without any. Raises ConfigError as `read_raw_header` does."""
    metadata = read_raw_header(path)[0].get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}
