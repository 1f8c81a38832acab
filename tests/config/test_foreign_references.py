"""Files of other trainers for FLUX.1 Kontext and Fill: the relative, the folders of references, the prompts."""

import tomllib

import pytest

from library.importers import aitoolkit, musubi, onetrainer
from library.importers.musubi import dataset


def test_musubi_tuner_trains_kontext_with_its_data_sets():
    found = {"dit": "k.safetensors", "vae": "ae.safetensors", "text_encoder1": "t5", "text_encoder2": "clip",
             "network_module": "networks.lora_flux", "network_dim": 32, "fp8_scaled": True, "learning_rate": 1e-4,
             "timestep_sampling": "flux_shift"}  # fmt: skip
    builder = musubi.read(found)
    assert builder.script == "flux_train_network" and builder.values["model_type"] == "kontext"
    assert builder.values["guidance_scale"] == 1.0 and not builder.left()
    # 228 layers: those of the modulation are left out there, unless the file has patterns of its own.
    assert builder.values["network_args"] == ["exclude_patterns=['.*(img_mod|txt_mod|modulation).*']"]
    own = ["exclude_patterns=['.*single.*']", "include_patterns=['.*single_blocks.0.*']"]
    assert tuple(musubi.read(found | {"network_args": own}).values["network_args"]) == tuple(own)

    general = {"resolution": [1024, 1024], "flux_kontext_no_resize_control": True}
    folder = {"image_directory": "/i", "control_directory": "/c", "cache_directory": "/x"}
    listed = {"image_jsonl_file": "/m.jsonl", "control_resolution": [768, 768]}
    text, notes = dataset({"general": general, "datasets": [folder, listed]})
    made = tomllib.loads(text)
    assert made["general"]["no_resize_control"] is True
    (first,), (second,) = (one["subsets"] for one in made["datasets"])
    assert first == {"image_dir": "/i", "num_repeats": 1, "control_directory": "/c"}
    assert second == {"metadata_file": "/m.jsonl", "num_repeats": 1}
    assert made["datasets"][1]["control_resolution"] == [768, 768]
    assert len(notes) == 1 and "cache_directory is ignored" in notes[0]


def of_aitoolkit(model, **more):
    process = {"type": "sd_trainer", "training_folder": "out", "network": {"type": "lora"}, "model": model, **more}
    return {"job": "extension", "config": {"name": "cat", "process": [process]}}


KONTEXT = "black-forest-labs/FLUX.1-Kontext-dev"


@pytest.mark.parametrize("model", [{"arch": "flux_kontext"}, {"is_flux": True, "name_or_path": KONTEXT}])
def test_ai_toolkit_trains_kontext_with_its_control_folders(model):
    data = {"folder_path": "/i", "control_path": ["/c", "/d"]}
    sample = {"samples": [{"prompt": "a cat", "ctrl_img": "/r.png"}], "sample_every": 10}
    builder = aitoolkit.read(of_aitoolkit(model, datasets=[data], sample=sample))
    assert builder.script == "flux_train_network" and builder.values["model_type"] == "kontext"
    made = tomllib.loads(builder.texts["dataset_config"])
    assert made["datasets"][0]["subsets"][0]["control_directory"] == "/c"
    assert any("only the first control_path" in note for note in builder.notes)
    assert builder.texts["sample_prompts"].strip().endswith("--ci /r.png")


def test_onetrainer_trains_fill():
    builder = onetrainer.read({"model_type": "FLUX_FILL_DEV_1", "training_method": "LORA", "masked_training": True,
                              "base_model_name": "black-forest-labs/FLUX.1-Fill-dev"})  # fmt: skip
    assert builder.script == "flux_train_network" and builder.values["model_type"] == "fill"
    assert any("conditioning_data_dir" in note for note in builder.notes)
