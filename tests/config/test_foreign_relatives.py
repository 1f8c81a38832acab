"""Whole files of other trainers for FLUX.1's relatives and Qwen-Image, as their examples and pages write them: each key
has an outcome with a reason of its own."""

import copy
import json
import tomllib
from pathlib import Path

import pytest
import yaml

from library import families, importers
from library.config.problems import ConfigError
from library.config.schema import changed, flatten_sections

CONFIGS = {script: families.config_class(script) for script in families.RUNS}
FILES_OF = Path(__file__).parent / "foreign"
MUSUBI = tomllib.loads((FILES_OF / "musubi_kontext.toml").read_text(encoding="utf-8"))
AITOOLKIT = yaml.safe_load((FILES_OF / "aitoolkit_kontext.yaml").read_text(encoding="utf-8"))
ONETRAINER = json.loads((FILES_OF / "onetrainer_chroma.json").read_text(encoding="utf-8"))


def of_musubi(qwen=False):
    copy_of_settings = dict(MUSUBI)
    if qwen:
        copy_of_settings = {
            name: value
            for name, value in copy_of_settings.items()
            if name not in ("text_encoder1", "text_encoder2", "fp8_t5")
        }
        copy_of_settings |= {
            "network_module": "networks.lora_qwen_image",
            "text_encoder": "te.safetensors",
            "fp8_vl": True,
            "num_layers": 60,
            "model_version": "original",
            "timestep_sampling": "qinglong_qwen",
            "vae_enable_tiling": True,
        }
    return copy_of_settings


def of_aitoolkit(arch, name):
    chosen = copy.deepcopy(AITOOLKIT)
    chosen["config"]["process"][0]["model"] |= {"arch": arch, "name_or_path": name}
    return chosen


def of_onetrainer(kind, **more):
    return ONETRAINER | {"model_type": kind} | more


KONTEXT, QWEN = "black-forest-labs/FLUX.1-Kontext-dev", "Qwen/Qwen-Image"
CHROMA = {"model_type": "chroma", "apply_t5_attn_mask": True, "guidance_scale": 0.0}
FILES = {
    "musubi-tuner Kontext": (of_musubi(), {"model_type": "kontext", "ae": "ae.safetensors", "blocks_to_swap": 16}),
    "musubi-tuner Qwen-Image": (of_musubi(True), {"text_encoder": "te.safetensors", "vae": "ae.safetensors"}),
    "ai-toolkit Kontext": (of_aitoolkit("flux_kontext", KONTEXT), {"model_type": "kontext", "network_dim": 32}),
    "ai-toolkit Chroma": (of_aitoolkit("chroma", "lodestones/Chroma1-Base"), CHROMA),
    "ai-toolkit Qwen-Image": (of_aitoolkit("qwen_image:2512", QWEN), {"network_dim": 32, "fp8_base": True}),
    "OneTrainer Chroma": (of_onetrainer("CHROMA_1"), CHROMA | {"t5xxl_max_token_length": 512}),
    "OneTrainer Fill": (of_onetrainer("FLUX_FILL_DEV_1"), {"model_type": "fill"}),
    "musubi-tuner Qwen-Image-Edit": (
        of_musubi(True) | {"model_version": None, "edit_plus": True},
        {"model_version": "edit-2509"},
    ),
    "ai-toolkit Qwen-Image-Edit": (
        of_aitoolkit("qwen_image_edit_plus:2511", f"{QWEN}-Edit-2511"),
        {"model_version": "edit-2511", "cache_text_encoder_outputs": True},
    ),
    "OneTrainer Qwen-Image-Edit": (of_onetrainer("QWEN", base_model_name=f"{QWEN}-Edit"), {"model_version": "edit"}),
    "OneTrainer Qwen-Image": (of_onetrainer("QWEN"), {"network_dim": 16, "fp8_base_unet": True}),
}


@pytest.mark.parametrize("name", FILES)
def test_each_key_of_a_whole_file_has_a_fate_with_a_reason_of_its_own(name):
    settings, expected = FILES[name]
    imported = importers.import_content(settings, CONFIGS)
    values = flatten_sections(changed(imported.config))
    assert imported.config.script.startswith("qwen_image" if "Qwen" in name else "flux") and not imported.problems
    assert {key: values.get(key) for key in expected} == expected
    assert [
        outcome.key for outcome in imported.outcomes if str(outcome.text).endswith("not supported by this trainer")
    ] == []
    assert "conv_dim" not in str(values.get("network_args"))
    if "ai-toolkit" in name:
        assert 'control_directory = "/ctrl"' in imported.texts["dataset_config"]
    if name == "musubi-tuner Qwen-Image":
        assert imported.config.noise.timestep_sampling == "qwen_shift"
        assert str({outcome.key: outcome.text for outcome in imported.outcomes}["timestep_sampling"]).startswith(
            "qinglong_qwen is not offered"
        )


@pytest.mark.parametrize("module", ["networks.lora_qwen_image", "networks.lokr", "networks.lora_flux"])
def test_arguments_of_musubi_tuner_may_be_one_text(module):
    listed, text = (
        of_musubi(qwen=module != "networks.lora_flux") | {"network_module": module, "network_args": arguments}
        for arguments in (["rank_dropout=0.1", "loraplus_lr_ratio=4"], "rank_dropout=0.1 loraplus_lr_ratio=4")
    )
    imported = [importers.import_content(settings, CONFIGS).config.network.network_args for settings in (listed, text)]
    assert imported[0] == imported[1] and "loraplus_lr_ratio=4" in imported[0]


def test_the_module_decides_whatever_other_keys_say():
    imported = importers.import_content(
        of_musubi(False) | {"network_module": "networks.lora_flux", "text_encoder": "t"}, CONFIGS
    )
    assert imported.config.script == "flux_train_network"
    for module in ("networks.lokr", "lycoris.kohya"):
        with pytest.raises(ConfigError, match="does not say which"):
            importers.import_content({"dit": "d", "network_module": module, "text_encoder": "t"}, CONFIGS)


def test_what_only_adapters_have_is_reported_to_be_of_the_familys_own_adapters():
    settings = {name: value for name, value in of_musubi(True).items() if name not in ("network_module", "network_dim")}
    imported = importers.import_content(settings, CONFIGS)
    assert imported.config.script == "qwen_image_train"
    assert {outcome.key: str(outcome.text) for outcome in imported.outcomes}[
        "network_alpha"
    ] == "it is for Qwen-Image LoRA only"


def test_captions_that_ai_toolkit_encodes_once_are_not_shuffled_and_prompts_keep_what_they_say():
    settings = of_aitoolkit("qwen_image", QWEN)
    process = settings["config"]["process"][0]
    process["datasets"][0] |= {"caption_dropout_rate": 0.05, "shuffle_tokens": True, "flip_y": True}
    process["train"] |= {"cache_text_embeddings": True, "prompt_dropout_prob": 0.1}
    imported = importers.import_content(settings, CONFIGS)
    assert not imported.problems and imported.config.captions.caption_dropout_rate == 0.1
    assert "caption_dropout_rate = 0.05" in imported.texts["dataset_config"]
    notes = " ".join(map(str, imported.notes))
    assert notes.count("captions are encoded once") == 1 and "flip_y is ignored" in notes
    assert "shuffle" not in imported.texts["dataset_config"] and "shuffle_tokens" in notes
    assert imported.config.data.resolution is None  # the dataset file has it, so that nothing is set in vain

    shared = {"width": 64, "height": 64, "guidance_scale": 4, "seed": 1, "sample_steps": 2, "neg": "", "samples": None}
    prompts = ["a cat  --ctrl_img /a.png --w 512", "a dog --m 2"]
    for arch, name, scale in (("flux_kontext", KONTEXT, "--g 4"), ("chroma", "lodestones/Chroma1-HD", "--l 4")):
        settings = of_aitoolkit(arch, name)
        settings["config"]["process"][0]["sample"] |= shared | {"prompts": prompts}
        assert importers.import_content(settings, CONFIGS).texts["sample_prompts"].splitlines() == [
            f"a cat --w 512 --h 64 --d 1 --s 2 {scale} --ci /a.png",
            f"a dog --m 2 --w 64 --h 64 --d 1 --s 2 {scale}",
        ]


def test_advice_for_files_of_ai_toolkit_names_what_the_model_has():
    told = {}
    for arch, name in (("chroma", "/m/chroma.safetensors"), ("qwen_image", QWEN)):
        for kind in ("lora", "lokr"):
            settings = of_aitoolkit(arch, name)
            process = settings["config"]["process"][0]
            process["network"] |= {"type": kind, "network_kwargs": {"only_if_contains": ["attn"]}}
            process["train"]["content_or_style"] = "style"
            process["model"]["extras_name_or_path"] = "org/whole"
            imported = importers.import_content(settings, CONFIGS)
            texts = {outcome.key: outcome.text for outcome in imported.outcomes}
            told[kind] = texts["network.network_kwargs.only_if_contains"]
            assert "timestep_sampling" in str(texts["train.content_or_style"])
            assert (
                str(texts["model.extras_name_or_path"]).rpartition(": ")[2]
                == {"chroma": "t5xxl, ae", "qwen_image": "text_encoder, vae"}[arch]
            )
            assert not getattr(imported.config.model, "clip_l", None)
        assert "exclude_patterns, include_patterns" in str(told["lora"]) and "(preset)" in str(told["lokr"])


def test_presets_of_onetrainer_name_an_optimizer_and_mean_what_it_keeps_for_it():
    preset_optimizers = {"ADAFACTOR": {"fused_back_pass": True, "clip_threshold": 0.5}, "ADAMW": {"beta1": 0.1}}
    preset = {
        "model_type": "CHROMA_1",
        "base_model_name": "chroma",
        "train_dtype": "BFLOAT_16",
        "text_encoder": {"train": False},
        "samples": [{"prompt": "a cat", "cfg_scale": 4.0, "random_seed": True}],
    }
    tuned = preset | {"training_method": "FINE_TUNE", "optimizer_defaults": preset_optimizers}
    for own, threshold in (({}, 0.5), ({"clip_threshold": 2.0}, 2.0)):
        imported = importers.import_content(tuned | {"optimizer": {"optimizer": "ADAFACTOR", **own}}, CONFIGS)
        assert imported.config.optim.fused_backward_pass
        assert f"clip_threshold={threshold}" in imported.config.optim.optimizer_args
        assert not any("text encoders" in str(note) for note in imported.notes) and not imported.problems
        assert imported.texts["sample_prompts"] == "a cat --l 4.0\n"
    adapted = importers.import_content(preset | {"training_method": "LORA"}, CONFIGS).config
    assert adapted.network.network_train_unet_only and adapted.cache.cache_text_encoder_outputs
