"""Buttons below the field of a LoRA for samples: the published ones of each family, by name."""

from collections.abc import Iterable
from html import escape

from kohya_gui.form.form import attributes
from library import families


def lora_buttons(family_names: Iterable[str]) -> str:
    """HTML of the buttons; each is visible with its family alone, and fills in its value."""
    return "".join(
        f"<button{attributes(_attributes(family, lora.value))}>{escape(lora.title)}</button>"
        for family in family_names
        for lora in families.facts_of(family).few_step_loras
    )


def _attributes(family: str, value: str) -> dict[str, str]:
    return {"type": "button", "class": f"few-steps name only-{family}", "data-value": value, "title": value}
