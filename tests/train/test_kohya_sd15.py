"""Files of kohya_ss's tabs for SD 1.5 train as they are imported, with the folders and the model of this machine."""

import json

import pytest

from library import families, importers
from library.config.schema import option_values
from tests.config.test_foreign_sd15 import ANY_TAB, TABS
from tests.training import config_of, train

CONFIGS = {script: families.config_class(script) for script in families.RUNS}
HERE = {"max_resolution": "64,64", "min_bucket_reso": 64, "mixed_precision": "no", "optimizer": "AdamW"}


@pytest.mark.parametrize(
    ("tab", "script", "keys"),
    [
        ("lora", "train_network", {"LoRA_type": "Kohya LoCon", "conv_dim": 4, "v_parameterization": True}),
        ("lora", "train_network", {"LoRA_type": "LyCORIS/LoKr", "LyCORIS_preset": "attn-mlp", "factor": 4}),
        ("dreambooth", "train_db", {"learning_rate_te": 0, "bucket_reso_steps": 1, "v_parameterization": True}),
        ("finetune", "fine_tune", {"train_dir": "not there", "create_caption": True, "dataset_repeats": "3"}),
        ("word", "train_textual_inversion", {"weights": "", "no_token_padding": False}),
    ],
)
def test_an_imported_file_trains(demo, squares, tmp_path, tab, script, keys):
    folder = squares / "2_zorb toy" if tab == "finetune" else squares
    model = config_of(demo, script).model.pretrained_model_name_or_path
    places = {"image_folder" if tab == "finetune" else "train_data_dir": str(folder), "output_dir": str(tmp_path)}
    places |= {"pretrained_model_name_or_path": model, "max_train_steps": "2", "output_name": "m"}
    file = tmp_path / "kohya.json"
    file.write_text(json.dumps({**ANY_TAB, **TABS[tab], **HERE, **keys, **places}), encoding="utf-8")
    imported = importers.import_file(file, CONFIGS)
    assert imported.config.script == script and not imported.problems
    for name, text in imported.texts.items():
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
    config = imported.with_files({name: str(tmp_path / f"{name}.toml") for name in imported.texts}).config
    outcome = train(config)
    assert len(outcome.losses) == 2 and outcome.file == tmp_path / "m.safetensors"
    assert outcome.facts["data"]["repeats"] == (12 if tab == "finetune" else 8)
    assert option_values(config)["v_parameterization"] == keys.get("v_parameterization", False)
