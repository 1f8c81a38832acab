import hashlib
import json
import os
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from library import families
from library.config.building import build_config
from library.config.dataset import DatasetConfig, SubsetConfig
from library.data.buckets import BucketFit
from library.data.images import Image, ImageSet
from library.families.flux.options import FluxLora, FluxTrain
from library.families.sdxl.options import SdxlLora, SdxlTrain
from library.outputs import metadata
from library.outputs.dataset_stats import dataset_stats, tag_frequency
from library.outputs.metadata import MetadataBuilder, long_hash, modelspec, short_hash

KEYS = """session_id training_started_at output_name learning_rate text_encoder_lr unet_lr num_train_images
num_validation_images num_reg_images num_batches_per_epoch num_epochs gradient_checkpointing gradient_accumulation_steps
max_train_steps lr_warmup_steps lr_scheduler network_module network_dim network_alpha network_dropout mixed_precision
full_fp16 v2 base_model_version clip_skip max_token_length cache_latents seed lowram noise_offset
multires_noise_iterations multires_noise_discount adaptive_noise_scale zero_terminal_snr training_comment
sd_scripts_commit_hash optimizer max_grad_norm caption_dropout_rate caption_dropout_every_n_epochs
caption_tag_dropout_rate face_crop_aug_range prior_loss_weight min_snr_gamma scale_weight_norms ip_noise_gamma
debiased_estimation noise_offset_random_strength ip_noise_gamma_random_strength loss_type huber_schedule huber_scale
huber_c fp8_base fp8_base_unet validation_seed validation_split max_validation_steps validate_every_n_epochs
validate_every_n_steps resize_interpolation training_finished_at steps epoch"""
ALONE = """batch_size_per_device total_batch_size resolution color_aug flip_aug random_crop shuffle_caption
enable_bucket bucket_no_upscale min_bucket_reso max_bucket_reso keep_tokens dataset_dirs reg_dataset_dirs tag_frequency
bucket_info"""
FLUX = """model_type apply_t5_attn_mask weighting_scheme logit_mean logit_std mode_scale guidance_scale
timestep_sampling sigmoid_scale model_prediction_type discrete_flow_shift"""


def images():
    cats = SubsetConfig(image_dir="/home/someone/data/2_cats", num_repeats=2, class_tokens="cats")
    people = SubsetConfig(image_dir="/home/someone/reg/1_people", num_repeats=1, is_reg=True)
    dataset = DatasetConfig(resolution=(1024, 1024), enable_bucket=True, batch_size=2, subsets=(cats, people))
    square, tall = BucketFit((1024, 1024), (1024, 1024)), BucketFit((832, 1216), (832, 1248))
    items = [
        Image("/home/someone/data/2_cats/a.png", (512, 512), "Cat, sitting,, cat", 2, cats, 0, square),
        Image("/home/someone/data/2_cats/b.png", (600, 900), "cat , Asleep", 2, cats, 0, tall),
        Image("/home/someone/reg/1_people/c.png", (512, 512), "", 3, people, 0, square),
    ]
    return ImageSet(items, (dataset,))


def made(config, figured=None, architecture="flux-1-dev"):
    version = families.facts_of(config.family).base_model_version
    family = SimpleNamespace(architecture=architecture, base_model_version=version)
    figured = dataset_stats(images(), config, 4, 3, 2) if figured is None else figured
    figured["max_train_steps"] = 90
    return MetadataBuilder(config, family, figured, "torch.optim.adamw.AdamW(weight_decay=0.1)").of_file(2, 30, 7)


def config(cls=FluxLora, **values):
    return build_config(cls, {"output_name": "m", **values}, notes=[])


def test_every_key_is_there_and_every_value_is_text():
    actual = made(config())
    assert {k.removeprefix("ss_") for k in actual if k.startswith("ss_")} == set(f"{KEYS} {ALONE} {FLUX}".split())
    assert all(type(v) is str for v in actual.values())
    assert (
        actual["ss_unet_lr"] == "None"
        and actual["ss_cache_latents"] == "False"
        and actual["ss_text_encoder_lr"] == "None"
    )
    assert (actual["ss_steps"], actual["ss_epoch"], actual["ss_base_model_version"]) == ("30", "2", "flux1")
    assert (
        actual["ss_optimizer"].endswith("AdamW(weight_decay=0.1)")
        and actual["ss_network_module"] == "networks.lora_flux"
    )
    sdxl = made(config(SdxlLora), architecture="stable-diffusion-xl-v1-base")
    assert {k.removeprefix("ss_") for k in sdxl if k.startswith("ss_")} == set(f"{KEYS} {ALONE}".split())
    assert sdxl["ss_base_model_version"] == "sdxl_base_v1-0"


def test_figures_of_the_data():
    actual = made(config())
    assert (actual["ss_num_train_images"], actual["ss_num_reg_images"], actual["ss_num_epochs"]) == ("4", "3", "3")
    assert json.loads(actual["ss_tag_frequency"]) == {"2_cats": {"cat": 3, "sitting": 1, "asleep": 1}}
    assert json.loads(actual["ss_dataset_dirs"]) == {"2_cats": {"n_repeats": 2, "img_count": 2}}
    assert json.loads(actual["ss_reg_dataset_dirs"]) == {"1_people": {"n_repeats": 1, "img_count": 1}}
    buckets = json.loads(actual["ss_bucket_info"])
    assert buckets["buckets"]["0"] == {"resolution": [832, 1216], "count": 2}
    assert buckets["mean_img_ar_error"] == pytest.approx(abs(832 / 1216 - 2 / 3) / 3)
    assert actual["ss_resolution"] == "(1024, 1024)"


def test_figures_of_a_dataset_config(tmp_path):
    (tmp_path / "d.toml").touch()
    chosen = config(dataset_config=str(tmp_path / "d.toml"))
    actual = made(chosen)
    (dataset,) = json.loads(actual["ss_datasets"])
    assert dataset["is_dreambooth"] and dataset["num_reg_images"] == 3 and dataset["batch_size_per_device"] == 2
    assert [s["image_dir"] for s in dataset["subsets"]] == ["2_cats", "1_people"]
    assert json.loads(actual["ss_dataset_dirs"]) == {"2_cats": {"n_repeats": 2, "img_count": 2}}
    assert "ss_bucket_info" not in actual


def test_folders_of_several_data_sets_are_named_as_in_sd_scripts(tmp_path):
    """A folder at two sizes is two folders, its tags count once; one of metadata has the file's name."""
    (tmp_path / "d.toml").touch()
    found = images()
    (first,) = found.datasets
    small = replace(first, resolution=(500, 500), enable_bucket=False)
    listed = replace(first.subsets[0], metadata_file="/home/someone/meta.json")
    found.items += [replace(image, dataset=1) for image in found.items if not image.is_reg]
    found.items.append(replace(found.items[0], dataset=2, subset=listed))
    found.datasets = (replace(first, min_bucket_reso=100, max_bucket_reso=1000), small, small)
    figured = dataset_stats(found, config(dataset_config=str(tmp_path / "d.toml")), 1, 1, 1)
    twice = {"n_repeats": 2, "img_count": 2}
    one = {"n_repeats": 2, "img_count": 1}
    assert figured["dataset_dirs"] == {"2_cats": twice, "2_cats (2)": twice, "meta.json": one}
    assert figured["tag_frequency"]["2_cats"]["cat"] == 3 and figured["tag_frequency"]["meta.json"]["cat"] == 2
    sides = [(facts["min_bucket_reso"], facts["max_bucket_reso"]) for facts in figured["datasets"]]
    assert sides == [(64, 1024), (None, None), (None, None)]
    assert figured["datasets"][2]["subsets"][0]["image_dir"] == "2_cats"


def test_tags_of_captions_that_are_not_there():
    item = replace(images().items[0], caption="")
    assert tag_frequency([item]) == {}


def test_no_local_path_gets_into_a_file(tmp_path):
    base = tmp_path / "secret" / "base.safetensors"
    base.parent.mkdir()
    base.write_bytes(random.Random(0).randbytes(1 << 21))  # no two places have the same bytes
    chosen = config(
        pretrained_model_name_or_path=str(base),
        vae=str(base),
        output_dir=str(tmp_path),
        network_args=["train_blocks=single", f"preset={base}"],
    )
    actual = made(chosen)
    assert not [k for k, v in actual.items() if str(tmp_path) in v or "someone" in v or "secret" in v]
    assert actual["ss_sd_model_name"] == actual["ss_vae_name"] == "base.safetensors"
    assert actual["ss_new_sd_model_hash"] == hashlib.sha256(base.read_bytes()).hexdigest()
    assert actual["ss_sd_model_hash"] == hashlib.sha256(base.read_bytes()[0x100000:0x110000]).hexdigest()[:8]
    args = json.loads(actual["ss_network_args"])
    assert args == {"train_blocks": "single", "preset": "base.safetensors", "dropout": None}


def test_hashes_of_what_is_no_file(tmp_path):
    assert short_hash(tmp_path) == long_hash(tmp_path) == "IsADirectory"
    assert short_hash(tmp_path / "no") == long_hash(tmp_path / "no") == "NOFILE"
    actual = made(config(pretrained_model_name_or_path="someone/a-model"))
    assert actual["ss_sd_model_name"] == "someone/a-model" and "ss_sd_model_hash" not in actual


def test_no_metadata_keeps_the_least():
    actual = made(config(no_metadata=True, network_dim=8, network_args=["train_blocks=single"]))
    keys = {"v2", "base_model_version", "network_module", "network_dim", "network_alpha", "network_args"}
    assert {k.removeprefix("ss_") for k in actual if k.startswith("ss_")} == keys
    assert actual["ss_network_dim"] == "8" and actual["modelspec.architecture"] == "flux-1-dev/lora"


def test_modelspec_of_adapters_and_models(tmp_path):
    (tmp_path / "t.png").write_bytes(b"png")
    options = {"metadata_author": "me", "metadata_trigger_phrase": "xyz", "metadata_thumbnail": str(tmp_path / "t.png")}
    actual = modelspec(
        config(SdxlLora, resolution="768,1024", v_parameterization=True, **options), "stable-diffusion-xl-v1-base"
    )
    assert actual["modelspec.architecture"] == "stable-diffusion-xl-v1-base/lora"
    assert actual["modelspec.implementation"] == "https://github.com/Stability-AI/generative-models"
    assert (actual["modelspec.title"], actual["modelspec.resolution"]) == ("m", "768x1024")
    assert (actual["modelspec.author"], actual["modelspec.trigger_phrase"]) == ("me", "xyz")
    assert actual["modelspec.thumbnail"] == "data:image/png;base64,cG5n" and actual["modelspec.prediction_type"] == "v"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", actual["modelspec.date"])
    assert "modelspec.license" not in actual and actual["modelspec.sai_model_spec"] == "1.0.1"
    whole = made(config(FluxTrain, output_name=None), architecture="flux-1-schnell")
    assert whole["modelspec.architecture"] == "flux-1-schnell" and whole["modelspec.title"].startswith("Checkpoint@")
    assert whole["modelspec.resolution"] == "1024x1024" and "modelspec.prediction_type" not in whole
    assert all(key.startswith("modelspec.") for key in whole)
    ranged = modelspec(config(SdxlTrain, min_timestep=200, metadata_title="t"), "x")
    assert ranged["modelspec.timestep_range"] == "200,1000" and ranged["modelspec.prediction_type"] == "epsilon"


@pytest.mark.parametrize("kind", ["missing", "a folder", "too large", "a pipe"])
def test_a_thumbnail_that_is_no_file_or_too_large_is_left_out_with_a_remark(tmp_path, monkeypatch, kind):
    path = tmp_path / "t.png"
    monkeypatch.setattr(metadata, "MAX_THUMBNAIL_BYTES", 2)
    if kind == "a folder":
        path.mkdir()
    elif kind == "too large":
        path.write_bytes(b"png")
    elif kind == "a pipe":
        if not hasattr(os, "mkfifo"):
            pytest.skip("no pipes with names here")
        os.mkfifo(path)
    [remark] = metadata.thumbnail_notes(str(path))
    assert str(remark).startswith(f"metadata_thumbnail: {path} ")
    assert "modelspec.thumbnail" not in modelspec(config(metadata_thumbnail=str(path)), "x")


def test_a_thumbnail_in_the_option_itself_has_no_remark(tmp_path):
    (tmp_path / "t.png").write_bytes(b"png")
    for value in (None, "", "data:image/png;base64,cG5n", str(tmp_path / "t.png")):
        assert not [*metadata.thumbnail_notes(value)]
