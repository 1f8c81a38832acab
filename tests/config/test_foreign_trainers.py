"""Files of musubi-tuner, OneTrainer and ai-toolkit: what carries over, and that every key has an outcome."""

import copy
import json
import tomllib

import pytest
import yaml

from library import importers
from library.cli import main
from library.config import dataset
from library.config.building import build_config
from library.config.formats import read_toml
from library.config.problems import ConfigError
from library.families import RUNS, config_class

CONFIGS = {script: config_class(script) for script in RUNS}

MUSUBI = """
dit = "flux.safetensors"
vae = "ae.safetensors"
text_encoder1 = "t5.safetensors"
text_encoder2 = "clip.safetensors"
dataset_config = "data.toml"
network_module = "networks.lora_flux"
network_dim = 32
learning_rate = 1e-4
optimizer_type = "adamw8bit"
timestep_sampling = "flux_shift"
mixed_precision = "bf16"
sdpa = true
fp8_base = true
fp8_scaled = true
gradient_checkpointing = true
max_train_epochs = 16
"""
MUSUBI_DATA = """
[general]
resolution = [960, 544]
caption_extension = ".txt"
enable_bucket = true
num_repeats = 2

[[datasets]]
image_directory = 'C:\\pictures'
cache_directory = "cache"

[[datasets]]
image_directory = "more"
num_repeats = 5
resolution = [512, 512]

[[datasets]]
video_directory = "v"
target_frames = [1, 25]
"""
AITOOLKIT = """
job: extension
config:
  name: cat
  process:
    - type: sd_trainer
      training_folder: out
      device: cuda:0
      trigger_word: zwx
      network: {type: lora, linear: 16, linear_alpha: 8}
      save: {dtype: float16, save_every: 250, max_step_saves_to_keep: 4, push_to_hub: false}
      datasets:
        - folder_path: /images
          caption_ext: txt
          caption_dropout_rate: 0.05
          shuffle_tokens: false
          cache_latents_to_disk: true
          resolution: [512, 768]
      train:
        batch_size: 2
        steps: 2000
        train_text_encoder: false
        gradient_checkpointing: true
        optimizer: adamw8bit
        optimizer_params: {weight_decay: 0.01}
        lr: 1e-4
        skip_first_sample: true
        ema_config: {use_ema: true, ema_decay: 0.99}
        dtype: bf16
      model: {name_or_path: black-forest-labs/FLUX.1-dev, is_flux: true, quantize: true}
      sample:
        sample_every: 250
        width: 768
        prompts: ["[trigger] a cat", "a dog"]
        seed: 42
        guidance_scale: 4
meta: {name: "[name]", version: '1.0'}
"""
ONETRAINER = {
    "training_method": "LORA",
    "model_type": "STABLE_DIFFUSION_XL_10_BASE",
    "base_model_name": "sdxl.safetensors",
    "output_model_destination": "models/cat.safetensors",
    "output_dtype": "FLOAT_16",
    "train_dtype": "BFLOAT_16",
    "learning_rate": 3e-4,
    "learning_rate_scheduler": "CONSTANT",
    "learning_rate_warmup_steps": 200,
    "epochs": 20,
    "batch_size": 4,
    "ema": "GPU",
    "ema_decay": 0.995,
    "gradient_checkpointing": "CPU_OFFLOADED",
    "resolution": "768,1024",
    "optimizer": {"optimizer": "ADAMW_8BIT", "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.99, "d0": None},
    "lora_rank": 16,
    "lora_alpha": 1.0,
    "offset_noise_weight": 0.05,
    "min_noising_strength": 0.0,
    "loss_weight_fn": "MIN_SNR_GAMMA",
    "loss_weight_strength": 5.0,
    "concept_file_name": "concepts.json",
    "text_encoder": {"train": False},
    "text_encoder_2": {"train": False},
    "unet": {"train": True, "learning_rate": 1e-4},
    "save_every": 2,
    "save_every_unit": "EPOCH",
    "workspace_dir": "w",
    "aspect_ratio_bucketing": True,
}


def fates(imported):
    return {outcome.key: outcome for outcome in imported.outcomes}


@pytest.fixture
def musubi(tmp_path):
    (tmp_path / "data.toml").write_text(MUSUBI_DATA, encoding="utf-8")
    (tmp_path / "m.toml").write_text(MUSUBI, encoding="utf-8")
    return tmp_path / "m.toml"


def written(path, out, code=0):
    """What `kohya import` makes of a file: the config, and its datasets."""
    assert main.main(["import", str(path), "-o", str(out)]) == code
    table = read_toml(out)
    script = next(s for s in sorted(RUNS, key=len, reverse=True) if f"/{s}.py" in out.read_text(encoding="utf-8"))
    config = build_config(CONFIGS[script], table, notes=[])
    return config, dataset.load_datasets(config)


def test_musubi_and_its_dataset_file(musubi, tmp_path):
    config, datasets = written(musubi, tmp_path / "run.toml")
    assert config.model.pretrained_model_name_or_path == "flux.safetensors" and config.model.ae == "ae.safetensors"
    assert (config.model.t5xxl, config.model.clip_l) == ("t5.safetensors", "clip.safetensors")
    assert config.noise.timestep_sampling == "flux_shift" and config.noise.model_prediction_type == "raw"
    assert config.model.guidance_scale == 1 and config.cache.text and config.network.network_train_unet_only
    assert [d.resolution for d in datasets] == [(960, 544), (512, 512)]
    assert [(s.image_dir, s.num_repeats) for d in datasets for s in d.subsets] == [("C:\\pictures", 2), ("more", 5)]
    imported = fates(importers.import_file(musubi, CONFIGS))
    assert imported["fp8_scaled"].kind == "ignored" and imported["dit"].text == "pretrained_model_name_or_path"


def test_musubi_for_other_models_is_refused():
    with pytest.raises(ConfigError, match="is for Wan"):
        importers.import_content({"dit": "a", "network_module": "networks.lora_wan"}, CONFIGS)
    with pytest.raises(ConfigError, match="for Wan,"):  # the module is often left to the command line
        importers.import_content({"model": {"dit": "a"}, "task": "t2v-14B"}, CONFIGS)


def test_a_dataset_file_alone_becomes_a_dataset_file(musubi, tmp_path, capsys):
    data, out = musubi.with_name("data.toml"), tmp_path / "ours.toml"
    assert main.main(["import", str(data), "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert "cache_directory is ignored" in said and "dataset 3 is left out" in said and "target_frames" not in said
    datasets = dataset.load_datasets(build_config(CONFIGS["flux_train_network"], {"dataset_config": str(out)}))
    assert [s.image_dir for d in datasets for s in d.subsets] == ["C:\\pictures", "more"]
    assert main.main(["import", str(data), "-o", str(out)]) == 1 and "exists already" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="dataset_config"):
        importers.import_file(data, CONFIGS)


def test_aitoolkit(tmp_path):
    (tmp_path / "a.yaml").write_text(AITOOLKIT, encoding="utf-8")
    config, datasets = written(tmp_path / "a.yaml", tmp_path / "run.toml")
    assert config.script == "flux_train_network" and config.save.output_dir == "out/cat"
    assert (config.network.network_dim, config.network.network_alpha) == (16, 8)
    assert config.save.save_precision == "fp16" and config.save.save_last_n_steps == 750
    assert config.optim.optimizer_type == "AdamW8bit" and config.optim.optimizer_args == (
        "eps=1e-06",
        "weight_decay=0.01",
    )
    assert config.optim.learning_rate == 1e-4 and config.optim.ema_decay == 0.99 and config.precision.fp8_base
    assert config.noise.timestep_sampling == "sigmoid" and config.network.network_train_unet_only
    assert config.cache.cache_latents_to_disk and not config.sample.sample_at_first
    assert [d.resolution for d in datasets] == [(768, 768), (512, 512)] and datasets[0].batch_size == 2
    assert datasets[0].subsets[0].caption_prefix == "zwx, " and datasets[0].subsets[0].caption_dropout_rate == 0.05
    prompts = (tmp_path / "run.prompts.txt").read_text(encoding="utf-8").splitlines()
    assert prompts == ["zwx a cat --w 768 --h 512 --d 42 --s 20 --g 4", "a dog --w 768 --h 512 --d 42 --s 20 --g 4"]


def test_onetrainer(tmp_path):
    (tmp_path / "o.json").write_text(json.dumps(ONETRAINER), encoding="utf-8")
    concepts = [
        {"path": "/cats", "balancing": 3.0, "text": {"enable_tag_shuffling": True, "keep_tags_count": 1}},
        {"path": "/off", "enabled": False},
    ]
    (tmp_path / "concepts.json").write_text(json.dumps(concepts), encoding="utf-8")
    config, datasets = written(tmp_path / "o.json", tmp_path / "run.toml")
    assert config.script == "sdxl_train_network" and config.save.output_name == "cat"
    assert config.optim.optimizer_type == "AdamW8bit" and "betas=0.9,0.99" in config.optim.optimizer_args
    assert config.optim.lr_scheduler == "constant_with_warmup" and config.optim.lr_warmup_steps == 200
    assert config.optim.unet_lr == 1e-4 and config.network.network_train_unet_only and config.loss.min_snr_gamma == 5
    assert config.optim.ema_decay == 0.995 and config.memory.cpu_offload_checkpointing
    assert config.save.save_every_n_epochs == 2 and config.noise.noise_offset == 0.05
    assert [d.resolution for d in datasets] == [(1024, 1024), (768, 768)]
    assert datasets[0].subsets[0].num_repeats == 3 and datasets[0].subsets[0].keep_tokens == 1
    imported = importers.import_file(tmp_path / "o.json", CONFIGS)
    assert "workspace_dir" in fates(imported) and fates(imported)["optimizer.d0"].kind == "empty"


def test_onetrainer_flux_and_other_models():
    settings = {"training_method": "LORA", "model_type": "FLUX_DEV_1", "timestep_distribution": "LOGIT_NORMAL"}
    settings |= {part: {"train": False} for part in ("text_encoder", "text_encoder_2")}
    config = importers.import_content({**settings, "dynamic_timestep_shifting": True}, CONFIGS).config
    assert config.noise.timestep_sampling == "flux_shift" and config.network.network_train_unet_only
    assert importers.import_content(settings, CONFIGS).config.noise.timestep_sampling == "sigmoid"
    with pytest.raises(ConfigError, match="STABLE_DIFFUSION_3"):
        importers.import_content({"training_method": "LORA", "model_type": "STABLE_DIFFUSION_3"}, CONFIGS)
    older = {"training_method": "FINE_TUNE", "model_type": "STABLE_DIFFUSION_15", "text_encoder": {"train": True}}
    older |= {"learning_rate": 1e-5, "unet": {"train": True, "learning_rate": 1e-5}}
    config = importers.import_content(older, CONFIGS).config
    assert config.script == "fine_tune" and config.trains_whole_encoders and config.optim.learning_rate_te == 1e-5


WEIRD = [None, "", "nan", -1, 0, 1e30, "x", True, [], [1, "a"], [{"a": 1}], {}, {"a": [1]}]


@pytest.mark.parametrize("text", ["musubi", "aitoolkit", "onetrainer"])
def test_no_value_whatever_breaks_the_import(text):
    whole = {"musubi": tomllib.loads(MUSUBI), "aitoolkit": yaml.safe_load(AITOOLKIT), "onetrainer": ONETRAINER}[text]
    data = tomllib.loads(MUSUBI_DATA)
    more = {"musubi": {"dataset_config": data}, "onetrainer": {"concepts": [{"path": "/a"}]}}.get(text, {})
    whole = {**whole, **more}  # a new one, as other files of tests use ONETRAINER, too
    for at in places(whole):
        for value in WEIRD:
            try:
                imported = importers.import_content(changed_at(whole, at, value), CONFIGS)
            except ConfigError:
                continue
            assert imported.report() and imported.lines() is not None


def places(settings, before=()):
    for key, value in settings.items() if isinstance(settings, dict) else enumerate(settings):
        yield (*before, key)
        if isinstance(value, dict | list):
            yield from places(value, (*before, key))


def changed_at(settings, at, value):
    copied = copy.deepcopy(settings)
    inner = copied
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return copied


def test_every_key_of_every_trainer_has_a_fate(musubi, tmp_path):
    (tmp_path / "a.yaml").write_text(AITOOLKIT, encoding="utf-8")
    (tmp_path / "o.json").write_text(json.dumps({**ONETRAINER, "future": {"a": 1}}), encoding="utf-8")
    for name, key in (("m.toml", "sdpa"), ("a.yaml", "meta.version"), ("o.json", "future.a")):
        imported = importers.import_file(tmp_path / name, CONFIGS)
        assert fates(imported)[key].kind == "ignored" and fates(imported)[key].text
        assert not imported.problems, imported.problems
