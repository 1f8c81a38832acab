"""What other programs do that has no equal here is said, and what cannot be left out is among what has to be fixed."""

import pytest

from library import importers
from library.config.problems import ConfigError
from library.config.schema import option_values
from tests.config.arriving import CONFIGS, SDXL_LORA, differing, of_aitoolkit, sets_of

ADAPTER = "ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter_v2.safetensors"
TURBO = {"network.type": "lora", "model.arch": "zimage:turbo", "model.name_or_path": "Tongyi-MAI/Z-Image-Turbo"}
SIMPLE = {"model_family": "z_image", "model_type": "lora", "data_backend_config": "x", "model_flavour": "turbo"}
KOHYA = {"LoRA_type": "Standard", "sdxl": True, "max_train_steps": 10}


def outcome(imported, key):
    return next(key_outcome for key_outcome in imported.outcomes if key_outcome.key == key)


SCHNELL = {"network.type": "lora", "model.is_flux": True, "model.name_or_path": "black-forest-labs/FLUX.1-schnell"}


@pytest.mark.parametrize(
    ("settings", "file"),
    [
        (of_aitoolkit({**TURBO, "model.assistant_lora_path": ADAPTER}), ADAPTER),
        (SIMPLE, ADAPTER.replace("_v2", "_v1")),
        ({**SIMPLE, "model_flavour": "turbo-ostris-v2"}, ADAPTER),
        ({**SIMPLE, "assistant_lora_path": "/a.safetensors", "assistant_lora_strength": 0.5}, "/a.safetensors:0.5"),
        (
            of_aitoolkit({**SCHNELL, "model.assistant_lora_path": "ostris/FLUX.1-schnell-training-adapter"}),
            "ostris/FLUX.1-schnell-training-adapter/pytorch_lora_weights.safetensors",
        ),
    ],
)
def test_an_adapter_of_the_hub_that_a_training_needs_is_named(settings, file):
    imported = importers.import_content(settings, CONFIGS)
    assert imported.config.network.assistant_lora == file and not imported.problems
    assert not importers.import_content(
        {**SIMPLE, "disable_assistant_lora": True}, CONFIGS
    ).config.network.assistant_lora


def test_an_adapter_that_cannot_be_named_has_to_be_fixed():
    imported = importers.import_content(
        of_aitoolkit({**TURBO, "model.assistant_lora_path": "somewhere/else/adapter.pt"}), CONFIGS
    )
    assert [problem.option for problem in imported.problems] == ["assistant_lora"] and "somewhere" in str(
        imported.problems[0]
    )


@pytest.mark.parametrize(
    ("balancing", "epochs", "repeats", "here"),
    [
        ((1, 3), 100, (1, 3), 100),
        ((0.5, 2.5), 100, (1, 5), 50),
        ((0.2, 1), 100, (1, 5), 20),
        ((0.333, 1), 99, (1, 3), 33),
    ],
)
def test_repeats_of_concepts_keep_their_ratio(tmp_path, balancing, epochs, repeats, here):
    concepts = [{"path": f"/{at}", "balancing": value} for at, value in enumerate(balancing)]
    imported = importers.import_content({**SDXL_LORA, "concepts": concepts, "epochs": epochs}, CONFIGS)
    (tmp_path / "data.toml").write_text(imported.texts["dataset_config"], encoding="utf-8")
    (data,) = sets_of(tmp_path / "data.toml")
    assert tuple(subset.num_repeats for subset in data.subsets) == repeats and not imported.problems
    assert imported.config.steps.max_train_epochs == here
    assert (here == epochs) == (not any("multiplied" in str(note) for note in imported.notes))


@pytest.mark.parametrize(
    ("balancing", "epochs"), [((0.0022, 1), 100), ((0.5, 2), 7), ((1, -2), 100), ((0.31415, 1), 100)]
)
def test_repeats_whose_ratio_cannot_be_kept_have_to_be_fixed(balancing, epochs):
    concepts = [{"path": f"/{at}", "balancing": value} for at, value in enumerate(balancing)]
    imported = importers.import_content({**SDXL_LORA, "concepts": concepts, "epochs": epochs}, CONFIGS)
    (problem,) = imported.problems
    assert problem.option == "dataset_config" and f"/1: {balancing[1]}" in str(problem)


def test_masks_of_onetrainer_are_used_as_they_lie():
    imported = importers.import_content({**SDXL_LORA, "masked_training": True}, CONFIGS)
    assert option_values(imported.config)["masked_loss"] and "masklabel" in str(
        outcome(imported, "masked_training").text
    )
    assert "rename" not in str(outcome(imported, "masked_training").text)


@pytest.mark.parametrize(("masks", "area"), [(True, True), (True, False), (False, True)])
def test_onetrainer_divides_by_the_area_of_masks_where_it_reads_masks(masks, area):
    imported = importers.import_content(
        {**SDXL_LORA, "masked_training": masks, "normalize_masked_area_loss": area}, CONFIGS
    )
    assert imported.config.loss.normalize_masked_area_loss == (masks and area)
    said = outcome(imported, "normalize_masked_area_loss")
    assert said.kind == ("empty" if not area else "kept" if masks else "ignored")
    assert said.kind != "ignored" or "masked_training" in str(said.text)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"network_module": "networks.lora_ideogram4", "text_encoder": "q", "fp8_vl": True}, "is for Ideogram 4"),
        ({"network_module": "networks.lora_wan", "text_encoder": "q"}, "is for Wan"),
    ],
)
def test_the_module_of_musubi_tuner_decides_which_model_a_file_is_for(keys, words):
    with pytest.raises(ConfigError, match=words):
        importers.import_content({**keys, "learning_rate": 1}, CONFIGS)


def test_strengths_without_base_weights_are_left_out():
    """As pages write them always; in files of any program."""
    for settings in ({**KOHYA, "base_weights_multiplier": 1}, {"network_dim": 8, "base_weights_multiplier": 1}):
        imported = importers.import_content(settings, CONFIGS)
        assert not imported.problems and "base_weights" in str(outcome(imported, "base_weights_multiplier").text)
        assert not imported.config.network.base_weights_multiplier
    both = {**KOHYA, "base_weights": "/a.safetensors", "base_weights_multiplier": 0.5}
    assert importers.import_content(both, CONFIGS).config.network.base_weights_multiplier == (0.5,)


def test_keys_of_other_tabs_tell_a_file_of_kohya_ss():
    lllite = {"cond_emb_dim": 32, "lllite_mlp_dim": 64, "conditioning_data_dir": "/c", "optimizer": "AdamW8bit"}
    assert importers.is_foreign_config(lllite)
    with pytest.raises(ConfigError, match="LLLite of Anima"):
        importers.import_content(lllite, CONFIGS)
    flags = {"cond_emb_dim": 32, "conditioning_data_dir": "/c", "optimizer_type": "AdamW8bit"}  # of sd-scripts itself
    assert importers.import_content(flags, CONFIGS).config.script == "sdxl_train_control_net_lllite"


@pytest.mark.parametrize(
    ("switch", "key"),
    [
        ("do_differential_guidance", "differential_guidance_scale"),
    ],
)
def test_a_loss_of_ai_toolkit_that_is_not_here_has_to_be_decided(switch, key):
    settings = {**TURBO, f"train.{switch}": True, f"train.{key}": 2}
    imported = importers.import_content(of_aitoolkit(settings), CONFIGS)
    assert [f"train.{switch}" in str(problem) for problem in imported.problems] == [True]
    assert str(outcome(imported, f"train.{key}").text) == f"train.{switch} is not offered here"
    off = importers.import_content(of_aitoolkit({**settings, f"train.{switch}": False}), CONFIGS)
    assert not off.problems


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"diff_output_preservation": True, "diff_output_preservation_class": "person"},
            {"preserve_weight": 1.0, "preserve_prompt": "person"},
        ),
        (
            {"blank_prompt_preservation": True, "blank_prompt_preservation_multiplier": 0.5},
            {"preserve_weight": 0.5, "preserve_prompt": None},
        ),
    ],
)
def test_what_ai_toolkit_preserves_is_preserved(settings, expected):
    train = {f"train.{key}": value for key, value in settings.items()}
    imported = importers.import_content(of_aitoolkit({**TURBO, **train}), CONFIGS)
    network = imported.config.network
    assert {name: getattr(network, name) for name in expected} == expected and not imported.problems
    assert {outcome(imported, key).kind for key in train} == {"changed"}


def test_of_two_kinds_of_preservation_one_is_imported_and_the_other_named():
    switches = {"diff_output_preservation": True, "diff_output_preservation_class": "person"}
    switches |= {"diff_output_preservation_multiplier": 0.5}
    switches |= {"blank_prompt_preservation": True, "blank_prompt_preservation_multiplier": 2.0}
    imported = importers.import_content(
        of_aitoolkit({**TURBO, **{f"train.{k}": v for k, v in switches.items()}}), CONFIGS
    )
    network = imported.config.network
    assert (network.preserve_weight, network.preserve_prompt) == (0.5, "person")
    ignored = outcome(imported, "train.blank_prompt_preservation")
    assert ignored.kind == "ignored" and "train.diff_output_preservation is on as well" in str(ignored.text)
    listed = of_aitoolkit(
        {**TURBO, "train.diff_output_preservation": True, "train.diff_output_preservation_class": ["a"]}
    )
    assert importers.import_content(listed, CONFIGS).config.network.preserve_prompt is None


def test_what_acts_once_the_data_sets_are_written_is_not_called_idle():
    """The weight of regularisation images, which are in the file of data sets that is written beside the config."""
    data = [{"folder_path": "/cats"}, {"folder_path": "/reg", "is_reg": True}]
    imported = importers.import_content(of_aitoolkit({**TURBO, "train.reg_weight": 0.5, "datasets": data}), CONFIGS)
    assert outcome(imported, "train.reg_weight").kind == "renamed" and imported.config.data.prior_loss_weight == 0.5
    alone = importers.import_content(of_aitoolkit({**TURBO, "train.reg_weight": 0.5}), CONFIGS)
    assert outcome(alone, "train.reg_weight").kind == "ineffective"


def test_where_the_average_is_saved_is_reported():
    settings = of_aitoolkit({**TURBO, "train.ema_config.use_ema": True, "train.ema_config.ema_decay": 0.99})
    imported = importers.import_content(settings, CONFIGS)
    said = str(outcome(imported, "train.ema_config.use_ema").text)
    assert imported.config.optim.ema_decay == 0.99 and "-ema, not in its place" in said


@pytest.mark.parametrize(
    ("keys", "scale", "is_same"),
    [({}, 0.5, True), ({"logit_std": 2.0}, 1.0, True), ({"logit_mean": 1.0, "logit_std": 3.0}, 1.5, False)],
)
def test_logsnr_of_musubi_tuner_is_a_sigmoid(keys, scale, is_same):
    settings = {"network_module": "networks.lora_qwen_image", "dit": "d", "timestep_sampling": "logsnr", **keys}
    imported = importers.import_content(settings, CONFIGS)
    expected = {"timestep_sampling": "sigmoid", "sigmoid_scale": scale, "logit_mean": 0, "logit_std": 1}
    assert differing(option_values(imported.config), expected) == {}
    assert ("nearest" not in str(outcome(imported, "timestep_sampling").text)) == is_same


@pytest.mark.parametrize(
    "settings",
    [
        {"LoRA_type": "Standard", "sdxl": True, "seed": -1},
        {"model_type": "STABLE_DIFFUSION_XL_10_BASE", "training_method": "LORA", "seed": "-1"},
        {"model_family": "sdxl", "model_type": "lora", "data_backend_config": "d.json", "seed": -1},
        {"model_train_type": "sdxl-lora", "seed": -1},
        {"network_module": "networks.lora", "seed": -1},
        of_aitoolkit({"network.type": "lora", "model.name_or_path": "dev", "model.is_flux": True, "train.seed": -1}),
    ],
    ids=["kohya_ss", "OneTrainer", "SimpleTuner", "lora-scripts", "sd-scripts", "ai-toolkit"],
)
def test_a_seed_of_minus_one_is_a_random_one(settings):
    imported = importers.import_content(settings, CONFIGS)
    assert imported.config.steps.seed is None
    assert not [problem for problem in (*imported.problems, *imported.unknown()) if problem.option == "seed"]
