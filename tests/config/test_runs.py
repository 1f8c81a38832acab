"""Every kind of training: its defaults, its round trip, its rules, and the page of options."""

import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from library import families
from library.cli import options_page
from library.config.building import build_config, find_missing, replace_options
from library.config.formats import to_toml
from library.config.problems import ConfigError
from library.config.run_config import INEFFECTIVE_EVERYWHERE
from library.config.schema import changed, flatten_sections, option_values, options_of

SCRIPTS = list(families.RUNS)
FLUX, SDXL = "flux_train_network", "sdxl_train_network"


def config_class(script):
    return families.config_class(script)


def other(option):
    """Some value that is not the default."""
    if others := [choice for choice in option.choices if choice != option.default]:
        return (others[0],) if option.many else others[0]
    special = {"resolution": "1024,768", "face_crop_aug_range": "2.0,4.0", "block_lr": "1e-05,0.0"}
    special["sample_sigmas"] = (1.0, 0.5)
    if option.name in special:
        return special[option.name]
    by_type = {
        bool: not option.default,
        int: 3 + (option.hints.get("min") or 0),
        float: 0.25 + max(option.hints.get("min") or 0, 0),
        str: 'a "b" \\ ü',
        Path: Path(r"C:\new\data.toml"),
    }
    item = by_type[option.type]
    if option.type is str and option.kind in ("file", "files", "folder"):
        item = "a 'b' \\ ü"  # without ", which no path of Windows has
    if option.name == "caption_extension":
        item = ".tags"
    if option.kind == "code":
        item = "module.Class"
    return (item, item) if option.many else item


@pytest.mark.parametrize("script", SCRIPTS)
def test_defaults_build_and_differ_in_nothing(script):
    notes = []
    config = build_config(config_class(script), {}, notes=notes)
    assert changed(config) == {}
    assert to_toml(config) == ""
    assert notes == []
    assert config == build_config(config_class(script), option_values(config))
    assert config.script == script


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_option_changed_survives_toml_and_text(script):
    option_defaults = options_of(config_class(script))
    changed_options = {name: other(option) for name, option in option_defaults.items()}
    parts = {}
    for field in dataclasses.fields(config_class(script)):
        mine = {name: changed_options[name] for name, o in option_defaults.items() if o.section == field.name}
        parts[field.name] = field.default_factory(**mine)
    config = config_class(script)(**parts)  # not built: the rules would forbid many of these together
    assert {name for part in changed(config, secrets=True).values() for name in part} == set(option_defaults)
    back = flatten_sections(tomllib.loads(to_toml(config, secrets=True)))
    assert {name: option_defaults[name].read(value) for name, value in back.items()} == changed_options
    assert {name: o.read(o.text(changed_options[name])) for name, o in option_defaults.items()} == changed_options


@pytest.mark.parametrize("script", SCRIPTS)
def test_default_is_read_as_itself(script):
    for option in options_of(config_class(script)).values():
        assert option.read(option.default) == option.default
        assert option.read(option.text(option.default)) == option.default


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_form_can_be_made_of_it(script):
    visible = {}
    for option in options_of(config_class(script)).values():
        assert option.help[0].isupper() or not option.help[0].isalpha() or option.help.split()[0].islower()
        assert option.help.endswith(".")
        assert len(option.help) <= (84 if option.default is False else 88), option.name  # two lines of a column
        assert option.kind in ("", "file", "files", "folder", "code", "secret", "text")
        visible[option.section] = visible.get(option.section, 0) + (not option.advanced)
    # More than that in one group is a wall, not a form.
    assert max(visible.values()) <= 15, visible


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_help_of_an_option_that_never_has_an_effect_says_so(script):
    options = options_of(config_class(script))
    promised = {name: options[name].help for name in INEFFECTIVE_EVERYWHERE if name in options}
    assert promised and not [name for name, words in promised.items() if not words.startswith("No effect: ")]


def problems(script, **options):
    with pytest.raises(ConfigError) as e:
        build_config(config_class(script), options, notes=[])
    return str(e.value)


def noted(script, **options):
    notes = []
    build_config(config_class(script), options, notes=notes)
    return notes


@pytest.mark.parametrize(
    ("script", "given", "words"),
    [
        (SDXL, {"adaptive_noise_scale": 0.1}, "adaptive_noise_scale needs noise_offset"),
        (SDXL, {"min_timestep": 500, "max_timestep": 100}, "min_timestep (500)"),
        (SDXL, {"scale_v_pred_loss_like_noise_pred": True}, "needs v_parameterization"),
        (SDXL, {"v_pred_like_loss": 0.1, "v_parameterization": True}, "cannot be used with v_parameterization"),
        (SDXL, {"v2": True}, "v2 must be off"),
        (SDXL, {"cache_latents": True, "color_aug": True}, "color_aug cannot be used"),
        (SDXL, {"cache_latents_to_disk": True, "random_crop": True}, "random_crop cannot be used"),
        (SDXL, {"cache_text_encoder_outputs": True}, "needs network_train_unet_only"),
        (FLUX, {"cache_text_encoder_outputs": True, "shuffle_caption": True}, "shuffle_caption cannot"),
        (FLUX, {"cache_text_encoder_outputs": True, "caption_tag_dropout_rate": 0.1}, "caption_tag_dropout_rate"),
        (FLUX, {"cache_text_encoder_outputs": True, "token_warmup_step": 10}, "token_warmup_step cannot"),
        (FLUX, {"cache_text_encoder_outputs": True, "network_args": "train_t5xxl=True"}, "train_t5xxl=True"),
        ("sdxl_train", {"cache_text_encoder_outputs": True, "weighted_captions": True}, "weighted_captions"),
        ("sdxl_train", {"cache_text_encoder_outputs": True, "train_text_encoder": True}, "train_text_encoder"),
        ("sdxl_train", {"block_lr": "1e-5,1e-5"}, "block_lr needs 23 rates separated by commas, got 2"),
        ("sdxl_train", {"block_lr": "1e-5,x"}, "block_lr must be numbers"),
        (FLUX, {"checkpoint_keep_attention": True, "cpu_offload_checkpointing": True}, "exclude each other"),
        (FLUX, {"blocks_to_swap": 36}, "blocks_to_swap must be at least 0 and at most 35"),
        (SDXL, {"blocks_to_swap": 99}, "blocks_to_swap must be at least 0 and at most 68"),
        (FLUX, {"full_bf16": True}, "full_bf16 needs mixed_precision = bf16, which is no"),
        (FLUX, {"full_fp16": True, "full_bf16": True, "mixed_precision": "fp16"}, "exclude each other"),
        (FLUX, {"fp8_base": True}, "fp8_base needs mixed_precision"),
        (FLUX, {"fp8_base_unet": True}, "fp8_base_unet needs mixed_precision"),
        (FLUX, {"loss_type": "huber"}, "huber_schedule = snr is not possible"),
        (FLUX, {"model_type": "chroma"}, "apply_t5_attn_mask must be on"),
        (FLUX, {"enable_bucket": True, "bucket_reso_steps": 24}, "multiple of 16"),
        ("flux_train", {"enable_bucket": True, "bucket_reso_steps": 8}, "multiple of 16"),
        ("flux_train", {"fused_optimizer_groups": 4, "blockwise_fused_optimizers": True}, "exclude each other"),
        (SDXL, {"enable_bucket": True, "bucket_reso_steps": 48}, "multiple of 32"),
        (SDXL, {"enable_bucket": True, "resolution": 1536}, "max_bucket_reso (1024)"),
        (SDXL, {"enable_bucket": True, "resolution": "128,128"}, "min_bucket_reso (256)"),
        (
            SDXL,
            {"enable_bucket": True, "resolution": 256, "min_bucket_reso": 64, "bucket_reso_steps": 128},
            "min_bucket_reso must not be below bucket_reso_steps (128)",
        ),
        ("sdxl_train", {"fused_backward_pass": True}, "works with Adafactor only"),
        (
            "sdxl_train",
            {"fused_backward_pass": True, "optimizer_type": "adafactor", "gradient_accumulation_steps": 2},
            "cannot accumulate",
        ),
        (SDXL, {"lr_warmup_steps": 100}, "lr_warmup_steps cannot be used with lr_scheduler = constant"),
        (SDXL, {"lr_warmup_steps": 10, "lr_scheduler": "adafactor:1e-4"}, "lr_warmup_steps cannot be used with"),
        (SDXL, {"optimizer_type": "Lion", "use_8bit_adam": True}, "use_8bit_adam and optimizer_type both choose"),
        (SDXL, {"network_train_unet_only": True, "network_train_text_encoder_only": True}, "leave nothing to train"),
        (SDXL, {"dim_from_weights": True}, "needs network_weights"),
        (SDXL, {"base_weights_multiplier": "0.5"}, "1 value for 0 base_weights"),
        (SDXL, {"log_with": "tensorboard"}, "needs logging_dir"),
        (SDXL, {"resume_from_huggingface": True}, "needs resume"),
        (SDXL, {"save_state_to_huggingface": True}, "needs huggingface_repo_id"),
        (SDXL, {"in_json": "a.json"}, "in_json needs train_data_dir"),
        (SDXL, {"split_mode": True}, "split_mode was removed: set blocks_to_swap"),
        (SDXL, {"deepspeed": True, "zero_stage": 2}, "deepspeed was removed"),
        (SDXL, {"torch_compile": True}, "torch_compile was removed: set compile"),
        (FLUX, {"clip_l": True}, "clip_l must be text, got True"),
        (SDXL, {"face_crop_aug_range": "4,2"}, "face_crop_aug_range must be two numbers"),
        (SDXL, {"resolution": "big"}, "resolution must be one size in pixels or width,height"),
        (SDXL, {"max_token_length": 100}, "max_token_length must be one of 150, 225"),
    ],
)
def test_a_broken_rule_is_explained(script, given, words):
    options = problems(script, **given)
    assert words in options
    assert all(line.strip() for line in options.splitlines())


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        (FLUX, {"min_snr_gamma": 5}, "min_snr_gamma has no effect here"),
        (FLUX, {"noise_offset": 0.05}, "noise_offset has no effect here"),
        (FLUX, {"clip_skip": 2}, "clip_skip has no effect"),
        (FLUX, {"xformers": True}, "xformers is not used"),
        (FLUX, {"dynamo_backend": "inductor"}, "dynamo_backend is ignored"),
        (FLUX, {"mem_eff_attn": True}, "mem_eff_attn is ignored"),
        (FLUX, {"fused_backward_pass": True, "optimizer_type": "Adafactor"}, "fused_backward_pass has no effect"),
        ("flux_train", {"fp8_base": True, "mixed_precision": "bf16"}, "fp8_base has no effect"),
        ("flux_train", {"save_model_as": "ckpt"}, "always saved as safetensors"),
        ("flux_train", {"blocks_to_swap": 4}, "updated on the CPU"),
        ("flux_train", {"mem_eff_save": True}, "mem_eff_save has no effect"),
        (SDXL, {"lowram": True}, "lowram has no effect"),
        (SDXL, {"highvram": True}, "highvram has no effect"),
        (SDXL, {"zero_terminal_snr": True}, "v_parameterization is off"),
        (SDXL, {"dataset_config": "d.toml", "train_data_dir": "x"}, "train_data_dir is not used"),
    ],
)
def test_what_does_nothing_is_reported(script, options, words):
    assert any(words in str(note) for note in noted(script, **options))


# What the page of kohya_ss writes for a FLUX LoRA: flat, with keys of its own, counts as switches, and so on.
OF_KOHYA_SS = r"""
ae = 'D:/models/ae.safetensors'
apply_t5_attn_mask = true
bucket_reso_steps = 64
cache_latents = true
cache_text_encoder_outputs = true
caption_extension = ".txt"
clip_l = 'D:/models/clip_l.safetensors'
clip_skip = 1
discrete_flow_shift = 3.0
dynamo_backend = "no"
enable_bucket = true
epoch = 8
guidance_scale = 1.0
huber_c = 0.1
huber_scale = 1
huber_schedule = "snr"
learning_rate = 0.0003
logging_dir = "D:/log"
loss_type = "l2"
lr_scheduler = "cosine"
lr_scheduler_args = []
lr_scheduler_num_cycles = 1
lr_scheduler_power = 1
lr_warmup_steps = 0.1
max_bucket_reso = 2048
max_data_loader_n_workers = 0
max_grad_norm = 1
max_timestep = 1000
max_train_epochs = 8
max_train_steps = 1600
mem_eff_save = true
min_bucket_reso = 256
mixed_precision = "bf16"
model_prediction_type = "raw"
network_alpha = 1
network_args = []
network_dim = 8
network_module = "networks.lora_flux"
network_train_unet_only = true
noise_offset_type = "Original"
optimizer_args = []
optimizer_type = "AdamW8bit"
output_dir = "D:/out"
output_name = "last"
persistent_data_loader_workers = 1
pretrained_model_name_or_path = "D:/models/flux1-dev.safetensors"
prior_loss_weight = 1
resolution = "512,512"
sample_prompts = "D:/out/sample/prompt.txt"
sample_sampler = "euler_a"
save_every_n_epochs = 1
save_model_as = "safetensors"
save_precision = "fp16"
sdpa = true
t5xxl = 'D:/models/t5xxl_fp16.safetensors'
t5xxl_max_token_length = 512
text_encoder_lr = []
timestep_sampling = "sigmoid"
train_batch_size = 1
train_data_dir = "D:/img"
unet_lr = 0.0003
wandb_run_name = "last"
"""


def test_a_config_of_kohya_ss_is_ready_to_train():
    notes = []
    config = build_config(config_class(FLUX), tomllib.loads(OF_KOHYA_SS), "old.toml", notes)
    assert find_missing(config) == []
    assert (config.data.persistent_data_loader_workers, config.optim.lr_warmup_steps) == (True, 0.1)
    ignored = {str(note).split(" is ignored")[0].split()[-1] for note in notes if " is ignored" in str(note)}
    assert ignored == {"epoch", "noise_offset_type", "dynamo_backend", "mem_eff_save"}
    idle = {str(note).split()[0] for note in notes if "has no effect here" in str(note)}
    assert idle == {"clip_skip", "sample_sampler"}


@pytest.mark.parametrize(
    ("script", "names"),
    [
        (FLUX, ["mem_eff_save"]),
        ("sdxl_train", ["prior_loss_weight"]),
        ("flux_train", ["prior_loss_weight", "train_text_encoder", "block_lr"]),
    ],
)
def test_what_kohya_ss_writes_for_the_wrong_script_is_ignored_and_reported(script, names):
    notes = noted(script, **dict.fromkeys(names, 1))
    assert len(notes) == len(names)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("script", SCRIPTS)
@settings(max_examples=30)  # of each script: most of its options are those of all
@given(data=st.data())
def test_no_value_is_too_strange_for_a_sentence(script, data):
    names = data.draw(st.lists(st.sampled_from(sorted(options_of(config_class(script)))), unique=True, max_size=6))
    try:
        config = build_config(config_class(script), {name: data.draw(anything) for name in names}, notes=[])
    except ConfigError as e:
        assert str(e)
    else:
        back = flatten_sections(tomllib.loads(to_toml(config, secrets=True)))
        assert build_config(config_class(script), back, notes=[]) == config


def test_harmless_values_of_old_files_say_nothing():
    old = {"split_mode": False, "deepspeed": False, "torch_compile": False, "sdpa": True, "offload_param_device": ""}
    assert noted(FLUX, **old) == []


def test_what_people_write_for_sizes_and_steps():
    config = build_config(
        config_class(FLUX),
        {
            "resolution": [1024, 768],
            "lr_warmup_steps": "12%",
            "lr_scheduler": "Cosine",
            "lr_decay_steps": 0.5,
            "max_token_length": "75",
            "compile_dynamic": True,
            "sample_every_n_steps": -1,
            "save_every_n_epochs": 0,
            "caption_extension": "txt",
        },
        notes=[],
    )
    assert config.data.size == (1024, 768)
    assert (config.optim.lr_warmup_steps, config.optim.lr_decay_steps) == (0.12, 0.5)
    assert (config.optim.lr_scheduler, config.compile.dynamic) == ("cosine", True)
    assert config.sample.sample_every_n_steps is config.save.save_every_n_epochs is None
    assert config.model.max_token_length is None
    assert config.captions.caption_extension == ".txt"
    assert replace_options(config, lr_warmup_steps="100").optim.lr_warmup_steps == 100
    assert replace_options(config, resolution="512").data.size == (512, 512)


def test_implied_options_are_properties_and_are_not_written():
    config = build_config(
        config_class(FLUX), {"cache_latents_to_disk": True, "fp8_base_unet": True, "mixed_precision": "bf16"}
    )
    assert config.cache.latents
    assert (config.precision.fp8_denoiser, config.precision.fp8_encoders) == (True, False)
    assert set(flatten_sections(changed(config))) == {"cache_latents_to_disk", "fp8_base_unet", "mixed_precision"}
    assert config.network.module == "networks.lora_flux"
    assert config.optim.optimizer == "AdamW"
    assert replace_options(config, use_lion_optimizer=True).optim.optimizer == "Lion"


def test_compile_settings_at_their_defaults_are_not_written():
    config = build_config(
        config_class(SDXL), {"compile": True, "compile_dynamic": "AUTO", "compile_cache_size_limit": 0}
    )
    assert changed(config) == {"compile": {"compile": True}}
    assert config.compile.dynamic is None


@pytest.mark.parametrize("script", SCRIPTS)
def test_everything_that_a_start_needs_is_reported_at_once(script):
    asked = " ".join(map(str, find_missing(build_config(config_class(script), {}))))
    for name in ("pretrained_model_name_or_path", "train_data_dir", "resolution", "output_dir"):
        assert name in asked
    options = dict(pretrained_model_name_or_path="m", train_data_dir="d", resolution=512, output_dir="o")
    own = {"token_string": "sks", "conditioning_data_dir": "c", "cond_emb_dim": 32, "network_dim": 64}
    options |= {name: value for name, value in own.items() if name in asked}
    assert find_missing(build_config(config_class(script), options)) == []


def test_idle_and_pending_name_real_options():
    for script in SCRIPTS:
        options = options_of(config_class(script))
        assert set(config_class(script).ineffective) <= set(options)
        assert {key.split("=")[0] for key in config_class(script).pending} <= set(options)


def test_an_unknown_script_is_one_sentence():
    with pytest.raises(ConfigError, match=r"flux_train_netwrok is not a kind of training \(did you mean"):
        families.config_class("flux_train_netwrok")
    assert families.config_class("flux_train.py") is config_class("flux_train")


def test_page_of_options_is_fresh():
    page = options_page.page(map(config_class, SCRIPTS))
    assert options_page.OPTIONS_PAGE.read_text(encoding="utf-8") == page, "run: python -m library.cli.options_page"
