"""The mistakes that people report most (data sets, settings, NaN, stale caches, the wrong model): a sentence for each.

All are found by looking at names, headers and pictures: no model is loaded. What can only be seen later (NaN in latents
or losses, caches that are out of date) is tested in test_nan.py and tests/data/test_caches.py.
"""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from library.config.building import build_config
from library.config.formats import read_toml
from library.config.problems import ConfigError
from library.families import config_class
from tests.training import pictures, problems_and_remarks

FLUX, SDXL = "flux_train_network", "sdxl_train_network"


@pytest.fixture(scope="module")
def wrong(demo, tmp_path_factory):
    """Folders and files in which something is wrong; all else is in order."""
    folder = tmp_path_factory.mktemp("wrong")
    for name in ("plain", "torn", "fake", "txt", "few", "mute", "twins", "deep", "zero"):
        pictures(folder / name, ((64, 64),) * 3)
    (folder / "empty").mkdir()
    (folder / "plain/2_zorb toy").rename(folder / "plain/zorb toy")
    shutil.copytree(folder / "txt/2_zorb toy", folder / "direct")
    first = {
        name: folder / name / "2_zorb toy/0.png" for name in ("torn", "fake", "mute", "twins", "few", "deep", "zero")
    }
    first["torn"].write_bytes(first["torn"].read_bytes()[:200])
    first["fake"].write_bytes(b"<html>not found</html>")
    first["mute"].with_suffix(".txt").unlink()
    first["few"].with_suffix(".txt").write_text("")
    shutil.copy(first["twins"], first["twins"].with_suffix(".bmp"))
    (first["deep"].parent / "more").mkdir()
    shutil.copy(first["deep"], first["deep"].parent / "more")
    first["zero"].parent.rename(folder / "zero/0_zorb toy")
    flux = "lora_unet_double_blocks_0_img_attn_qkv."
    save_file(
        {flux + "lora_down.weight": torch.ones(4, 8), flux + "alpha": torch.tensor(4.0)}, folder / "lora.safetensors"
    )
    sd15 = {
        "model.diffusion_model.input_blocks.0.0.weight": torch.ones(4, 4, 3, 3),
        "cond_stage_model.transformer.text_model.embeddings.position_ids": torch.ones(1, 77),
    }
    save_file(sd15, folder / "sd15.safetensors")
    (folder / "musubi.toml").write_text('[[datasets]]\nimage_directory = "x"\nresolution = 64\n')
    (folder / "set.toml").write_text(
        f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{folder / 'txt/2_zorb toy'}'\nrepeats = 3\n"
    )
    return folder


def said(demo, wrong, tmp_path, script, values):
    """All that is said about a config before a model is loaded."""
    places = {
        "WRONG": wrong,
        "SDXL": demo.models["sdxl"]["sdxl"],
        **{k.upper(): v for k, v in demo.models["flux"].items()},
    }
    options = {}
    for name, value in values.items():
        for word, place in places.items():
            value = value.replace(word, str(place)) if isinstance(value, str) else value
        options[name] = value
    quick = {
        DATA: str(wrong / "txt"),
        "caption_extension": ".txt",
        "compile": False,
        "compile_blocks": None,
        "resolution": "64",
        "max_train_steps": 4,
        "output_dir": str(tmp_path / "out"),
        "logging_dir": None,
    }
    notes = []
    try:
        config = build_config(
            config_class(script), {**read_toml(demo.configs[script]), **quick, **options}, "old.toml", notes
        )
    except ConfigError as e:
        return str(e).splitlines(), []
    problems, remarks = problems_and_remarks(config)
    return problems, [*notes, *remarks]


DATA, MODEL = "train_data_dir", "pretrained_model_name_or_path"
LEAF = "2_zorb toy"
# What people did -> the script, what is set, and words of the one sentence that stops the training.
REFUSED = {
    # Data sets and captions
    "the folder of images itself": (
        FLUX,
        {DATA: f"WRONG/txt/{LEAF}"},
        ["holds the images themselves", "folder above it"],
    ),
    "folders without a number": (SDXL, {DATA: "WRONG/plain"}, ["<repeats>_<words>", "'1_zorb toy'"]),
    "folders with 0 repeats": (SDXL, {DATA: "WRONG/zero"}, ["0_zorb toy has 0 repeats"]),
    "an empty folder": (FLUX, {DATA: "WRONG/empty"}, ["is empty", "10_words"]),
    "a folder that is not there": (FLUX, {DATA: "WRONG/none"}, ["train_data_dir", "does not exist"]),
    "the leaf of regularisation": (FLUX, {"reg_data_dir": f"WRONG/txt/{LEAF}"}, ["reg_data_dir", "folder above it"]),
    "an image that is cut off": (SDXL, {DATA: "WRONG/torn"}, ["0.png", "truncated"]),
    "a web page called .png": (SDXL, {DATA: "WRONG/fake"}, ["0.png", "cannot be read"]),
    "sides that no bucket has": (FLUX, {"enable_bucket": False, "resolution": "100"}, ["100", "multiple of 16"]),
    # Settings
    "a name that would climb": (FLUX, {"output_name": ".."}, ["output_name", "plain name"]),
    "a name that Windows refuses": (FLUX, {"output_name": "cat "}, ["output_name", "every system"]),
    "a name without room for a step": (FLUX, {"output_name": "x" * 230}, ["output_name", "at most 200 bytes"]),
    "nothing that learns": (FLUX, {"learning_rate": "0"}, ["learning_rate is 0", "1e-4 is usual"]),
    "an optimizer that is a function": (
        FLUX,
        {"optimizer_type": "os.system"},
        ["os.system: os is part of Python itself", "AdamW is an optimizer"],
    ),
    "a data set that is not there": (FLUX, {"dataset_config": "WRONG/none.toml"}, ["dataset_config", "does not exist"]),
    "a misspelt option": (FLUX, {"lerning_rate": 1}, ["lerning_rate", "did you mean learning_rate"]),
    "a misspelt network argument": (FLUX, {"network_args": ["loraplus_lr_ration=4"]}, ["mean loraplus_lr_ratio"]),
    "a misspelt key of a data set": (FLUX, {"dataset_config": "WRONG/set.toml"}, ["repeats", "mean num_repeats"]),
    "a data set for musubi-tuner": (FLUX, {"dataset_config": "WRONG/musubi.toml"}, ["musubi-tuner", "kohya import"]),
    "a LoRA's config for a fine-tune": ("sdxl_train", {"network_dim": 8}, ["network_dim", "sdxl_train_network"]),
    "a config of the other family": (SDXL, {"guidance_scale": 1.0}, ["guidance_scale", "flux_train_network"]),
    "words for a number": (FLUX, {"learning_rate": "fast"}, ["learning_rate must be a number", "'fast'"]),
    "warm-up for a constant rate": (FLUX, {"lr_scheduler": "constant", "lr_warmup_steps": 9}, ["constant_with_warmup"]),
    "Adafactor's schedule alone": (FLUX, {"lr_scheduler": "adafactor"}, ["goes with optimizer_type Adafactor"]),
    "more blocks than FLUX.1 has": (
        FLUX,
        {"compile": True, "compile_blocks": "double:all,single:0-99"},
        ["this model has", "single:99"],
    ),
    "more blocks than SDXL has": (SDXL, {"compile": True, "compile_blocks": "resnet:99"}, ["the last is resnet:"]),
    # Caches: two files that would overwrite each other's
    "photo.png beside photo.bmp": (
        FLUX,
        {DATA: "WRONG/twins", "cache_latents_to_disk": True},
        ["share one cache file"],
    ),
    # The wrong model
    "SD 1.5 for SDXL": (SDXL, {MODEL: "WRONG/sd15.safetensors"}, ["SD 1.5", "SDXL"]),
    "SDXL for FLUX.1": (FLUX, {MODEL: "SDXL"}, ["SDXL checkpoint", "sdxl_train_network"]),
    "FLUX.1 for SDXL": (SDXL, {MODEL: "FLUX"}, ["FLUX.1 transformer", "flux_train_network"]),
    "a LoRA for a model": (SDXL, {MODEL: "WRONG/lora.safetensors"}, ["LoRA file", "network_weights"]),
    "T5 for CLIP-L": (FLUX, {"clip_l": "T5XXL"}, ["clip_l", "T5 text encoder"]),
    "a model for the autoencoder": (FLUX, {"ae": "FLUX"}, ["ae", "FLUX.1 transformer"]),
    "the VAE of FLUX.1 for SDXL": (SDXL, {"vae": "AE"}, ["--vae", "16 channels"]),
    "networks.lora for FLUX.1": (FLUX, {"network_module": "networks.lora"}, ["networks.lora_flux"]),
    "a LoRA of FLUX.1 for SDXL": (SDXL, {"network_weights": "WRONG/lora.safetensors"}, ["made for FLUX.1"]),
    "a text file for a LoRA": (
        SDXL,
        {"network_weights": f"WRONG/txt/{LEAF}/0.txt"},
        ["network_weights: ", "not a safetensors file"],
    ),
    "the switch for SD 2": (SDXL, {"v2": True}, ["v2 must be off"]),
}
# The same for what is said and does not stop the training.
TOLD = {
    "captions with another ending": (
        FLUX,
        {"caption_extension": ".caption"},
        [".txt files not used", "caption_ext"],
    ),
    "images without captions": (FLUX, {DATA: "WRONG/mute"}, ["1 image without a .txt file, trained with", "0.png"]),
    "an empty caption": (FLUX, {DATA: "WRONG/few"}, ["without words", "0.txt"]),
    "images directly in the folder": (
        FLUX,
        {DATA: "WRONG/direct", "save_every_n_epochs": 1},
        ["images directly in", "set dataset_repeats"],
    ),
    "images in folders of folders": (FLUX, {DATA: "WRONG/deep"}, ["more", "sub-folders are not read"]),
    "batches larger than buckets": (FLUX, {"train_batch_size": 8}, ["fewer images than the batch size"]),
    "a trigger that no caption has": (FLUX, {"metadata_trigger_phrase": "xyzzy"}, ["'xyzzy'", "none of the captions"]),
    "a key of the old page": (FLUX, {"lowvram": True}, ["lowvram is ignored"]),
    "more steps to compare with than there are": (
        FLUX,
        {"compile": True, "compile_backend": "eager", "compile_compare_steps": 4},
        ["compile_compare_steps = 4: nothing is compiled", "the training ends with step 4"],
    ),
    "an option of SDXL": (FLUX, {"noise_offset": 0.1}, ["noise_offset has no effect"]),
    # NaN
    "Prodigy's rate for AdamW": (FLUX, {"learning_rate": 1.0}, ["learning_rate 1.0", "NaN"]),
    "the VAE of SDXL in fp16": (SDXL, {"mixed_precision": "fp16"}, ["overflows in fp16", "no_half_vae"]),
    # Caches
    "trusting what may be old": (FLUX, {"skip_cache_check": True, "cache_latents_to_disk": True}, ["skip_cache_check"]),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_common_mistake_is_refused_in_one_sentence(demo, wrong, tmp_path, mistake):
    script, values, words = REFUSED[mistake]
    problems, _ = said(demo, wrong, tmp_path, script, values)
    assert len(problems) == 1, problems
    assert all(word in str(problems[0]) for word in words), problems[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mistake", TOLD)
def test_a_doubtful_setting_is_reported_in_one_sentence(demo, wrong, tmp_path, mistake, monkeypatch):
    script, values, words = TOLD[mistake]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # what only a GPU can do is not the question here
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    problems, notes = said(demo, wrong, tmp_path, script, values)
    assert not problems
    assert sum(all(word in str(note) for word in words) for note in notes) == 1, notes
    assert len(notes) == 1, notes


def test_a_good_config_gets_no_remark(demo, wrong, tmp_path):
    """Neither are captions with an ending without its dot, nor what other systems leave in folders."""
    for script in (FLUX, SDXL):
        assert said(demo, wrong, tmp_path, script, {"caption_extension": "txt"}) == ([], [])
    folder = wrong / "txt" / LEAF
    (folder / "._0.png").write_bytes(b"x")
    (wrong / "txt" / "__MACOSX").mkdir()
    assert said(demo, wrong, tmp_path, FLUX, {}) == ([], [])
