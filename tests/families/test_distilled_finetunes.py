"""A fine-tune of a distilled model is warned of, without the assistant that only a LoRA can have."""

from types import SimpleNamespace

import pytest

from library.config.building import draft
from library.config.schema import options_of
from library.families import RUNS, config_class
from library.families.flux_3.family import Flux3Family
from library.families.krea_2.family import Krea2Family
from library.families.qwen_image_21.family import Qwen21Family
from library.families.zimage.family import ZImageFamily

# Family -> its class, the options that name its distilled model, and what its header says.
DISTILLED = {
    "krea_2": (Krea2Family, {"model_version": "turbo"}, {"is_turbo": True}),
    "zimage": (ZImageFamily, {"model_version": "turbo"}, {"is_turbo": True}),
    "flux_3": (Flux3Family, {}, {"is_distilled": True}),
    "qwen_image_21": (Qwen21Family, {"model_version": "base"}, {"is_turbo": False}),
}


def notes(script, family, values, header):
    config = draft(config_class(script), values)
    return [str(note) for note in family.notes(SimpleNamespace(config=config, **header))], options_of(type(config))


@pytest.mark.parametrize("script", [script for script in RUNS if config_class(script).family in DISTILLED])
def test_only_a_training_with_a_place_for_it_is_told_to_set_an_assistant(script):
    told, options = notes(script, *DISTILLED[config_class(script).family])
    (note,) = (note for note in told if "forgets" in note)
    advises = "set assistant_lora" in note
    assert advises == ("assistant_lora" in options)
