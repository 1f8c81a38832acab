"""A LoRA's own metadata as a config: what sd-scripts, musubi-tuner and this trainer write into their files."""

import json
import re

import pytest

from kohya_gui.form import presets
from kohya_gui.server import paths
from library import importers
from library.cli import main
from library.config.problems import ConfigError
from library.config.schema import option_values
from tests.config.arriving import CONFIGS, differing

SDXL = {
    "ss_sd_model_name": "sd_xl_base_1.0.safetensors",
    "ss_sd_model_hash": "abc",
    "ss_resolution": "(1024, 768)",
    "ss_clip_skip": "None",
    "ss_max_train_steps": "900",
    "ss_num_epochs": "10",
    "ss_steps": "900",
    "ss_v2": "False",
    "ss_learning_rate": "0.0001",
    "ss_text_encoder_lr": "[5e-05, 4e-05]",
    "ss_unet_lr": "0.0002",
    "ss_seed": "42",
    "ss_network_dim": "32",
    "ss_network_alpha": "16.0",
    "ss_network_module": "networks.lora",
    "ss_network_args": '{"conv_dim": "4", "conv_alpha": "1", "dropout": null}',
    "ss_lr_scheduler": "cosine",
    "ss_optimizer": "bitsandbytes.optim.adamw.AdamW8bit(weight_decay=0.1,betas=(0.9, 0.99))",
    "ss_base_model_version": "sdxl_base_v1-0",
    "ss_batch_size_per_device": "2",
    "ss_enable_bucket": "True",
    "ss_dataset_dirs": '{"4_cat": {"n_repeats": 4, "img_count": 20}}',
    "ss_tag_frequency": "{}",
    "ss_min_snr_gamma": "5.0",
    "ss_debiased_estimation": "False",
    "ss_output_name": "cat",
    "ss_new_thing": "1",
    "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
    "modelspec.prediction_type": "v",
    "modelspec.title": "cat",
    "modelspec.timestep_range": "100,900",
    "sshs_model_hash": "1",
}
ZIMAGE = {
    "ss_network_module": "networks.lora_zimage",
    "ss_base_model_version": "z_image",
    "ss_network_dim": "8",
    "ss_sd_model_name": "Tongyi-MAI/Z-Image",
    "ss_datasets": json.dumps(
        [
            {
                "resolution": [768, 768],
                "batch_size_per_device": 3,
                "enable_bucket": True,
                "subsets": [{"image_dir": "cats", "num_repeats": 2, "keep_tokens": 1}],
            },
            {},
        ]
    ),
}


def saved(path, metadata, names=("lora_unet_a.lora_down.weight",)):
    """A .safetensors file with this metadata and empty tensors."""
    tensors = {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}
    header = json.dumps({"__metadata__": metadata, **tensors}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def test_every_key_is_accounted_for_and_arrives(tmp_path):
    imported = importers.import_file(saved(tmp_path / "cat.safetensors", SDXL, ("lora_te1_a.alpha",)), CONFIGS)
    assert (
        imported.config.script == "sdxl_train_network" and {outcome.key for outcome in imported.outcomes} >= SDXL.keys()
    )
    expected = {
        "resolution": (1024, 768),
        "max_train_steps": 900,
        "seed": 42,
        "unet_lr": 2e-4,
        "lr_scheduler": "cosine",
        "text_encoder_lr": (5e-5, 4e-5),
        "network_dim": 32,
        "network_alpha": 16,
        "network_args": ("conv_dim=4", "conv_alpha=1"),
        "optimizer_type": "AdamW8bit",
        "optimizer_args": ("weight_decay=0.1", "betas=0.9,0.99"),
        "train_batch_size": 2,
        "enable_bucket": True,
        "min_snr_gamma": 5.0,
        "v_parameterization": True,
        "output_name": "cat",
        "min_timestep": 100,
        "max_timestep": 900,
        "network_train_unet_only": False,
        "metadata_title": "cat",
    }
    actual = option_values(imported.config) | {
        "resolution": tuple(map(int, re.findall(r"\d+", imported.config.data.resolution)))
    }
    assert differing(actual, expected) == {} and not imported.problems
    said = {outcome.key: str(outcome.text) for outcome in imported.outcomes}
    assert "sd_xl_base_1.0" in said["ss_sd_model_name"] and "4_cat" in said["ss_dataset_dirs"]


def test_adapters_of_the_image_model_alone_and_several_data_sets(tmp_path):
    imported = importers.import_file(saved(tmp_path / "a.safetensors", ZIMAGE), CONFIGS)
    expected = {
        "pretrained_model_name_or_path": "Tongyi-MAI/Z-Image",
        "network_train_unet_only": True,
        "train_batch_size": 3,
        "enable_bucket": True,
        "network_dim": 8,
    }
    assert (
        imported.config.script == "zimage_train_network" and differing(option_values(imported.config), expected) == {}
    )
    assert any("first of 2 data sets" in str(note) for note in imported.notes)
    (first, _) = json.loads(ZIMAGE["ss_datasets"])
    several = [first, first | {"resolution": [512, 512]}]
    imported = importers.import_file(
        saved(tmp_path / "b.safetensors", ZIMAGE | {"ss_datasets": json.dumps(several)}), CONFIGS
    )
    assert imported.config.data.sizes == ((768, 768), (512, 512)) and not imported.notes
    for strange in ([{}], {"a": 1}, [[1]], None, "512;", [512, 512]):
        several = [first, first | {"resolution": strange}, first]
        imported = importers.import_file(
            saved(tmp_path / "c.safetensors", ZIMAGE | {"ss_datasets": json.dumps(several)}), CONFIGS
        )
        assert any("first of 3 data sets" in str(note) for note in imported.notes)


@pytest.mark.parametrize(
    ("version", "script", "expected"),
    [
        ("flux1", "flux_train_network", {}),
        ("flux_kontext", "flux_train_network", {"model_type": "kontext"}),
        ("chroma", "flux_train_network", {"model_type": "chroma", "apply_t5_attn_mask": True}),
        ("flux_2_dev", "flux_2_train_network", {"model_version": "dev"}),
        ("flux_2_klein_9b", "flux_2_train_network", {"model_version": "klein-base-9b"}),
        ("qwen_image_edit", "qwen_image_train_network", {"model_version": "edit"}),
        ("anima", "anima_train_network", {}),
    ],
)
def test_model_is_recognised_by_its_version(tmp_path, version, script, expected):
    path = saved(tmp_path / "a.safetensors", {"ss_base_model_version": version, "ss_network_dim": "8"})
    imported = importers.import_file(path, CONFIGS)
    assert imported.config.script == script and differing(option_values(imported.config), expected) == {}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"ss_base_model_version": "sd_v2"}, "Stable Diffusion 2"),
        ({"ss_base_model_version": "wan2.1"}, "Wan"),
        ({"ss_network_dim": "8", "modelspec.architecture": "stable-diffusion-3-medium/lora"}, "SD3"),
        ({"ss_network_dim": "8"}, r"which model it was trained on \(ss_base_model_version\)"),
        ({"format": "pt"}, "does not say how it was trained"),
        ({"ss_base_model_version": "sdxl_base_v1-0", "ss_network_module": "networks.new"}, "networks.new"),
    ],
)
def test_other_models_and_files_without_a_recipe_are_refused(tmp_path, metadata, words):
    with pytest.raises(ConfigError, match=words):
        importers.import_file(saved(tmp_path / "a.safetensors", metadata), CONFIGS)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 7,
        b"\xff" * 64,
        (2**40).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"nope",
        (2).to_bytes(8, "little") + b"[]",
    ],
)
def test_a_damaged_file_is_a_sentence(tmp_path, data):
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match=r"a\.safetensors (is not a safetensors file|does not say|is not valid JSON)"):
        importers.import_file(tmp_path / "a.safetensors", CONFIGS)


def test_the_shell_writes_it_and_the_page_loads_it(tmp_path):
    path = saved(tmp_path / "cat.safetensors", SDXL)
    assert main.main(["import", str(path), "-o", str(tmp_path / "run.toml")]) == 0
    loaded = presets.import_fitting(path, {"sdxl": CONFIGS["sdxl_train_network"]}, "sdxl", [])
    assert loaded.config == importers.import_file(path, CONFIGS).config
    assert any("LoRA metadata" in str(note) for note in presets.import_notes(loaded))


def test_the_page_is_sent_the_header_alone(tmp_path):
    """What the browser cuts out of a file that it uploads; a file that is named may be as large as a LoRA is."""
    header = json.dumps({"__metadata__": SDXL, "lora_te1_a.alpha": {}})
    (tmp_path / "sent.safetensors").write_bytes(importers.with_header(header))
    imported = importers.import_file(tmp_path / "sent.safetensors", CONFIGS)
    assert imported.trainer == "LoRA metadata" and not imported.config.network.network_train_unet_only
    path = saved(tmp_path / "cat.safetensors", SDXL)
    with path.open("ab") as file:
        file.truncate(paths.MAX_CONFIG_BYTES + 10_000)
    assert paths.readable(str(path), [tmp_path], importers.SUFFIXES) == path


@pytest.mark.parametrize("version", ["sdxl_base_v1-0", "qwen_image"])
def test_a_file_whose_module_is_of_another_model_has_to_be_fixed(version):
    facts = {"ss_base_model_version": version, "ss_network_module": "networks.lora_flux", "ss_network_dim": "4"}
    (problem,) = importers.import_content({"__metadata__": facts, "lora_te1": {}}, CONFIGS).problems
    assert problem.option == "network_module" and "networks.lora_flux is for FLUX.1; for" in str(problem)
