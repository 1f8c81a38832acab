"""A fine-tune of a distilled model is warned of, without the assistant that only a LoRA can have."""

from types import SimpleNamespace

import pytest

from library import families
from library.config.building import draft
from library.config.schema import options_of
from library.families import RUNS, config_class
from library.families.flux_2.family import Flux2Family
from library.families.flux_2.versions import VERSIONS
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


PRESENT = SimpleNamespace(files=SimpleNamespace(present=lambda *_: "base.safetensors"))
# Family -> its class, the options that name a model that is not distilled, and what its header says.
UNDISTILLED = {
    "krea_2": (Krea2Family, {"model_version": "raw"}, {"is_turbo": False}),
    "zimage": (ZImageFamily, {"model_version": "base"}, {"is_turbo": False}),
    "flux_2": (Flux2Family, {"model_version": "klein-base-9b"}, {"version": VERSIONS["klein-base-9b"]}),
    "flux_3": (Flux3Family, {}, {"is_distilled": False, "checkpoint": PRESENT}),
}


@pytest.mark.parametrize("name", UNDISTILLED)
def test_an_assistant_of_a_model_that_is_not_distilled_is_remarked_on(name):
    family, values, header = UNDISTILLED[name]
    script = families.lora_script(name)
    told, _ = notes(script, family, values | {"assistant_lora": "a.safetensors"}, header)
    assert len(told) == 1 and told[0].startswith("assistant_lora is for distilled models, and ")
    assert not notes(script, family, values, header)[0]


@pytest.mark.parametrize("name", DISTILLED)
@pytest.mark.parametrize("option", ["assistant_lora", "base_weights", "preserve_weight"])
def test_what_keeps_a_distilled_model_distilled_silences_the_remark(name, option):
    family, values, header = DISTILLED[name]
    kept = {"assistant_lora": "a.safetensors", "base_weights": ("a.safetensors",), "preserve_weight": 1.0}
    told, _ = notes(families.lora_script(name), family, values | {option: kept[option]}, header)
    assert not told


@pytest.mark.parametrize("kept", [{}, {"assistant_lora": "a.safetensors"}, {"preserve_weight": 1.0}])
def test_turbo_of_qwen_image_21_gets_one_hint(kept):
    values, header = {"model_version": "turbo", **kept}, {"is_turbo": True}
    told, _ = notes("qwen_image_21_train_network", Qwen21Family, values, header)
    assert ["train on Qwen-Image-2.1" in note for note in told] == [True] * ("preserve_weight" not in kept)
