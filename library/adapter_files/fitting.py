"""Whether the file of an adapter can belong to a model, by its header alone."""

from collections.abc import Collection
from pathlib import Path

from library import families
from library.adapter_files import names, storage
from library.config.json_types import JsonMapping
from library.config.problems import ConfigError, Message
from library.families import recognition
from library.families.shared.weights import shapes_of


def misfit(path: Path, stored: JsonMapping, family: str) -> Message | None:
    """Return why a file is no adapter, or one of another family; None if it fits or does not tell.

    `stored` is the header: an entry with the shape by name of a tensor.
    """
    shapes = shapes_of(stored)
    base, words = recognition.family_and_description(shapes)
    if base:
        return Message("{path} is {found}, not a LoRA file; choose a LoRA file", path=path, found=words)
    try:
        fitting = _families_of(path, shapes)
    except names.ForeignModelError as e:
        return Message("{path}: {error}", path=path, error=e.problems[0])
    except ConfigError:  # names of no known family
        return None
    if family in fitting:
        return None
    template = "{path} was made for {other}, and this is {title}; choose a file made for it"
    other, title = (families.facts_of(name).title for name in (fitting[0], family))
    return Message(template, path=path, other=other, title=title)


def names_family(path: Path, stored: JsonMapping) -> bool:
    """Return whether the names of layers, or the metadata, tell a family."""
    try:
        return bool(_families_of(path, shapes_of(stored)))
    except ConfigError:
        return False


def _families_of(path: Path, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    layers = (layer_of(key, shapes) for key in shapes)
    return names.possible_families(layers, storage.metadata_of(path), names.module_sizes(shapes))


def layer_of(key: str, keys: Collection[str] = ()) -> str:
    """Return the layer that a tensor belongs to, among the `keys` of its file. Dotted names contain more dots."""
    if key.startswith("lora_"):
        return key.partition(".")[0]
    parts = names.split_any(key, keys)
    return parts[0] if parts else key
