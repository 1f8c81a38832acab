"""`kohya preset`: presets as configs, for a purpose, a model and a number of images; mistakes in one sentence."""

import pytest

from library.cli import launch
from library.cli.train_script import config_path
from library.config.formats import read_toml
from library.config.problems import ConfigError
from library.recipes import preset_files, shell
from tests.training import squares  # noqa: F401


def written(tmp_path, *arguments):
    path = tmp_path / "made.toml"
    assert shell.main([*arguments, "-o", str(path)]) == 0
    return read_toml(path)


def test_without_a_name_all_presets_are_listed(capsys):
    assert shell.main([]) == 0
    listed = capsys.readouterr().out
    assert all(preset.id in listed for preset in preset_files.all_presets() if not preset.is_profile)
    assert "dreambooth" not in listed and "compile/" not in listed


def test_a_purpose_and_the_number_of_images_decide(tmp_path, capsys):
    text = written(tmp_path, "flux_2/lora-12gb", "--purpose", "style", "--images", "30")
    assert (text["learning_rate"], text["max_train_steps"]) == (3e-4, 900)
    said = capsys.readouterr().err
    assert "Purpose: Style." in said and "30 images, each seen about 30 times: 900 steps." in said
    assert launch.script_of_toml(tmp_path / "made.toml") == "flux_2_train_network"


def test_images_of_a_folder_are_counted_and_filled_in(tmp_path, squares):  # noqa: F811
    text = written(tmp_path, "sdxl/lora-12gb", "--data", str(squares))
    assert text["train_data_dir"] == str(squares) and text["max_train_steps"] == 2000
    with pytest.raises(ConfigError, match="train_data_dir"):
        shell.main(["sdxl/lora-12gb", "--data", str(tmp_path / "none")])


def test_a_model_brings_what_it_requires(tmp_path):
    text = written(tmp_path, "zimage/lora-16gb", "--model", "turbo")
    assert text["model_version"] == "turbo" and text["max_train_steps"] == 2500
    assert text["assistant_lora"].endswith("zimage_turbo_training_adapter_v2.safetensors")


def test_presets_have_their_former_names_and_files_too(tmp_path, capsys):
    assert shell.main(["flux/dreambooth-24gb"]) == 0
    assert capsys.readouterr().out.startswith("# FLUX.1 fine-tune")
    old = preset_files.PRESETS_FOLDER / "sdxl" / "dreambooth-24gb.toml"
    assert config_path(str(old)).name == "finetune-24gb.toml" and launch.script_of_toml(old) == "sdxl_train"
    assert shell.find_preset(str(old)).id == "sdxl/finetune-24gb"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["flux/lora-9gb"], "There is no preset flux/lora-9gb"),
        (["compile/balanced"], "There is no preset compile/balanced"),
        (["flux/lora-24gb", "--purpose", "edit"], "flux/lora-24gb is for character or style, not for edit"),
        (["flux/finetune-24gb", "--purpose", "style"], "flux/finetune-24gb is for any purpose"),
        (["flux_2/lora-12gb", "--model", "x"], "knows no x; write one of klein-base-4b"),
        (["sdxl/lora-12gb", "--model", "x"], "has one model only"),
    ],
)
def test_what_there_is_not_is_refused_in_one_sentence(arguments, words):
    with pytest.raises(ConfigError, match=words):
        shell.main(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--images", "0"],
        ["--images", "-3"],
        ["--images", "many"],
        ["--data", ".", "--images", "3"],
        ["--purpose", "fun"],
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        shell.main(["flux/lora-24gb", *arguments])
    said = capsys.readouterr()
    assert left.value.code == 2 and arguments[0] in said.err and not said.out


def test_a_file_is_never_written_over(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("seed = 1", encoding="utf-8")
    with pytest.raises(ConfigError, match="exists already"):
        shell.main(["flux/lora-24gb", "-o", str(path)])
    assert path.read_text(encoding="utf-8") == "seed = 1"
