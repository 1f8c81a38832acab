"""What the demo says of the toy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def demo_tables(models: Mapping[str, Path]) -> dict[str, list[tuple[str, Any, str]]]:
    """What a TOML of the demo says of this model."""
    return {"model": [("pretrained_model_name_or_path", str(models["toy"]), "")]}


def convert_for_diffusers(tensors: dict[str, Any], config: Any) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """diffusers has no toy."""
    raise ValueError("diffusers has no such model")
