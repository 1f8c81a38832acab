"""Files that are no training of ours: refused by name, told from data sets, and reported as JSON on request."""

import json

import pytest

from kohya_gui.form import presets
from library import importers
from library.cli import main
from library.config.problems import ConfigError
from tests.config.arriving import CONFIGS, FLUX_AI, SDXL_LORA, of_aitoolkit, sets_of

KOHYA_LORA = {"sdxl": True, "LoRA_type": "Standard"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "FLUX_DEV_1", "training_method": "EMBEDDING"}, "embedding"),
        ({**SDXL_LORA, "training_method": "FINE_TUNE_VAE"}, "VAE"),
        ({**SDXL_LORA, "model_type": "STABLE_DIFFUSION_XL_10_BASE_INPAINTING"}, "SDXL inpainting"),
        ({**SDXL_LORA, "model_type": "IDEOGRAM_4"}, "IDEOGRAM_4"),
        (of_aitoolkit({"network.type": "lora", "model.arch": "krea2:o_edit"}), "krea2:o_edit"),
        (of_aitoolkit({**FLUX_AI, "adapter.type": "redux"}), "redux"),
        (of_aitoolkit({"model.is_flux": True, "adapter.type": "control_net", "adapter.train": True}), "control_net"),
        (of_aitoolkit({**FLUX_AI, "embedding.trigger": "x"}), "embedding"),
        (of_aitoolkit({**FLUX_AI, "slider.targets": []}), "slider"),
        (of_aitoolkit(FLUX_AI, kind="textual_inversion_trainer"), "textual inversion"),
        (of_aitoolkit(FLUX_AI, kind="concept_slider"), "slider"),
        (of_aitoolkit(FLUX_AI, kind="new_kind"), "new_kind"),
        (of_aitoolkit(FLUX_AI, kind="", job="generate"), "makes images"),
        (of_aitoolkit({**FLUX_AI, "model.name_or_path": "ostris/Flex.2-preview"}), "Flex.2"),
        (of_aitoolkit({"network.type": "lora", "model.arch": "flex2"}), "Flex.2"),
        (
            of_aitoolkit({"network.type": "lora", "model.name_or_path": "sd21", "model.is_v2": True}),
            "Stable Diffusion 2",
        ),
        (of_aitoolkit({"network.type": "lora", "train.steps": 1}), "a model that it does not name"),
        ({"sdxl": True, "max_resolution": "1", "lllite_mlp_dim": 64}, "LLLite of Anima"),
        ({"sdxl": True, "prompts_file": "x", "LoRA_type": "Standard"}, "LECO"),
        ({"learning_rate": 1, "control_net_lr": 1e-5}, "ControlNet"),
        ({"learning_rate": 1, "network_module": "networks.control_net_lllite"}, "ControlNet"),
        ({"learning_rate": 1, "network_module": "networks.lora_sd3"}, "SD3"),
        ({"network_module": "networks.lora_wan", "learning_rate": 1}, "Wan"),
    ],
)
def test_trainers_that_are_not_here_are_named_and_refused(settings, words):
    with pytest.raises(ConfigError, match=words) as refused:
        importers.import_content(settings, CONFIGS)
    said = str(refused.value)
    assert "\n" not in said and "not " in said and "use " in said or "train it there" in said
    assert not said.endswith("name the script")


SD_SCRIPTS_DATA = '[general]\nresolution = 512\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = "/i"\n'
CONCEPTS = [{"path": "/i", "image": {}, "text": {}}]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("d.toml", SD_SCRIPTS_DATA, "name it in dataset_config"),
        ("d.json", json.dumps({"datasets": [{"subsets": [{"image_dir": "/i"}]}]}), "name it in dataset_config"),
        ("d.toml", '[[datasets]]\nimage_directory = "/i"\n', "dataset_config"),
        ("d.yaml", "datasets:\n  - folder_path: /i\n", "dataset_config"),
        ("d.yaml", "- folder_path: /i\n", "data set file"),
        ("d.json", json.dumps(CONCEPTS), "data set file"),
    ],
)
def test_a_data_set_file_is_no_training(tmp_path, capsys, name, text, words):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words) as refused:
        importers.import_file(path, CONFIGS)
    assert "data set file" in str(refused.value)
    with pytest.raises(ConfigError, match="data set file"):  # the page's Load
        presets.import_fitting(path, {"sdxl": CONFIGS["sdxl_train"], "flux": CONFIGS["flux_train"]}, "sdxl", [])
    if name.endswith(".toml"):
        assert main.main(["check", str(path)]) != 0
        assert "data set file" in capsys.readouterr().err


def test_data_sets_of_ai_toolkit_alone_become_a_dataset_file(tmp_path):
    path, written_file = tmp_path / "d.yaml", tmp_path / "data.toml"
    path.write_text("datasets:\n  - folder_path: /i\n    resolution: [512, 768]\n", encoding="utf-8")
    assert main.main(["import", str(path), "-o", str(written_file)]) == 0
    assert [(d.resolution, d.table) for d in sets_of(written_file)] == [((768, 768), 0), ((512, 512), 0)]


# ---- for programs


@pytest.mark.parametrize(
    ("settings", "code", "key"),
    [
        (KOHYA_LORA, 0, "settings"),
        ({**KOHYA_LORA, "full_bf16": True, "mixed_precision": "fp16"}, 1, "problems"),
        ({**SDXL_LORA, "training_method": "FINE_TUNE_VAE"}, 1, "errors"),
        ([1], 1, "errors"),
    ],
)
@pytest.mark.parametrize("written", [False, True])
def test_json_prints_one_object_and_nothing_else(tmp_path, capsys, settings, code, key, written):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    more = ["-o", str(tmp_path / "run.toml")] if written else []
    assert main.main(["import", str(path), "--json", *more]) == code
    printed = capsys.readouterr()
    assert json.loads(printed.out)[key] and not printed.err and len(printed.out.splitlines()) == 1
    assert (tmp_path / "run.toml").exists() == (written and key != "errors")
