"""kohya import and kohya diff: what they write, say and return."""

import json

import pytest

from library.cli import main
from library.config.building import build_config
from library.config.command import quote_command
from library.config.formats import read_toml
from library.families import config_class

LORA = {"sdxl": True, "LoRA_type": "Standard", "network_dim": "16", "learning_rate": "1e-4", "lowvram": True}


@pytest.fixture
def lora(tmp_path):
    path = tmp_path / "cat.json"
    path.write_text(json.dumps(LORA | {"sample_prompts": "a cat\na dog"}), encoding="utf-8")
    return path


def test_import_writes_a_config_and_says_what_became_of_every_key(lora, tmp_path, capsys):
    run = tmp_path / "run.toml"
    assert main.main(["import", str(lora), "-o", str(run)]) == 0
    config = build_config(config_class("sdxl_train_network"), read_toml(run), notes=[])
    assert config.network.network_dim == 16 and config.optim.learning_rate == 1e-4
    assert (tmp_path / "run.prompts.txt").read_text(encoding="utf-8") == "a cat\na dog\n"
    assert config.sample.sample_prompts == str((tmp_path / "run.prompts.txt").resolve())
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("kept", "changed", "ignored", "lowvram", "still to fill in", "output_dir"))
    assert all(str(path) in shown for path in tmp_path.glob("run.*"))


def test_import_never_writes_over_a_file(lora, tmp_path, capsys):
    run = tmp_path / "run.toml"
    (tmp_path / "run.prompts.txt").write_text("mine", encoding="utf-8")
    assert main.main(["import", str(lora), "-o", str(run)]) == 1
    assert "exists already" in capsys.readouterr().err and not run.exists()
    assert (tmp_path / "run.prompts.txt").read_text(encoding="utf-8") == "mine"


def test_without_a_place_the_config_is_printed_alone(lora, capsys):
    assert main.main(["import", str(lora), "--script", "flux_train_network"]) == 0
    printed = capsys.readouterr()
    assert "network_dim = 16" in printed.out and "flux_train_network" in printed.out and "kept" not in printed.out
    assert "kept" in printed.err and "-o" in printed.err


def test_what_does_not_go_together_is_written_and_has_to_be_fixed(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(LORA | {"full_bf16": True, "mixed_precision": "fp16"}), encoding="utf-8")
    assert main.main(["import", str(path), "-o", str(tmp_path / "run.toml")]) == 1
    assert "to fix" in capsys.readouterr().out and read_toml(tmp_path / "run.toml")["full_bf16"] is True


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "not valid JSON"),
        ("a.json", "[1]", "holds no settings"),
        ("a.json", "\ufeff \n", "a.json is empty"),
        ("a.json", '{"LoRA_type": "Standard", "v2": true}', "Stable Diffusion 2"),
        ("a.toml", "x = ", "not valid TOML"),
        ("a.toml", "lerning_rate = 1", "learning_rate?"),
        ("a.md", "", "must end in"),
        ("a.txt", "", "no command that starts a training"),
        ("a.yaml", "a: [", "not valid YAML"),
        ("a.json", '{"seed": 1, "more": {"seed": 2}, "seed": 2}', "has seed twice in one table"),
        ("a.yaml", "config:\n  name: a\n  name: b\n", "has name twice in one table"),
    ],
)
def test_what_is_no_file_of_settings_is_reported_in_a_sentence(tmp_path, capsys, name, text, words):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert main.main(["import", str(tmp_path / name)]) == 1
    assert words in capsys.readouterr().err
    assert main.main(["import", str(tmp_path / "gone.json")]) == 1


def test_a_named_script_makes_no_settings_of_a_list_of_images(tmp_path, capsys):
    (tmp_path / "meta.json").write_text('{"cats/1.png": {"caption": "a cat"}}', encoding="utf-8")
    assert main.main(["import", str(tmp_path / "meta.json"), "--script", "sdxl_train_network"]) == 1
    assert "of none of the programs whose settings are read" in capsys.readouterr().err


def test_a_script_may_be_called_as_in_musubi_tuner(tmp_path, capsys):
    file, out = tmp_path / "a.toml", tmp_path / "new run.toml"
    file.write_text('dit = "m.safetensors"\nnetwork_module = "networks.lora_flux"\n', encoding="utf-8")
    main.main(["import", str(file), "--script", "flux_kontext_train_network.py", "-o", str(out)])
    assert 'model_type = "kontext"' in out.read_text(encoding="utf-8")
    assert quote_command(["kohya", "check", str(out)]) in capsys.readouterr().out


def test_where_nothing_can_be_written_is_reported_in_a_sentence(lora, tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    assert main.main(["import", str(lora), "-o", str(tmp_path / "taken" / "run.toml")]) == 1
    assert "a file has the name of its folder" in capsys.readouterr().err
    assert main.main(["check", str(lora)]) == 1
    assert f"kohya import {lora} -o run.toml" in capsys.readouterr().err


def test_diff_of_any_two_files(lora, tmp_path, capsys):
    run = tmp_path / "run.toml"
    assert main.main(["import", str(lora), "-o", str(run)]) == 0
    text = run.read_text(encoding="utf-8").replace("network_dim = 16", "network_dim = 8")
    run.write_text("\n".join(line for line in text.splitlines() if "sample_prompts" not in line), encoding="utf-8")
    capsys.readouterr()
    assert main.main(["diff", str(lora), str(run)]) == 1
    shown = capsys.readouterr().out
    assert "network_dim: 16 -> 8" in shown and "learning_rate" not in shown and "1 option differs" in shown
    assert main.main(["diff", str(run), str(run)]) == 0
    assert main.main(["diff", str(tmp_path), str(run)]) == 0  # the folder of a run
    assert main.main(["diff", str(run), str(tmp_path / "gone.toml")]) == 2


def test_a_flat_toml_of_sd_scripts(tmp_path, capsys):
    path = tmp_path / "old.toml"
    path.write_text(
        'ae = "a"\nnetwork_dim = 4\nclip_skip = 2\nskip_latents_validity_check = true\nsplit_mode = true\n'
        'dataset_config = "data.toml"\n'
        'deepspeed = false\ntorch_compile = true\nepoch = 3\nwandb_api_key = "canary"\ncaption_dropout_rate = 5\n',
        encoding="utf-8",
    )
    assert main.main(["import", str(path)]) == 0
    printed = capsys.readouterr()
    assert "skip_cache_check = true" in printed.out and "compile = true" in printed.out
    assert "flux_train_network" in printed.out and "clip_skip = 2" in printed.out
    assert "canary" not in printed.out + printed.err and "blocks_to_swap" in printed.err
    assert "at most 1.0" in printed.err
    assert main.main(["import", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["dataset_config"] == "data.toml"


def test_a_data_set_that_is_converted_is_not_still_to_fill_in(tmp_path, capsys):
    settings = {"model_family": "sdxl", "model_type": "lora", "max_train_steps": 1, "data_backend_config": "data.json"}
    data = [{"id": "cats", "type": "local", "instance_data_dir": "/cats"}]
    for name, content in (("config.json", settings), ("data.json", data)):
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    assert main.main(["import", str(tmp_path / "config.json")]) == 0
    said = capsys.readouterr().err
    assert "train_data_dir" not in said and "dataset_config has to be a file of its own" in said
