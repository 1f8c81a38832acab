"""Lists of tables that hold something else, and EXIF rotation: importers say what they leave out and set."""

import pytest

from library import importers
from library.config.schema import option_values
from library.importers import files
from tests.config.arriving import CONFIGS, FLUX_AI, SDXL_LORA, of_aitoolkit

SIMPLE = {"model_family": "flux", "model_type": "lora", "data_backend_config": "x"}
PIPE = {
    "model": {"type": "flux", "diffusers_path": "x", "dtype": "bfloat16"},
    "adapter": {"type": "lora"},
    "pipeline_stages": 1,
}
EASY = {
    "general_args": {"args": {"pretrained_model_name_or_path": "x", "sdxl": True}},
    "network_args": {"args": {"network_dim": 4}},
}
MUSUBI = {"dit": "flux.safetensors", "network_module": "networks.lora_flux", "network_dim": 4}
IMAGES = {"id": "a", "type": "local", "instance_data_dir": "/a"}
LISTS = {  # a file of each program -> the words that say what is left out
    "OneTrainer concepts": (
        {**SDXL_LORA, "concepts": ["/cats", 7, {"path": "/a"}]},
        "concepts: entries",
        "1 ('/cats'), 2 (7)",
    ),
    "OneTrainer samples": ({**SDXL_LORA, "samples": ["a cat", {"prompt": "a dog"}]}, "samples: entries", "1 ('a cat')"),
    "OneTrainer, no list": ({**SDXL_LORA, "concepts": "cats"}, "concepts is left out", "'cats'"),
    "OneTrainer, a part": (
        {**SDXL_LORA, "concepts": [{"path": "/a", "text": "x"}]},
        "concept /a: text is left out",
        "'x'",
    ),
    "OneTrainer, no path": (
        {**SDXL_LORA, "concepts": [{"path": "/a"}, {"name": "x"}]},
        "data set 2 is left out",
        "path",
    ),
    "ai-toolkit": (
        of_aitoolkit({**FLUX_AI, "datasets": ["/cats", {"folder_path": "/a"}]}),
        "datasets: entries",
        "1 ('/cats')",
    ),
    "ai-toolkit, no folder": (
        of_aitoolkit({**FLUX_AI, "datasets": [{"x": 1}, {"folder_path": "/a"}]}),
        "data set 1 is",
        "folder_path",
    ),
    "ai-toolkit prompts": (
        of_aitoolkit({**FLUX_AI, "sample.prompts": [{"a": 1}, "a dog"]}),
        "sample.prompts: entries",
        "1 ({'a': 1})",
    ),
    "ai-toolkit samples": (
        of_aitoolkit({**FLUX_AI, "sample.samples": ["a", {"prompt": "b"}]}),
        "sample.samples: entries",
        "1 ('a')",
    ),
    "SimpleTuner": (
        {**SIMPLE, "data_backend_config": [IMAGES, "/cats", 3]},
        "data_backend_config: entries",
        "2 ('/cats'), 3 (3)",
    ),
    "diffusion-pipe": (
        {**PIPE, "dataset": {"directory": [{"path": "/a"}, "/cats"]}},
        "directory: entries",
        "2 ('/cats')",
    ),
    "diffusion-pipe, no path": (
        {**PIPE, "dataset": {"directory": [{"path": "/a"}, {"x": 1}]}},
        "data set directory is left out",
        "path",
    ),
    "LoRA_Easy": ({**EASY, "subsets": ["/cats", {"image_dir": "/a"}]}, "subsets: entries", "1 ('/cats')"),
    "musubi-tuner": (
        {**MUSUBI, "dataset_config": {"datasets": ["/cats", {"image_directory": "/a"}]}},
        "datasets: entries",
        "1 ('/cats')",
    ),
    "musubi-tuner, general": (
        {**MUSUBI, "dataset_config": {"general": "x", "datasets": [{"image_directory": "/a"}]}},
        "general is left out",
        "'x'",
    ),
    "metadata": (
        {
            "__metadata__": {
                "ss_network_module": "networks.lora",
                "ss_base_model_version": "sdxl_base_v1-0",
                "ss_datasets": '["x", {"resolution": [64, 64]}]',
            }
        },
        "ss_datasets: entries",
        "1 ('x')",
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_what_is_no_table_in_a_list_of_tables_is_reported(name):
    settings, start, words = LISTS[name]
    said = [str(note) for note in importers.import_content(settings, CONFIGS).notes]
    assert any(start in note and words in note for note in said), said


def test_many_entries_are_one_sentence():
    imported = importers.import_content({**SDXL_LORA, "concepts": [*range(1000), {"path": "/a"}]}, CONFIGS)
    (said,) = (str(note) for note in imported.notes if str(note).startswith("concepts"))
    assert said.endswith("1 (0), 2 (1), 3 (2), 4 (3), 5 (4), ...")


TURNING = {  # what each program does, found in its source
    "LoRA metadata": (
        {"__metadata__": {"ss_network_module": "networks.lora", "ss_base_model_version": "sdxl_base_v1-0"}},
        False,
    ),
    "SimpleTuner": (SIMPLE, True),
    "diffusion-pipe": (PIPE, False),
    "lora-scripts": ({"model_train_type": "sdxl-lora", "pretrained_model_name_or_path": "x"}, False),
    "LoRA_Easy_Training_Scripts": (EASY, False),
    "ai-toolkit": (of_aitoolkit(FLUX_AI), True),
    "OneTrainer": (SDXL_LORA, True),
    "musubi-tuner": (MUSUBI, False),
    "kohya_ss": ({"LoRA_type": "Standard", "sdxl": True, "max_train_steps": 10}, False),
}


@pytest.mark.parametrize("reader", files.IMPORTERS, ids=lambda reader: reader.TRAINER)
def test_images_are_turned_where_the_program_turns_them(reader):
    settings, turns = TURNING[reader.TRAINER]
    assert reader.recognises(settings) and turns == reader.APPLIES_EXIF
    imported = importers.import_content(settings, CONFIGS)
    assert option_values(imported.config)["exif_rotation"] is turns
    assert [str(outcome.text) for outcome in imported.of("default") if outcome.key == "exif_rotation"] == [
        "exif_rotation = true"
    ] * turns


def test_data_sets_alone_say_what_the_training_has_to_set():
    _, notes = importers.convert_foreign_dataset({"datasets": [{"folder_path": "/a"}]})
    assert any("set exif_rotation = true" in str(note) for note in notes)
    _, notes = importers.convert_foreign_dataset({"datasets": [{"image_directory": "/a"}]})
    assert not any("exif_rotation" in str(note) for note in notes)
