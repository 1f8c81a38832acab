"""Which program wrote a file, and for what: known by decisive keys, else refused; a guess is called a guess."""

import json

import pytest

from library import importers
from library.cli import main
from library.config.ineffective import ineffective_options
from library.config.problems import ConfigError
from library.config.schema import options_of
from library.families import RUNS
from tests.config.arriving import CONFIGS


def written(folder, name, found):
    """A file of settings, by its ending."""
    path = folder / name
    as_toml = "\n".join(f"{key} = {json.dumps(value)}" for key, value in found.items())
    path.write_text(as_toml if name.endswith(".toml") else json.dumps(found), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["a.json", "a.yaml"])
@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": 1e-4, "max_train_steps": 10},
        {"pretrained_model_name_or_path": "m", "output_dir": "o", "resolution": 1024, "seed": 1, "lora_rank": 8},
        {"network_module": "networks.lora", "network_dim": 8},
    ],
)
def test_a_flat_file_is_read_as_toml_alone(tmp_path, name, settings):
    """JSON and YAML with a few words that are ours by chance are files of some other program."""
    with pytest.raises(ConfigError, match="none of the programs"):
        importers.import_file(written(tmp_path, name, settings), CONFIGS)


@pytest.mark.parametrize(
    ("name", "prompts"),
    [
        ("user_prompt_library.json", {"cat": "cat", "dog": "a dog"}),
        ("library.json", {"cat": "a cat", "dog": {"prompt": "a dog", "adapter_strength": 0.5}}),
    ],
)
def test_prompts_of_simpletuner_alone_are_called_prompts(tmp_path, name, prompts):
    with pytest.raises(ConfigError, match=f"{name} is a file of sample prompts, .* as user_prompt_library"):
        importers.import_file(written(tmp_path, name, prompts), CONFIGS)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("q.toml", {"arch": "Z-Image", "_source_script": "5_1.ps1", "network_dim": 8}, "qinglong"),
        ("k.json", {"accelerate_launch": {}, "dataset_preparation": {}, "wd14_caption": {}}, "kohya_ss's own page"),
        ("a.yaml", {"transformer_path": "t", "lora_type": "lokr", "learning_rate": 1}, "AnimaLoraToolkit"),
        ("a.toml", {"transformer_path": "t", "lora_type": "lokr", "learning_rate": 1}, "AnimaLoraToolkit"),
    ],
)
def test_a_program_whose_files_are_not_read_is_named(tmp_path, name, settings, words):
    with pytest.raises(ConfigError, match=words):
        importers.import_file(written(tmp_path, name, settings), CONFIGS)


@pytest.mark.parametrize("module", ["networks.lokr_anima", "networks.lora_krea", "networks.lora_flux2", "my.own"])
def test_an_unknown_network_module_is_refused(module):
    with pytest.raises(ConfigError, match=f"network_module = {module} is not known here"):
        importers.import_content({"network_module": module, "learning_rate": 1e-4}, CONFIGS)


def test_a_module_of_ones_own_is_kept_where_the_script_is_stated():
    imported = importers.import_content({"network_module": "my.own"}, CONFIGS, "sdxl_train_network")
    assert imported.config.network.module == "my.own"


@pytest.mark.parametrize("module", ["networks.dylora", "networks.loha", "networks.lokr", "networks.oft"])
def test_an_algorithm_of_sd_scripts_has_to_be_fixed_and_how_is_reported(module):
    imported = importers.import_content({"network_module": module, "learning_rate": 1e-4}, CONFIGS)
    assert [problem.option for problem in imported.problems] == ["network_module"]
    fix = imported.problems[0].fix
    assert fix["network_module"] == "lycoris.kohya" and fix["network_args"][0].startswith("algo=")


@pytest.mark.parametrize(
    ("settings", "script", "is_guess"),
    [
        ({"network_module": "networks.lora_flux", "network_dim": 8}, "flux_train_network", False),
        ({"network_module": "networks.lora_anima", "learning_rate": 1}, "anima_train_network", False),
        ({"network_module": "networks.lora_zimage", "train_data_dir": "/i"}, "zimage_train_network", False),
        ({"network_module": "networks.lora", "clip_l": "c", "ae": "a"}, "sdxl_train_network", True),
        ({"network_dim": 8}, "sdxl_train_network", True),
        ({"clip_l": "c", "network_dim": 8}, "flux_train_network", True),
        ({"learning_rate": 1e-5}, "sdxl_train", True),
    ],
)
def test_a_script_that_the_file_does_not_state_is_a_guess(settings, script, is_guess):
    imported = importers.import_content(settings, CONFIGS)
    assert imported.config.script == script and bool(imported.guess) == is_guess
    assert str(imported.account()["guessed"]) == str(imported.guess)
    assert ("guessed" in imported.report()) == is_guess and (
        str(imported.guess) in map(str, imported.lines())
    ) == is_guess
    assert not importers.import_content(settings, CONFIGS, script).guess


def test_a_script_in_the_name_or_the_first_line_is_no_guess(tmp_path):
    (tmp_path / "flux_train_network.toml").write_text("network_dim = 8")
    (tmp_path / "a.toml").write_text("# SDXL LoRA: sd-scripts/sdxl_train_network.py\nnetwork_dim = 8")
    for name, script in (("flux_train_network.toml", "flux_train_network"), ("a.toml", "sdxl_train_network")):
        imported = importers.import_file(tmp_path / name, CONFIGS)
        assert (imported.config.script, imported.guess) == (script, "")


def test_what_is_preferred_is_chosen_where_several_fit():
    preferred = ["anima_train_network", "flux_train_network"]
    assert importers.import_content({"network_dim": 8}, CONFIGS, "", preferred).config.script == "anima_train_network"
    assert (
        importers.import_content({"network_dim": 8, "t5xxl": "t"}, CONFIGS, "", preferred).config.script != preferred[0]
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"v2": True}, "Stable Diffusion 2"),
        ({"pretrained_model_name_or_path": "stabilityai/stable-diffusion-2-1"}, "Stable Diffusion 2"),
    ],
)
def test_an_older_model_is_not_taken_for_sdxl(settings, words):
    with pytest.raises(ConfigError, match=words):
        importers.import_content({"network_module": "networks.lora", "network_dim": 8, **settings}, CONFIGS)


@pytest.mark.parametrize(
    "name", ["./models/v1-5-pruned.safetensors", "runwayml/stable-diffusion-v1-5", "sd15.safetensors"]
)
def test_a_flat_file_is_for_the_model_that_its_base_is_called(name):
    settings = {"network_module": "networks.lora", "network_dim": 8, "pretrained_model_name_or_path": name}
    assert importers.import_content(settings, CONFIGS).config.script == "train_network"


@pytest.mark.parametrize(
    "name", ["sd_xl_base_1.0.safetensors", "novaAnimeXL_v150.safetensors", "pony-v1.6", "x-2.5.ckpt"]
)
def test_a_name_of_an_sdxl_model_is_not_refused(name):
    settings = {"network_module": "networks.lora", "network_dim": 8, "pretrained_model_name_or_path": name}
    assert importers.import_content(settings, CONFIGS).config.script == "sdxl_train_network"


def test_unknown_keys_are_reported_with_what_was_meant():
    settings = {"network_module": "networks.lora", "lerning_rate": 1e-4, "lr_restart_cycles": 2, "torch_compile": False}
    imported = importers.import_content({**settings, "seed": 1, "split_mode": True}, CONFIGS)
    unknown = {problem.option: problem for problem in imported.unknown()}
    assert unknown.keys() == {"lerning_rate", "lr_restart_cycles"} and not imported.problems
    assert unknown["lerning_rate"].fix == {"learning_rate": 1e-4} and "learning_rate?" in str(unknown["lerning_rate"])
    assert {"key": "lerning_rate", "became": "unknown"}.items() <= imported.account()["keys"][1].items()
    assert imported.account()["keys"][1]["fix"] == {"learning_rate": 1e-4}


def test_a_fix_never_takes_the_place_of_an_option_that_is_set():
    imported = importers.import_content({"network_dim": 8, "lerning_rate": 1e-4, "learning_rate": 2e-4}, CONFIGS)
    assert [problem.fix for problem in imported.unknown()] == [{}]
    assert [
        problem.fix for problem in importers.import_content({"seed": 1, "network_dims": "many"}, CONFIGS).unknown()
    ] == [{}]


def test_the_value_of_one_argument_never_becomes_all_of_them():
    settings = {"network_module": "networks.lora", "seed": 1, "network_dim": 8}
    for written, fix in (
        ({"weight_decay": 0.01}, {}),
        ({"betas": [0.9, 0.99]}, {}),
        ({"optimizer_arg": ["weight_decay=1"]}, {"optimizer_args": ("weight_decay=1",)}),
    ):
        (unknown,) = importers.import_content({**settings, **written}, CONFIGS).unknown()
        assert unknown.fix == fix and "optimizer_args?" in str(unknown)


def test_a_file_with_mostly_unknown_keys_is_not_taken_without_a_word(tmp_path, capsys):
    settings = {"network_dim": 8, "lora_rank_x": 1, "steps_q": 2, "model_kind_z": 3}
    path = written(tmp_path, "a.toml", settings)
    assert main.main(["import", str(path)]) == 1
    assert "only 1 of 4 keys are known here" in capsys.readouterr().err
    assert main.main(["import", str(written(tmp_path, "b.toml", {"network_dim": 8, "steps_q": 2}))]) == 0


def other_value(option):
    """A value that differs from the default."""
    if option.type is bool:
        return not option.default
    if option.choices:
        return next((choice for choice in option.choices if choice != option.default), option.choices[0])
    value = {int: 3, float: 0.25}.get(option.type, "x")
    return [value] if option.many else value


@pytest.mark.parametrize("script", RUNS)
def test_kept_is_reported_for_options_that_act_in_this_training_alone(script):
    """Each option of each training, by itself: one that has no effect as the others are is not called kept."""
    config = CONFIGS[script]
    for name, option in options_of(config).items():
        if option.kind == "secret":
            continue
        imported = importers.import_content({name: other_value(option)}, CONFIGS, script)
        outcome = next(key_outcome for key_outcome in imported.outcomes if key_outcome.key == name)
        idle = ineffective_options(imported.config)
        is_set = getattr(getattr(imported.config, option.section), name) != option.default
        if name in idle and is_set:
            assert (outcome.kind, str(outcome.text)) == ("ineffective", str(idle[name])), (name, outcome)
            assert name in imported.report() and any(name in str(line) for line in imported.lines())
        else:
            assert outcome.kind != "ineffective", (name, outcome)
