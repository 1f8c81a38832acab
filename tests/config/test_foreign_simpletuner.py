"""Files of SimpleTuner: the config, with the lists of data sets and prompts, and the settings of LyCORIS."""

import json
from pathlib import Path

import pytest

from library import importers
from library.config.problems import ConfigError
from library.config.schema import option_values
from tests.config.arriving import CONFIGS, differing, sets_of

SOURCE = Path(__file__).parent / "foreign/simpletuner.json"
WHOLE = json.loads(SOURCE.read_text(encoding="utf-8"))
LORA = {"model_family": "flux", "model_type": "lora", "data_backend_config": "x.json", "max_train_steps": 10}
DATA = [
    {
        "id": "cats",
        "type": "local",
        "instance_data_dir": "/cats",
        "caption_strategy": "textfile",
        "repeats": 3,
        "resolution": 512,
        "resolution_type": "pixel_area",
        "crop": False,
        "minimum_image_size": 256,
        "conditioning_data": ["cat-masks", "cat-refs"],
    },
    {
        "id": "dogs",
        "type": "local",
        "instance_data_dir": "/dogs",
        "caption_strategy": "instanceprompt",
        "crop": True,
        "instance_prompt": "a dog",
        "resolution": 1.0,
        "resolution_type": "area",
        "train_batch_size": 4,
    },
    {"id": "far", "type": "aws", "aws_bucket_name": "x"},
    {"id": "cat-masks", "dataset_type": "conditioning", "conditioning_type": "mask", "instance_data_dir": "/masks"},
    {
        "id": "cat-refs",
        "dataset_type": "conditioning",
        "conditioning_type": "reference_strict",
        "instance_data_dir": "/refs",
    },
    {"id": "words", "dataset_type": "text_embeds", "default": True, "type": "local", "cache_dir": "cache"},
    {"id": "off", "disabled": True, "instance_data_dir": "/off", "type": "local"},
]


def outcome(imported, key):
    return next(key_outcome for key_outcome in imported.outcomes if key_outcome.key == key)


def test_every_key_is_accounted_for_under_its_name_in_the_file():
    imported = importers.import_file(SOURCE, CONFIGS)
    assert imported.trainer == "SimpleTuner" and {key_outcome.key for key_outcome in imported.outcomes} >= WHOLE.keys()
    assert all(
        key_outcome.kind in ("kept", "empty") or len(str(key_outcome.text)) > 2 for key_outcome in imported.outcomes
    )
    assert not imported.problems and not imported.of("unknown") and outcome(imported, "tread_config").kind == "ignored"


def test_the_settings_arrive():
    imported = importers.import_file(SOURCE, CONFIGS)
    expected = {
        "pretrained_model_name_or_path": "black-forest-labs/FLUX.2-klein-base-9B",
        "model_version": "klein-base-9b",
        "vae": "/models/vae.safetensors",
        "network_dim": 32,
        "network_alpha": 16,
        "network_train_unet_only": True,
        "learning_rate": 1e-4,
        "optimizer_type": "AdamW8bit",
        "lr_scheduler": "polynomial",
        "lr_scheduler_power": 2.0,
        "optimizer_args": ("betas=0.95,0.999", "weight_decay=0.02"),
        "lr_warmup_steps": 20,
        "max_grad_norm": 0.5,
        "max_train_steps": 1500,
        "save_every_n_steps": 250,
        "save_last_n_steps": 750,
        "save_state": True,
        "int8_base": True,
        "blocks_to_swap": 19,
        "timestep_sampling": "shift",
        "discrete_flow_shift": 3.0,
        "ema_decay": 0.999,
        "sample_every_n_steps": 100,
        "train_batch_size": 2,
        "seed": 42,
        "mixed_precision": "bf16",
        "cache_latents_to_disk": True,
        "cache_text_encoder_outputs": True,
        "caption_dropout_rate": 0.1,
        "huggingface_repo_id": None,
        "log_with": "tensorboard",
        "logging_dir": "logs",
        "noise_offset": None,
    }
    assert differing(option_values(imported.config), expected) == {}
    assert imported.texts["sample_prompts"] == "a cat --w 1024 --h 768 --s 20 --l 4.0 --d 7 --n blurry\n"
    for key in ("noise_offset", "snr_gamma", "offset_noise"):
        assert "flow matching" in str(outcome(imported, key).text)
    assert outcome(imported, "checkpointing_steps").kind == "changed" and outcome(imported, "lr_end").kind == "ignored"


def test_what_the_file_leaves_out_is_the_default_of_simpletuner():
    imported = importers.import_content(LORA, CONFIGS)
    actual = option_values(imported.config)
    expected = {
        "network_dim": 16,
        "learning_rate": 4e-7,
        "train_batch_size": 4,
        "save_every_n_steps": 500,
        "gradient_checkpointing": True,
        "guidance_scale": 1.0,
        "model_prediction_type": "raw",
    }
    assert differing(actual, expected) == {} and {outcome.key for outcome in imported.of("default")} >= {
        "learning_rate"
    }


def folder_with(tmp_path, **files):
    (tmp_path / "config").mkdir()
    for name, content in files.items():
        (tmp_path / "config" / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "config" / "config.json").write_text(json.dumps(WHOLE), encoding="utf-8")
    return tmp_path / "config" / "config.json"


def test_its_data_sets_become_a_dataset_file(tmp_path):
    imported = importers.import_file(folder_with(tmp_path, multidatabackend=DATA), CONFIGS)
    path = tmp_path / "data.toml"
    path.write_text(imported.texts["dataset_config"], encoding="utf-8")
    cats, dogs = sets_of(path, "flux_2_train_network", model_version="klein-base-9b")
    assert (cats.resolution, cats.enable_bucket, cats.subsets[0].num_repeats) == ((512, 512), True, 4)
    assert (cats.subsets[0].conditioning_data_dir, cats.subsets[0].control_directory) == ("/masks", "/refs")
    assert (dogs.resolution, dogs.enable_bucket, dogs.batch_size) == ((1024, 1024), False, 4)
    assert dogs.subsets[0].class_tokens == "a dog" and option_values(imported.config)["masked_loss"]
    notes = "\n".join(map(str, imported.notes))
    assert "data set far is left out" in notes and "minimum_image_size is ignored" in notes and "/off" not in notes


def test_prompts_and_lycoris_settings_are_read_from_their_files(tmp_path):
    settings = {"algo": "lokr", "linear_dim": 10000, "linear_alpha": 1, "factor": 12, "apply_preset": {"x": []}}
    path = folder_with(tmp_path, prompts={"one": "a dog", "two": ""}, lycoris=settings)
    path.write_text(json.dumps({**WHOLE, "lora_type": "lycoris"}), encoding="utf-8")
    imported = importers.import_file(path, CONFIGS)
    assert [line.partition(" --")[0] for line in imported.texts["sample_prompts"].splitlines()] == ["a cat", "a dog"]
    network = imported.config.network
    assert network.network_module == "lycoris.kohya" and network.network_dim == 1
    assert set(network.network_args) == {"algo=lokr", "full_matrix=True", "factor=12", "bypass_mode=True"}


def test_a_size_below_zero_is_none():
    sets = [{"id": "a", "instance_data_dir": "/d", "resolution": -5}]
    assert (
        "resolution = 1024"
        in importers.import_content({**LORA, "data_backend_config": sets}, CONFIGS).texts["dataset_config"]
    )


def test_a_whole_model_may_have_the_rank_of_a_lora_in_its_file():
    imported = importers.import_content({**LORA, "model_type": "full", "lora_rank": 16}, CONFIGS)
    assert imported.config.kind == "finetune" and "lora_rank" in {outcome.key for outcome in imported.of("ignored")}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model_family": ""}, "names no model in model_family"),
        ({"model_family": "wan"}, "Wan"),
        ({"model_family": "sd2x"}, "Stable Diffusion 2"),
        ({"model_family": "ltxvideo2"}, "LTX 2"),
        ({"model_family": "brandnew"}, "brandnew"),
        ({"controlnet": True}, "ControlNet"),
        ({"distillation_method": "dcm"}, "distilled"),
        ({"model_family": "sdxl", "model_flavour": "refiner-1.0"}, "refiner"),
        ({"data_backend_config": [{"id": "v", "dataset_type": "video", "instance_data_dir": "/v"}]}, "videos"),
    ],
)
def test_other_models_methods_and_videos_are_refused_by_name(keys, words):
    with pytest.raises(ConfigError, match=words):
        importers.import_content({**LORA, **keys}, CONFIGS)


@pytest.mark.parametrize(
    ("keys", "script", "expected"),
    [
        ({"model_family": "chroma"}, "flux_train_network", {"model_type": "chroma", "apply_t5_attn_mask": True}),
        ({"model_flavour": "kontext"}, "flux_train_network", {"model_type": "kontext"}),
        ({"model_family": "z_image"}, "zimage_train_network", {"model_version": "turbo"}),
        ({"model_family": "z_image", "model_flavour": "base"}, "zimage_train_network", {"model_version": "base"}),
        (
            {"model_family": "flux3", "flow_schedule_shift": 3},
            "flux_3_train_network",
            {
                "pretrained_model_name_or_path": "black-forest-labs/flux-3-image-klein-base",
                "timestep_sampling": "shift",
                "discrete_flow_shift": 3.0,
            },
        ),
        (
            {"model_family": "krea2"},
            "krea_2_train_network",
            {"model_version": "raw", "pretrained_model_name_or_path": "krea/Krea-2-Raw"},
        ),
        (
            {"model_family": "qwen_image", "model_flavour": "v2.1"},
            "qwen_image_21_train_network",
            {
                "model_version": "base",
                "pretrained_model_name_or_path": "Qwen/Qwen-Image-2.1",
                "assistant_lora": "SimpleTuner/Qwen-Image-2.1-training-assistant-v3/pytorch_lora_weights.safetensors",
                "timestep_sampling": "shift",
            },
        ),
        (
            {"model_family": "qwen_image", "model_flavour": "edit-v2"},
            "qwen_image_train_network",
            {"model_version": "edit-2509"},
        ),
        (
            {"model_family": "sdxl", "model_type": "full", "snr_gamma": 5},
            "sdxl_train",
            {"full_bf16": True, "train_text_encoder": False, "min_snr_gamma": 5},
        ),
        (
            {"model_family": "anima", "caption_dropout_probability": 0.2},
            "anima_train_network",
            {"caption_dropout_rate": 0.2},
        ),
        ({"base_model_precision": "int2-quanto"}, "flux_train_network", {"base_bits": 4}),
        ({"flow_schedule_auto_shift": True}, "flux_train_network", {"timestep_sampling": "flux_shift"}),
        (
            {"flow_use_uniform_schedule": True, "flow_schedule_shift": 1},
            "flux_train_network",
            {"timestep_sampling": "uniform"},
        ),
    ],
)
def test_models_and_timesteps(keys, script, expected):
    imported = importers.import_content({**LORA, **keys}, CONFIGS)
    assert imported.config.script == script and differing(option_values(imported.config), expected) == {}


@pytest.mark.parametrize(
    ("keys", "base", "more"),
    [
        ({}, "black-forest-labs/FLUX.1-Krea-dev", {"model_type": "krea"}),
        ({"model_flavour": "dev"}, "black-forest-labs/FLUX.1-dev", {"model_type": "flux"}),
        ({"model_family": "flux2"}, "black-forest-labs/FLUX.2-klein-base-9B", {"model_version": "klein-base-9b"}),
        ({"model_family": "qwen_image"}, "Qwen/Qwen-Image-2512", {}),
        (
            {"model_family": "z_image"},
            "Tongyi-MAI/Z-Image-Turbo",
            {"assistant_lora": "ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter_v2.safetensors"},
        ),
        (
            {"model_family": "z_image", "model_flavour": "ostris-de-turbo"},
            "ostris/Z-Image-De-Turbo",
            {"model_version": "base", "assistant_lora": None},
        ),
        ({"model_family": "sd1x"}, "Lykon/dreamshaper-8", {}),
        ({"model_family": "sd1x", "model_flavour": "1.4"}, "CompVis/stable-diffusion-v1-4", {}),
        ({"model_family": "sd1x", "pretrained_model_name_or_path": "a.safetensors"}, "a.safetensors", {}),
    ],
)
def test_a_file_without_a_path_means_the_model_that_simpletuner_takes(keys, base, more):
    imported = importers.import_content({**LORA, **keys}, CONFIGS)
    expected = {"pretrained_model_name_or_path": base, **more}
    assert not differing(option_values(imported.config), expected) and not imported.problems


def test_a_model_that_is_not_known_here_is_not_replaced_by_another():
    for family, flavour in (("flux", "libreflux"), ("sd1x", "realvis"), ("anima", "preview-3")):
        imported = importers.import_content({**LORA, "model_family": family, "model_flavour": flavour}, CONFIGS)
        (problem,) = imported.problems
        assert problem.option == "pretrained_model_name_or_path" and flavour in str(problem)
        assert imported.config.model.pretrained_model_name_or_path is None


@pytest.mark.parametrize(
    ("kind", "predicts_v", "words"),
    [
        ("v_prediction", True, "v_parameterization = true"),
        ("vpred", True, "v_parameterization = true"),
        ("epsilon", False, "v_parameterization = false"),
        ("flow_matching", False, "the nearest is epsilon"),
    ],
)
@pytest.mark.parametrize("family", ["sd1x", "sdxl"])
def test_what_a_unet_predicts_arrives(family, kind, predicts_v, words):
    imported = importers.import_content({**LORA, "model_family": family, "prediction_type": kind}, CONFIGS)
    assert imported.config.model.v_parameterization is predicts_v
    assert words in str(outcome(imported, "prediction_type").text)


def test_a_list_of_data_sets_that_is_there_is_not_called_missing(tmp_path):
    nameless = [DATA[0], {name: value for name, value in DATA[1].items() if name != "id"}]
    for data, words in ((nameless, "have no id, by which others name them (2)"), ("{", "or cannot be read")):
        folder = tmp_path / words[:4].strip()
        folder.mkdir()
        text = data if isinstance(data, str) else json.dumps(data)
        (folder / "x.json").write_text(text, encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(LORA), encoding="utf-8")
        imported = importers.import_file(folder / "config.json", CONFIGS)
        (outcome,) = (key_outcome for key_outcome in imported.outcomes if key_outcome.key == "data_backend_config")
        assert words in str(outcome.text), outcome


@pytest.mark.parametrize(
    "named",
    ["config/cat/data.json", "config\\cat\\data.json", "data.json"],
)
def test_a_list_of_data_sets_beside_the_config_is_found_wherever_simpletuner_is_started(tmp_path, named):
    folder = tmp_path / "config/cat"
    folder.mkdir(parents=True)
    (folder / "data.json").write_text(json.dumps(DATA), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({**LORA, "data_backend_config": named}), encoding="utf-8")
    assert "/cats" in importers.import_file(folder / "config.json", CONFIGS).texts["dataset_config"]


@pytest.mark.parametrize("named", ["a/" * 4000 + "x.json", "a" * 5000 + ".json"], ids=["folders", "letters"])
def test_a_name_that_no_file_can_have_is_not_looked_for(tmp_path, named):
    (tmp_path / "config.json").write_text(json.dumps({**LORA, "data_backend_config": named}), encoding="utf-8")
    asked: list[Path] = []
    imported = importers.import_file(tmp_path / "config.json", CONFIGS, may_read=lambda path: not asked.append(path))
    assert outcome(imported, "data_backend_config").kind == "ignored" and len(asked) < 9


def test_sizes_stay_and_images_are_asked_for_if_no_data_set_is_a_folder_of_this_computer():
    far = [{"id": "far", "type": "huggingface", "resolution": 768, "resolution_type": "pixel_area"}]
    imported = importers.import_content({**LORA, "data_backend_config": far}, CONFIGS)
    assert option_values(imported.config)["resolution"] == "768" and "dataset_config" not in imported.texts
    assert any(
        "to fix: data_backend_config: none of its data sets is a folder" in str(line) for line in imported.lines()
    )


def test_lokr_of_whole_matrices_needs_no_rank():
    settings = {"algo": "lokr", "full_matrix": True, "factor": 16}
    network = importers.import_content(
        {**LORA, "lora_type": "lycoris", "lycoris_config": settings}, CONFIGS
    ).config.network
    assert network.network_dim == 1 and set(network.network_args) == {"algo=lokr", "full_matrix=True", "factor=16"}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"checkpoints_total_limit": 3}, {"save_last_n_steps": 1000, "save_last_n_steps_state": 1000}),
        ({"checkpoints_total_limit": 1}, {"save_last_n_steps": 1}),
        ({"checkpoints_total_limit": 0}, {"save_last_n_steps": None}),
        ({"checkpoints_total_limit": 1e308}, {"save_last_n_steps": (int(1e308) - 1) * 500}),
        ({}, {"save_last_n_steps": 2000}),
        (
            {"checkpoint_epoch_interval": 2, "checkpoints_total_limit": 3},
            {"save_last_n_epochs": 3, "save_every_n_epochs": 2, "save_state": True, "save_last_n_steps": None},
        ),
    ],
)
def test_as_many_checkpoints_are_kept_as_in_simpletuner(keys, expected):
    values = option_values(importers.import_content({**LORA, **keys}, CONFIGS).config)
    assert differing(values, expected) == {}


@pytest.mark.parametrize(
    ("keys", "limit", "said"),
    [
        ({"grad_clip_method": "norm"}, 2.0, ""),
        ({"max_grad_norm": 0}, 0.0, ""),
        ({"max_grad_norm": 0.01}, 1.0, "at 0.01; here max_grad_norm limits their norm"),
        ({"grad_clip_method": "value"}, 1.0, "at 2; here max_grad_norm limits their norm"),
        ({}, 1.0, "SimpleTuner: it cuts each value of the gradients at 2"),
    ],
)
def test_how_gradients_are_limited_arrives_or_is_said(keys, limit, said):
    imported = importers.import_content({**LORA, **keys}, CONFIGS)
    lines = "\n".join(map(str, imported.lines()))
    assert option_values(imported.config)["max_grad_norm"] == limit and said in lines
    assert bool(said) == ("it cuts each value" in lines)


def test_a_key_of_the_same_name_is_kept_and_not_renamed():
    assert outcome(importers.import_content({**LORA, "loss_type": "huber"}, CONFIGS), "loss_type").kind == "kept"


def test_a_file_of_its_page_is_read(tmp_path):
    inner = {"--model_family": "flux", "--model_type": "lora", "--learning_rate": 3e-4, "--max_train_steps": 7}
    path = tmp_path / "default.json"
    path.write_text(json.dumps({"_metadata": {"name": "default"}, "config": inner}), encoding="utf-8")
    imported = importers.import_file(path, CONFIGS)
    assert imported.trainer == "SimpleTuner" and option_values(imported.config)["learning_rate"] == 3e-4


@pytest.mark.parametrize(
    ("content", "key"),
    [(DATA, "data_backend_config"), ({"algo": "lokr", "linear_dim": 8}, "lycoris_config")],
    ids=["data sets", "LyCORIS"],
)
def test_a_part_of_a_config_alone_says_which_file_to_load(tmp_path, content, key):
    path = tmp_path / "part.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"the config that names it as {key}"):
        importers.import_file(path, CONFIGS)
