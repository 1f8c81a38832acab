"""Files of other trainers for FLUX.1 Kontext and Fill: the relative, the folders of references, the prompts."""

import tomllib

import pytest

from library.importers import aitoolkit, musubi, onetrainer
from library.importers.musubi import convert_dataset


def test_musubi_tuner_trains_kontext_with_its_data_sets():
    settings = {
        "dit": "k.safetensors",
        "vae": "ae.safetensors",
        "text_encoder1": "t5",
        "text_encoder2": "clip",
        "network_module": "networks.lora_flux",
        "network_dim": 32,
        "fp8_scaled": True,
        "learning_rate": 1e-4,
        "timestep_sampling": "flux_shift",
    }
    builder = musubi.read_config(settings)
    assert builder.script == "flux_train_network" and builder.values["model_type"] == "kontext"
    assert builder.values["guidance_scale"] == 1.0 and not builder.left()
    # 228 layers: those of the modulation are left out there, unless the file has patterns of its own.
    assert builder.values["network_args"] == ["exclude_patterns=['.*(img_mod|txt_mod|modulation).*']"]
    own = ["exclude_patterns=['.*single.*']", "include_patterns=['.*single_blocks.0.*']"]
    assert tuple(musubi.read_config(settings | {"network_args": own}).values["network_args"]) == tuple(own)

    general = {"resolution": [1024, 1024], "flux_kontext_no_resize_control": True}
    folder = {"image_directory": "/i", "control_directory": "/c", "cache_directory": "/x"}
    listed = {"image_jsonl_file": "/m.jsonl", "control_resolution": [768, 768]}
    text, notes = convert_dataset({"general": general, "datasets": [folder, listed]})
    table = tomllib.loads(text)
    assert table["general"]["no_resize_control"] is True
    (first,), (second,) = (dataset_table["subsets"] for dataset_table in table["datasets"])
    assert first == {"image_dir": "/i", "num_repeats": 1, "control_directory": "/c"}
    assert second == {"metadata_file": "/m.jsonl", "num_repeats": 1}
    assert table["datasets"][1]["control_resolution"] == [768, 768]
    assert len(notes) == 1 and "cache_directory is ignored" in str(notes[0])


def of_aitoolkit(model, **more):
    process = {"type": "sd_trainer", "training_folder": "out", "network": {"type": "lora"}, "model": model, **more}
    return {"job": "extension", "config": {"name": "cat", "process": [process]}}


KONTEXT = "black-forest-labs/FLUX.1-Kontext-dev"


@pytest.mark.parametrize("model", [{"arch": "flux_kontext"}, {"is_flux": True, "name_or_path": KONTEXT}])
def test_ai_toolkit_trains_kontext_with_its_control_folders(model):
    data = {"folder_path": "/i", "control_path": ["/c", "/d"]}
    sample = {"samples": [{"prompt": "a cat", "ctrl_img": "/r.png"}], "sample_every": 10}
    builder = aitoolkit.read_config(of_aitoolkit(model, datasets=[data], sample=sample))
    assert builder.script == "flux_train_network" and builder.values["model_type"] == "kontext"
    tables = tomllib.loads(builder.texts["dataset_config"])
    (subset,) = tables["datasets"][0]["subsets"]
    assert subset["control_directory"] == "/c" and subset["more_control_directories"] == ["/d"]
    assert builder.texts["sample_prompts"].strip().endswith("--ci /r.png")


@pytest.mark.parametrize(
    ("arch", "own", "sizes"),
    [
        ("qwen_image_edit_plus:2511", {"model_version": "edit-2511"}, {"control_resolution": [1024, 1024]}),
        ("qwen_image_edit", {"model_version": "edit"}, {}),
        (
            "flux2_klein_9b",
            {"model_version": "klein-base-9b"},
            {"control_resolution": [1024, 1024], "no_resize_control": True},
        ),
    ],
)
def test_what_the_page_of_ai_toolkit_writes_for_models_with_references_can_be_trained(arch, own, sizes):
    folders = {"control_path_1": "/c", "control_path_2": "/d", "control_path_3": None}
    data = {
        "folder_path": "/i",
        "caption_dropout_rate": 0.05,
        "mask_path": None,
        "mask_min_value": 0.1,
        "resolution": [512, 768],
        **folders,
    }
    name = "/models/edited/klein-4b/black-forest-labs/FLUX.2-klein-base-9B" if "flux" in arch else "/home/turbo/edith/Q"
    model = {"arch": arch, "name_or_path": name, "model_kwargs": {"match_target_res": False}}
    builder = aitoolkit.read_config(of_aitoolkit(model, datasets=[data]))
    assert builder.values.items() >= own.items()
    (table,) = tomllib.loads(builder.texts["dataset_config"])["datasets"]
    assert table["resolution"] == "512;768" and table["bucket_reso_steps"] == (16 if "flux" in arch else 32)
    (subset,) = table["subsets"]
    assert subset == {
        "image_dir": "/i",
        "control_directory": "/c",
        "more_control_directories": ["/d"],
        **sizes,
        "caption_extension": ".txt",
        "caption_dropout_rate": 0.05,
    }
    matched = aitoolkit.read_config(of_aitoolkit(model | {"model_kwargs": {"match_target_res": True}}, datasets=[data]))
    assert "control_resolution" not in matched.texts["dataset_config"] and not matched.left()


def test_data_sets_of_musubi_tuner_keep_its_sizes_of_images():
    text, _ = convert_dataset(
        {
            "general": {"resolution": [1328, 1328]},
            "datasets": [{"image_directory": "/i"}, {"image_directory": "/j", "resolution": [96, 64], "batch_size": 2}],
        }
    )
    first, second = tomllib.loads(text)["datasets"]
    assert {k: v for k, v in first.items() if "bucket" in k} == {
        "bucket_reso_steps": 16,
        "min_bucket_reso": 656,
        "max_bucket_reso": 2688,
    }
    assert second["min_bucket_reso"] == 32 and second["resolution"] == [96, 64]


def test_onetrainer_trains_fill():
    builder = onetrainer.read_config(
        {
            "model_type": "FLUX_FILL_DEV_1",
            "training_method": "LORA",
            "masked_training": True,
            "base_model_name": "black-forest-labs/FLUX.1-Fill-dev",
        }
    )
    assert builder.script == "flux_train_network" and builder.values["model_type"] == "fill"
    assert "masklabel" in str(builder.outcomes["masked_training"].text) and "masked_loss" not in builder.values
