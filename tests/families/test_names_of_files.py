"""What the name of a file says of a model, where headers look alike."""

from pathlib import Path

import pytest

from library import families
from library.config.schema import options_of
from library.families import recognition


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
        ("sd15", "v1-5-pruned-emaonly.safetensors", {}, []),
    ],
)
def test_a_distilled_model_that_is_trained_as_another_is_told_by_its_name(family, path, values, fixes):
    assert [dict(note.fix) for note in recognition.find_name_notes(family, path, values)] == fixes
