"""Buttons below the field of a LoRA for samples or for distilled models: the published ones of each family, by name."""

from collections.abc import Callable, Iterable, Sequence
from html import escape

from library import families
from library.families.facts import FamilyFacts, HubLora


def few_step_buttons(family_names: Iterable[str]) -> str:
    return _lora_buttons(family_names, lambda facts: facts.few_step_loras)


def assistant_buttons(family_names: Iterable[str]) -> str:
    return _lora_buttons(family_names, lambda facts: facts.assistant_loras)


def _lora_buttons(family_names: Iterable[str], loras_of: Callable[[FamilyFacts], Sequence[HubLora]]) -> str:
    """Return the buttons as HTML; each is visible only for its family, and fills in its value."""
    return "".join(
        f'<button type="button" class="few-steps name only-{family}" data-value="{escape(lora.value)}"'
        f' title="{escape(lora.value)}">{escape(lora.title)}</button>'
        for family in family_names
        for lora in loras_of(families.facts_of(family))
    )
