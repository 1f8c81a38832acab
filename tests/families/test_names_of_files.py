"""What the name of a file says of a model, where headers look alike."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from library import families
from library.config.schema import options_of
from library.families import recognition
from tests import training


@pytest.mark.parametrize(
    ("family", "name", "version"),
    [
        ("krea_2", "krea2_turbo_fp8_scaled.safetensors", "turbo"),
        ("krea_2", "raw.safetensors", "raw"),
        ("krea_2", "Kroma.safetensors", None),
        ("zimage", "z_image_turbo_bf16.safetensors", "turbo"),
        ("zimage", "z_image_de_turbo_v1_bf16.safetensors", "base"),
        ("zimage", "z_image_bf16.safetensors", None),
        ("flux_2", "flux-2-klein-base-9b.safetensors", "klein-base-9b"),
        ("flux_2", "flux2_klein_4b_fp8.safetensors", "klein-4b"),
        ("flux_2", "flux2-dev.safetensors", None),
        ("qwen_image", "qwen_image_edit_bf16.safetensors", "edit"),
        ("qwen_image", "qwen_image_edit_2509_bf16.safetensors", "edit-2509"),
        ("qwen_image", "qwen_image_bf16.safetensors", None),
        ("qwen_image_21", "qwen_image_2.1_turbo_bf16.safetensors", "turbo"),
        ("qwen_image_21", "qwen_image_2.1_bf16.safetensors", "base"),
    ],
)
def test_the_name_of_a_file_proposes_the_model_where_headers_look_alike(family, name, version):
    proposed = recognition.proposed_options(Path(name), recognition.Recognised(family, "a transformer"))
    assert proposed.get("model_version") == version
    options = options_of(families.config_class(families.lora_script(family)))
    assert proposed.keys() <= options.keys() and (version is None or version in options["model_version"].choices)


@pytest.mark.parametrize(
    ("family", "path", "values", "fixes"),
    [
        ("krea_2", "/m/krea2_turbo_bf16.safetensors", {"model_version": "raw"}, [{"model_version": "turbo"}]),
        ("krea_2", "krea/Krea-2-Turbo", {"model_version": None}, [{"model_version": "turbo"}]),
        ("krea_2", "krea/Krea-2-Raw/", {"model_version": "turbo"}, [{"model_version": "raw"}]),
        ("krea_2", "/turbo/mine.safetensors", {"model_version": "raw"}, []),
        ("krea_2", "krea2_turbo.safetensors", {"model_version": "turbo"}, []),
        (
            "qwen_image_21",
            "C:\\m\\qwen_image_2.1_turbo.safetensors",
            {"model_version": "base"},
            [{"model_version": "turbo"}],
        ),
        ("zimage", "z_image_turbo.safetensors", {"model_version": "base"}, [{"model_version": "turbo"}]),
        ("qwen_image", "Qwen-Image-Edit-Mine", {"model_version": "edit-2509"}, []),
        ("qwen_image", "Qwen-Image-Edit-2511", {"model_version": "original"}, [{"model_version": "edit-2511"}]),
        ("flux", "flux1-kontext-dev.safetensors", {"model_type": "flux"}, [{"model_type": "kontext"}]),
        ("sd15", "v1-5-pruned-emaonly.safetensors", {"v_parameterization": False}, []),
        ("sd15", "furry-vpred-e120.safetensors", {"v_parameterization": False}, [{"v_parameterization": True}]),
        ("sdxl", "NoobAI-XL-V-Pred-1.0.safetensors", {"v_parameterization": False}, [{"v_parameterization": True}]),
        ("sdxl", "NoobAI-XL-V-Pred-1.0.safetensors", {"v_parameterization": True}, []),
    ],
)
def test_a_distilled_model_that_is_trained_as_another_is_recognised_by_its_name(family, path, values, fixes):
    assert [dict(note.fix) for note in recognition.find_name_notes(family, path, values)] == fixes


def stating(source, folder, kind):
    """A Stable Diffusion that says how it predicts: by a tensor, metadata, or the scheduler of its folder."""
    if kind == "scheduler":
        (folder / "scheduler").mkdir(parents=True)
        (folder / "unet").mkdir()
        (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
        (folder / "scheduler" / "scheduler_config.json").write_text('{"prediction_type": "v_prediction"}')
        return folder
    tensors = load_file(source) | ({"v_pred": torch.zeros(0)} if kind == "tensor" else {})
    about = {"modelspec.prediction_type": "v" if kind == "metadata" else "epsilon"}
    save_file(tensors, folder / "mine.safetensors", about)
    return folder / "mine.safetensors"


@pytest.mark.parametrize("kind", ["tensor", "metadata", "scheduler", "none"])
@pytest.mark.parametrize("script", ["train_network", "sdxl_train_network"])
def test_a_model_that_says_that_it_predicts_v_is_not_trained_on_noise(demo, tmp_path, script, kind):
    family = "sdxl" if "sdxl" in script and kind != "scheduler" else "sd15"
    source = training.config_of(demo, script).model.pretrained_model_name_or_path
    path = stating(source, tmp_path, kind)
    expected = {} if kind == "none" else {"v_parameterization": True}
    found = recognition.recognise_file(path)
    assert (found.family, dict(found.options)) == (family, expected)
    notes = [*recognition.find_name_notes(family, str(path), {"v_parameterization": False})]
    assert [dict(note.fix) for note in notes] == [expected] * bool(expected)
    assert all("v_parameterization = true: set that" in str(note) for note in notes)
    assert [*recognition.find_name_notes(family, str(path), {"v_parameterization": True})] == []
