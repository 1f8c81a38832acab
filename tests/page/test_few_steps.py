"""The published LoRAs for few steps and for distilled models, by name below their fields."""

import pytest

from kohya_gui.form import few_steps
from library import families

LIGHTNING = families.facts_of("sdxl").few_step_loras[0]


def test_every_published_lora_has_a_button_of_its_family():
    markup = few_steps.few_step_buttons(families.FAMILIES) + few_steps.assistant_buttons(families.FAMILIES)
    for name in families.FAMILIES:
        for lora in (*families.facts_of(name).few_step_loras, *families.facts_of(name).assistant_loras):
            assert f"only-{name}" in markup and f'data-value="{lora.value}"' in markup and f">{lora.title}<" in markup


@pytest.mark.browser
def test_a_button_fills_in_the_file_and_others_are_for_other_families(visit):
    visitor = visit()
    page = visitor.page
    page.locator("#lora-form [aria-controls=lora-section-sample]").click()
    page.get_by_role("button", name=LIGHTNING.title).locator("visible=true").click()
    assert page.locator("#lora-sample_lora").input_value() == LIGHTNING.value
    assert not page.get_by_role("button", name="FLUX.1-Turbo-Alpha-8steps").locator("visible=true").count()
