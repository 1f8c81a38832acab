"""The adapter's fields: what they show, what they write into network_args, and the problems they report."""

import json

import pytest

from kohya_gui.form import adapter, adapter_size
from kohya_gui.form.adapter_size import SizeProcess
from library.config.building import build_config
from library.families import FAMILIES, adapter_kinds, config_class, lora_script
from library.importers import kohya_adapters
from tests.config.test_foreign import imported
from tests.training import wait_for


def state(family, **values):
    return adapter.adapter_state(build_config(config_class(lora_script(family)), values, notes=[]), None)


def pressed(shown):
    return [preset["title"] for preset in shown["presets"] if preset["pressed"]]


def learning(shown):
    return [[at for at, factor in enumerate(group["factors"]) if factor] for group in shown["groups"]]


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_presets_and_blocks_show_what_is_set(family):
    shown = state(family)
    assert pressed(shown) == [shown["presets"][0]["title"]]
    assert all(factor == 1 for group in shown["groups"] for factor in group["factors"])
    lokr = state(family, network_module="lycoris.kohya", network_args=["algo=LoKr", "factor=8", "preset=attn-only"])
    fields = {field["name"]: field for field in lokr["fields"]}
    assert lokr["kind"] == "lokr" and fields["factor"]["value"] == "8" and pressed(lokr) == ["Attention only"]
    assert fields["wd_on_output"]["value"] == "true" and fields["full_matrix"]["value"] == "false"
    assert state(family, network_module="some.other")["kind"] == ""


def test_blocks_are_shown_in_each_of_the_ways_to_say_them():
    flux = state("flux", network_args=["train_blocks=single", "train_single_block_indices=7,20"])
    assert learning(flux) == [[], [7, 20]] and not any(flux["groups"][0]["locked"])
    two_blocks = state("flux", network_args=["train_double_block_indices=none", "train_single_block_indices=7,20"])
    assert pressed(two_blocks) == ["Blocks 7 and 20"] and learning(two_blocks) == [[], [7, 20]]
    style = state(
        "sdxl", network_args=["down_lr_weight=zeros", "mid_lr_weight=0,0,0", "up_lr_weight=0,1,0,0,0,0,0,0,0"]
    )
    assert pressed(style) == ["Style only"] and learning(style) == [[], [], [1]]
    dims = ",".join(["4"] * 4 + ["0"] + ["4"] * 18)
    sdxl = state("sdxl", network_args=[f"block_dims={dims}", "up_lr_weight=0.5,1,1,1,1,1,1,1,0"])
    assert learning(sdxl)[0] == [0, 1, 2, 4, 5, 6, 7, 8] and sdxl["groups"][0]["locked"].index(True) == 3
    assert sdxl["groups"][2]["factors"] == [0.5, *[1.0] * 7, 0.0] and not any(sdxl["groups"][2]["locked"])
    joint = state("sdxl", network_module="lycoris.kohya", network_args=["train_block_indices=none/1/0,1"])
    assert learning(joint) == [[], [1], [0, 1]]
    assert (
        len(
            adapter.adapter_state(build_config(config_class(lora_script("flux")), {}, notes=[]), [2, 4])["groups"][1][
                "factors"
            ]
        )
        == 4
    )


def test_what_is_wrong_is_reported_at_its_field_and_below_the_text():
    args = ["algo=lokr", "factor=half", "train_block_indices=5-3/all", "conf=1", "loose"]
    shown = state("flux", network_module="lycoris.kohya", network_args=args)
    wrong = {field["name"]: field["wrong"] for field in shown["fields"] if field["wrong"]}
    assert list(wrong) == ["factor"] and "whole number" in str(wrong["factor"])
    config = build_config(
        config_class(lora_script("flux")), {"network_module": "lycoris.kohya", "network_args": args}, notes=[]
    )
    problems = adapter.adapter_problems(config)
    assert {problem.option for problem in problems} == {"network_args"}
    for words in (
        "factor must be a whole number",
        "conf is not a known key",
        "key=value",
        "train_block_indices must be",
    ):
        assert any(words in str(problem) for problem in problems), words


@pytest.mark.parametrize("kind", kohya_adapters.ADAPTERS)
def test_every_type_of_kohya_ss_has_fields(kind):
    family = "flux" if kind.startswith("Flux1") else "sdxl"
    keys = {
        "LyCORIS_preset": "attn-mlp",
        "conv_dim": 4,
        "conv_alpha": 1,
        "factor": 8,
        "unit": 2,
        "constrain": 0.1,
        "down_lr_weight": "zeros",
        "train_double_block_indices": "0-3",
    }
    config = imported("lora", family, LoRA_type=kind, **keys).config
    adapter_kind = adapter_kinds.kind_of(config, adapter_kinds.kinds(family))
    written = {pair.partition("=")[0] for pair in config.network.network_args} - {"algo", "constrain"}
    assert adapter_kind is not None and written <= {*adapter_kind.names, *adapter_kind.layer_names, *adapter_kind.fixed}


class Counted:
    """Replaces the process that has torch."""

    def __init__(self):
        self.asked = []

    def __call__(self, question):
        self.asked.append(json.loads(question))
        return {
            "layers": 6,
            "parameters": 1_800_000,
            "bytes": 3_600_000,
            "counts": [19, 38],
            "blocks": [[0] * 19, [0] * 38],
        }


def test_size_is_requested_once_and_shown_in_words(monkeypatch):
    sizes, counted = SizeProcess(), Counted()
    monkeypatch.setattr(sizes, "_counted", counted)
    config = build_config(
        config_class(lora_script("flux")), {"pretrained_model_name_or_path": "a.safetensors"}, notes=[]
    )
    assert sizes.counts(config) is None
    answers = [sizes.ask(config) for _ in range(2)]
    assert str(answers[0]["said"]) == "6 layers learn: 1.8 million parameters, a file of about 3.6 MB."
    assert answers[0] == answers[1] and len(counted.asked) == 1 and sizes.counts(config) == [19, 38]


@pytest.mark.slow
def test_the_size_is_counted_by_a_process_that_can_be_lost():
    sizes = SizeProcess()
    config = build_config(config_class(lora_script("flux")), {"network_train_unet_only": True}, notes=[])
    assert str(sizes.ask(config)["said"]).startswith("304 layers learn: 19.1 million parameters")
    sizes._process.stdin.close()
    assert sizes._process.wait(60) == 0


def test_a_process_that_ends_twice_is_said_and_asked_again(monkeypatch):
    config, sizes = build_config(config_class(lora_script("sdxl")), {}, notes=[]), SizeProcess()
    real = adapter_size.subprocess.Popen
    with monkeypatch.context() as broken:
        broken.setattr(
            adapter_size.subprocess, "Popen", lambda _, **how: real([adapter_size.sys.executable, "-c", ""], **how)
        )
        assert sizes.ask(config) == {"said": adapter_size.CANNOT_COUNT}
    monkeypatch.setattr(SizeProcess, "_counted", lambda *_: {"why": ""})
    assert sizes.ask(config) == {"said": adapter_size.UNKNOWN}


@pytest.mark.browser
def test_fields_and_text_stay_in_step(visit, monkeypatch):
    counted = Counted()
    monkeypatch.setattr(SizeProcess, "_counted", lambda self, request: counted(request))
    visitor = visit()
    page = visitor.page
    visitor.family("FLUX.1")
    visitor.put(network_train_unet_only=True, fp8_base=True)  # the form opens in float32 without a GPU
    form = page.locator("#lora-form")
    box, text = form.locator(".adapter"), form.locator("[data-option=network_args]:visible")
    form.get_by_role("button", name="Adapter", exact=True).click()
    kind = box.get_by_label("Type of adapter")
    is_now = lambda value: wait_for(lambda: text.input_value() == value, 30)  # noqa: E731
    visitor.until("6 layers learn: 1.8 million parameters", ".adapter .size")

    box.get_by_role("button", name="Blocks 7 and 20").click()
    is_now("train_double_block_indices=none train_single_block_indices=7,20")
    single = box.get_by_role("group", name="Single blocks")
    page.wait_for_function("document.querySelectorAll('.adapter [data-block][aria-pressed=true]').length === 2")
    single.get_by_role("button", name="8", exact=True).click()
    single.get_by_role("button", name="12", exact=True).click(modifiers=["Shift"])
    is_now("train_double_block_indices=none train_single_block_indices=7-12,20")

    kind.select_option("lokr")  # keeps the blocks, and bypasses the 8-bit weights
    is_now("algo=lokr bypass_mode=True train_block_indices=none/7-12,20")
    assert form.locator("[data-option=network_module]:visible").input_value() == "lycoris.kohya"
    box.get_by_label("Factor", exact=True).fill("8")
    box.get_by_label("Whole matrices").check()
    is_now("algo=lokr bypass_mode=True train_block_indices=none/7-12,20 factor=8 full_matrix=True")
    box.get_by_label("Factor", exact=True).fill("half")
    visitor.until("Must be a whole number, got 'half'", ".adapter .field.wrong small")

    text.fill('algo=loha "preset=my presets.toml" rank_dropout=0.25 full=1')  # typing updates the fields
    page.wait_for_function("document.querySelector('#lora-form .adapter .kinds').value === 'loha'")
    assert box.get_by_label("Rank dropout", exact=True).input_value() == "0.25"
    visitor.until("full is not a known key", ".field.wrong small")
    box.get_by_role("button", name="Attention only").click()
    is_now("algo=loha preset=attn-only rank_dropout=0.25 full=1")
    text.fill("")
    kind.select_option("networks.lora_flux")
    page.wait_for_function("document.querySelector('#lora-form .adapter [data-argument=split_qkv]')")
    values = {"network_args": "img_attn_dim=4 train_single_block_indices=0-1", "network_module": ""}
    visitor.put(**values)
    page.wait_for_function("document.querySelector('.adapter [data-argument=img_attn_dim]').value === '4'")
    page.wait_for_function("document.querySelectorAll('.adapter [data-group=\"1\"] [aria-pressed=true]').length === 2")
    single.get_by_role("button", name="0", exact=True).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    is_now("img_attn_dim=4 train_single_block_indices=0")
