"""Prompts in the record of a run, from which its samples can be generated again."""

import contextlib

from library.config.json_types import JsonMapping, JsonObject
from library.sampling.prompts import FIELD_TYPES, IMAGE_FIELDS, Prompt

RECORDED_FIELDS = {**{name: FIELD_TYPES[name] for name in IMAGE_FIELDS}, "training_mask": str}


def images_by_field(prompt: Prompt) -> JsonObject:
    """Return the images of a prompt as the record of a run keeps them."""
    images = {name: getattr(prompt, name) for name in RECORDED_FIELDS}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in images.items() if value}


def recorded_prompt(event: JsonMapping) -> Prompt:
    """Return the prompt of a sample in the record of a run: its text and its images, but not its numbers."""
    images = event.get("images")
    named: JsonObject = {}
    if isinstance(images, dict):
        with contextlib.suppress(TypeError):  # the record is damaged
            named = {name: read(images[name]) for name, read in RECORDED_FIELDS.items() if images.get(name)}
    return Prompt(str(event.get("prompt") or ""), **named)
