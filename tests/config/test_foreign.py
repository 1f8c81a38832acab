"""Files of kohya_ss: every key has an outcome, and what it says is what is trained."""

import csv
import json
import re
from pathlib import Path

import pytest

from library import importers
from library.config.building import build_config
from library.config.formats import read_toml, to_toml
from library.config.problems import ConfigError
from library.config.schema import changed, flatten_sections, options_of
from library.families import RUNS, config_class, network_args
from library.importers import kohya_adapters
from library.importers.builder import NOT_HERE

CONFIGS = {script: config_class(script) for script in RUNS}
ROWS = list(csv.DictReader((Path(__file__).parents[1] / "golden/gui_keys.csv").open(encoding="utf-8")))
TABS = {
    "lora": {"LoRA_type": "Standard", "max_train_steps": 100},
    "dreambooth": {"max_train_steps": 100},
    "finetune": {"image_folder": "/i", "max_train_steps": 100},
}
FAMILY = {
    ("lora", "sdxl"): {"sdxl": True},
    ("lora", "flux"): {"flux1_checkbox": True, "LoRA_type": "Flux1"},
    ("dreambooth", "sdxl"): {"sdxl": True},
    ("dreambooth", "flux"): {"flux1_checkbox": True},
    ("finetune", "sdxl"): {"sdxl_checkbox": True},
    ("finetune", "flux"): {"flux1_checkbox": True},
}
CASES = [
    (row, tab, family)
    for row in ROWS
    for tab in (TABS if row["tabs"] == "all" else row["tabs"].split("+"))
    for family in ("sdxl", "flux")
    if tab in TABS
]


def imported(tab, family, **keys):
    return importers.import_content({**TABS[tab], **FAMILY[tab, family], **keys}, CONFIGS)


def sample(row):
    """A value that is not the default, of the kind that the page writes."""
    kind, choices = row["type"].partition("[")[0], [c for c in row["choices"].split("|") if c]
    if kind == "bool":
        return row["default"] != "true"
    if kind in ("int", "float"):
        return 2 if kind == "int" else 0.5
    if choices:
        return next((c for c in choices if c != row["default"]), choices[0])
    return "1024,1024" if "resolution" in row["key"] else "a/b" if kind == "path" else "2"


def outcome(imported, key):
    return next(f for f in imported.outcomes if f.key == key)


@pytest.mark.parametrize("tab", TABS)
def test_every_key_has_a_fate_and_says_why_it_is_ignored(tab):
    for row, its_tab, family in CASES:
        if its_tab != tab:
            continue
        key = row["key"]
        try:
            converted = imported(tab, family, **{key: sample(row)})
        except ConfigError as refused:  # a switch or a LoRA_type of a model that is not trained here
            assert key.endswith("checkbox") or key in ("sdxl", "model_type"), (key, refused)
            continue
        fate = outcome(converted, key)
        assert fate.kind == "kept" or fate.kind == "empty" or len(str(fate.text)) > 3, (key, fate)


def test_a_key_whose_flag_is_an_option_reaches_that_option():
    """What the script would have been told arrives, unless the table of this project says why not."""
    lost = []
    for row, tab, family in CASES:
        flag, key = row["sd_scripts_flag"], row["key"]
        script = f"{family}_train" + ("_network" if tab == "lora" else "")
        applies = row["applies_to"] in ("all", "") or family in row["applies_to"].split(";")
        if not applies or flag not in options_of(CONFIGS[script]) or "no --" in row["notes"]:
            continue
        try:
            converted = imported(tab, family, **{key: sample(row)})
        except ConfigError:
            continue
        said = sample(row)
        is_default = said in (False, str(options_of(CONFIGS[script])[flag].default))  # nothing to see in the config
        if (
            flag not in flatten_sections(changed(converted.config, secrets=True))
            and outcome(converted, key).kind != "ignored"
            and not is_default
        ):
            lost.append((tab, family, key, outcome(converted, key)))
    # These set another option, or need a second setting beside them; each has a test of its own below.
    allowed = {"lr_warmup", "lr_warmup_steps", "xformers", "sample_prompts", "multires_noise_discount"}
    allowed |= {"save_model_as", "use_latent_files"}
    assert not [entry for entry in lost if entry[2] not in allowed]


def test_the_report_names_every_key_once():
    keys = json.loads(json.dumps({row["key"]: sample(row) for row in ROWS if "checkbox" not in row["key"]}))
    keys |= {"LoRA_type": "Standard", "sdxl": True, "v2": False, "model_type": "flux"}
    imported = importers.import_content(keys, CONFIGS)
    assert {f.key for f in imported.outcomes} == keys.keys() | {f.key for f in imported.outcomes if "--" in f.key}
    assert len(imported.outcomes) == len({f.key for f in imported.outcomes})
    assert "ignored" in imported.report() and all(
        str(f.text) in " ".join(map(str, imported.lines())) for f in imported.of("ignored")
    )


# ---- values


def test_numbers_as_text_and_nothing():
    keys = {"learning_rate": "1e-4", "seed": "", "train_batch_size": "4", "clip_skip": None, "max_token_length": "150"}
    config = imported("lora", "sdxl", **keys, network_dim="16", noise_offset="", caption_extension=".txt2").config
    assert config.optim.learning_rate == 1e-4 and config.data.train_batch_size == 4 and config.steps.seed is None
    assert config.model.max_token_length == 150 and config.network.network_dim == 16
    assert config.captions.caption_extension == ".txt2"


def test_a_wrong_value_is_named_and_the_default_used():
    converted = imported("lora", "sdxl", train_batch_size="many", learning_rate=-1)
    assert converted.config.data.train_batch_size == 1 and "whole number" in str(
        outcome(converted, "train_batch_size").text
    )
    assert outcome(converted, "learning_rate").kind == "ignored"


@pytest.mark.parametrize("key", ["max_grad_norm", "prior_loss_weight", "huber_c", "lr_scheduler_power"])
def test_a_zero_that_kohya_ss_drops_is_kept(key):
    converted = imported("lora", "sdxl", **{key: 0})
    assert flatten_sections(changed(converted.config))[key] == 0 and "drops it" in outcome(converted, key).text


def test_a_zero_that_means_nothing_sets_nothing():
    converted = imported("lora", "sdxl", seed=0, min_snr_gamma=0, noise_offset=0, adaptive_noise_scale=0, clip_skip=0)
    assert (
        converted.config.steps.seed is None and converted.config.noise.noise_offset is None and not converted.problems
    )


@pytest.mark.parametrize("steps", [0, "", "0"])
def test_zero_steps_are_epochs(steps):
    converted = imported("lora", "sdxl", max_train_steps=steps, epoch="3")
    assert converted.config.steps.max_train_epochs == 3
    converted = imported("lora", "sdxl", max_train_steps=steps, epoch=3, dataset_config="d.toml")
    assert converted.config.steps.max_train_epochs == 3 and "1600" in str(outcome(converted, "epoch").text)
    assert imported("lora", "sdxl", max_train_steps=7, epoch=3).config.steps.max_train_epochs is None


@pytest.mark.parametrize(
    ("keys", "warmup"),
    [
        ({"lr_warmup": 10, "lr_scheduler": "cosine"}, 0.1),
        ({"lr_warmup": "10", "lr_warmup_steps": 50, "lr_scheduler": "cosine"}, 50),
        ({"lr_warmup": 10, "lr_scheduler": "constant"}, 0),
        ({"lr_warmup": 10, "lr_scheduler": "cosine", "lr_scheduler_type": "CosineAnnealingLR"}, 0),
        ({"lr_warmup": 10, "lr_scheduler": "cosine", "dataset_config": "d.toml"}, 10),
        ({"lr_warmup_steps": 50, "lr_scheduler": "cosine", "dataset_config": "d.toml", "max_train_steps": 0}, 50),
        ({"lr_warmup": 100, "lr_scheduler": "cosine"}, 1.0),
        ({"lr_warmup_steps": 1, "lr_scheduler": "cosine"}, 1),
    ],
)
def test_warmup_in_percent_and_in_steps(keys, warmup):
    converted = imported("lora", "sdxl", **keys)
    assert repr(converted.config.optim.lr_warmup_steps) == repr(warmup) and not converted.problems  # 1.0: all steps


def test_rates_of_the_parts_of_adapters():
    config = imported("lora", "flux", unet_lr=1e-4, text_encoder_lr=2e-5, t5xxl_lr=1e-5).config
    assert config.optim.text_encoder_lr == (2e-5, 1e-5) and config.optim.unet_lr == 1e-4
    assert imported("lora", "sdxl", unet_lr=1e-4, text_encoder_lr=0).config.network.network_train_unet_only
    assert imported("lora", "sdxl", unet_lr=0, text_encoder_lr="1e-4").config.network.network_train_text_encoder_only


def test_rates_of_text_encoders_switch_their_training():
    config = imported("dreambooth", "sdxl", learning_rate_te1=1e-5, learning_rate_te2=0).config
    assert config.steps.train_text_encoder and config.optim.learning_rate_te2 == 0
    assert not imported("dreambooth", "sdxl", learning_rate_te1=0, learning_rate_te2=0).config.steps.train_text_encoder


@pytest.mark.parametrize(
    ("kind", "keys", "module", "args"),
    [
        ("Standard", {"conv_dim": 4}, "networks.lora", ()),
        ("Kohya LoCon", {"conv_dim": 4, "conv_alpha": 1}, "networks.lora", ("conv_dim=4", "conv_alpha=1")),
        ("LoCon", {"conv_dim": 4}, "lycoris.kohya", ("algo=locon", "conv_dim=4")),
        (
            "LyCORIS/LoKr",
            {"factor": 8, "decompose_both": True},
            "lycoris.kohya",
            ("algo=lokr", "factor=8", "decompose_both=True"),
        ),
        (
            "LyCORIS/Diag-OFT",
            {"constrain": 0.1, "LyCORIS_preset": "attn-mlp"},
            "lycoris.kohya",
            ("algo=diag-oft", "preset=attn-mlp", "constraint=0.1"),
        ),
        ("LyCORIS/DyLoRA", {"unit": 4}, "lycoris.kohya", ("algo=dylora", "block_size=4")),
        ("LyCORIS/iA3", {"train_on_input": False}, "lycoris.kohya", ("algo=ia3", "train_on_input=False")),
        (
            "Standard",
            {"loraplus_lr_ratio": 16.0, "rank_dropout": "0.1"},
            "networks.lora",
            ("rank_dropout=0.1", "loraplus_lr_ratio=16.0"),
        ),
    ],
)
def test_the_type_of_adapter_and_its_fields(kind, keys, module, args):
    config = imported("lora", "sdxl", LoRA_type=kind, **keys).config
    assert (config.network.module, config.network.network_args) == (module, args)


@pytest.mark.parametrize("family", ["sdxl", "flux"])
@pytest.mark.parametrize("kind", kohya_adapters.ADAPTERS)
def test_arguments_are_such_that_the_adapter_takes_them(kind, family):
    """With every field of the page filled in, each type gets those that it knows, and no other."""
    numbers = dict.fromkeys(["conv_dim", "conv_alpha", "unit", "factor"], 4) | {"rank_dropout": 0.1, "constrain": 0.1}
    texts = {"LyCORIS_preset": "attn-mlp", "in_dims": "4,0,0,0,4", "img_attn_dim": "4", "down_lr_weight": "sine"}
    on = ["use_tucker", "dora_wd", "use_scalar", "train_norm", "rescaled", "decompose_both", "use_cp"]
    keys = numbers | texts | dict.fromkeys([*on, "split_qkv", "train_t5xxl", "train_on_input"], True)
    config = imported("lora", family, **keys, LoRA_type=kind).config
    assert list(network_args.find_network_args_problems(config)) == []


def test_adapters_of_flux():
    keys = {"split_mode": True, "img_attn_dim": "4", "train_double_block_indices": "all", "train_t5xxl": True}
    config = imported("lora", "flux", **keys).config
    assert config.network.module == "networks.lora_flux"
    assert set(config.network.network_args) == {"img_attn_dim=4", "train_t5xxl=True", "train_blocks=single"}
    assert config.memory.blocks_to_swap == 18


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"double_blocks_to_swap": 4, "single_blocks_to_swap": 7, "blocks_to_swap": 0}, 7),
        ({"double_blocks_to_swap": 4, "single_blocks_to_swap": 7, "blocks_to_swap": 5}, 5),
        ({"double_blocks_to_swap": 0, "single_blocks_to_swap": 0}, None),
    ],
)
@pytest.mark.parametrize("tab", ["lora", "dreambooth"])
def test_old_options_of_swapping_become_one(tab, keys, expected):
    assert imported(tab, "flux", **keys).config.memory.blocks_to_swap == expected


def test_flux_files_have_other_names_in_other_tabs():
    config = imported("lora", "flux", clip_l="c", t5xxl="t", ae="a").config
    assert (config.model.clip_l, config.model.t5xxl, config.model.ae) == ("c", "t", "a")
    converted = imported("dreambooth", "flux", clip_l="sd3", flux1_clip_l="c", flux1_t5xxl="t")
    assert converted.config.model.clip_l == "c" and "SD3" in outcome(converted, "clip_l").text


def test_a_finetune_calls_its_folders_otherwise():
    converted = imported(
        "finetune", "sdxl", train_dir="C:\\d", use_latent_files="No", caption_metadata_filename="m.json"
    )
    assert converted.config.data.train_data_dir == "/i" and converted.config.data.in_json == "C:\\d\\m.json"
    assert converted.config.data.enable_bucket


def test_optimizer_schedule_and_attention():
    converted = imported("lora", "sdxl", optimizer="Prodigy", optimizer_args='a=1 "b=2"', xformers=True)
    assert converted.config.optim.optimizer_type == "Prodigy" and converted.config.optim.optimizer_args == (
        "a=1",
        "b=2",
    )
    assert converted.config.memory.sdpa and not converted.config.memory.xformers
    assert imported("lora", "sdxl", use_8bit_adam=True).config.optim.optimizer == "AdamW8bit"
    assert imported("lora", "sdxl", use_8bit_adam=True, optimizer="Lion").config.optim.optimizer == "Lion"


def test_the_kind_of_noise_chooses_its_settings():
    keys = {"noise_offset": 0.05, "multires_noise_iterations": 6}
    original = imported("lora", "sdxl", noise_offset_type="Original", **keys).config.noise
    multires = imported("lora", "sdxl", noise_offset_type="Multires", **keys).config.noise
    assert (original.noise_offset, original.multires_noise_iterations) == (0.05, None)
    assert (multires.noise_offset, multires.multires_noise_iterations) == (None, 6)


def test_flags_that_were_typed_win_over_fields():
    text = "w --caption_prefix 'a cat,' --zero_terminal_snr --seed=5 --network_args conv_dim=4 conv_alpha=1 --bogus 1"
    converted = imported("lora", "sdxl", seed=1, additional_parameters=text)
    assert converted.config.captions.caption_prefix == "a cat," and converted.config.steps.seed == 5
    assert converted.config.network.network_args == ("conv_dim=4", "conv_alpha=1")
    assert outcome(converted, "additional_parameters --bogus").kind == "ignored"
    assert outcome(converted, "additional_parameters w").kind == "ignored"
    told = next(note for note in converted.lines() if "--bogus" in str(note))
    assert told.arguments["reason"].arguments["text"].template == NOT_HERE  # so a page translates it


@pytest.mark.parametrize(
    ("text", "option", "arguments"),
    [
        ("--weight_decay 0.01", "optimizer_args", ("d_coef=2", "weight_decay=0.01")),
        ("--betas 0.9 0.99 --d_coef=1", "optimizer_args", ("betas=0.9,0.99", "d_coef=1")),
        ("--decouple --optimizer_args eps=1e-8", "optimizer_args", ("eps=1e-8", "decouple=True")),
        ("--conv_dim 4 --conv_alpha=1", "network_args", ("conv_dim=4", "conv_alpha=1")),
        ("--loraplus_lr_ratio 16", "network_args", ("loraplus_lr_ratio=16",)),
    ],
)
def test_typed_flags_that_are_arguments_of_optimizer_or_adapter_become_such(text, option, arguments):
    converted = imported("lora", "sdxl", optimizer="Prodigy", optimizer_args="d_coef=2", additional_parameters=text)
    config = converted.config
    assert {"optimizer_args": config.optim.optimizer_args, "network_args": config.network.network_args}[
        option
    ] == arguments
    assert not [found for found in converted.outcomes if found.kind in ("ignored", "unknown") and "--" in found.key]


def test_compile_keys_and_the_dynamo_panel():
    keys = {"compile": True, "compile_mode": "max-autotune", "compile_dynamic": "true", "compile_cache_size_limit": 64}
    config = imported("lora", "sdxl", **keys, dynamo_backend="inductor").config
    assert config.compile.compile and config.compile.dynamic is True and config.compile.compile_cache_size_limit == 64
    assert not imported("lora", "sdxl", dynamo_backend="inductor").config.compile.compile
    typed = imported("lora", "sdxl", dynamo_backend="eager", additional_parameters="--torch_compile").config
    assert typed.compile.compile and typed.compile.compile_backend == "eager"


def test_prompts_are_text_there_and_a_file_here():
    converted = imported("lora", "sdxl", sample_prompts="a cat --w 512\na dog")
    assert (
        converted.texts == {"sample_prompts": "a cat --w 512\na dog\n"}
        and converted.config.sample.sample_prompts is None
    )
    assert imported("lora", "sdxl", sample_prompts="C:\\p.txt").config.sample.sample_prompts == "C:\\p.txt"


@pytest.mark.parametrize("where", ["wandb_api_key", "huggingface_token", "additional_parameters"])
def test_secrets_reach_neither_the_config_nor_the_report(where):
    value = "--wandb_api_key canary" if where == "additional_parameters" else "canary"
    converted = imported("lora", "sdxl", **{where: value})
    assert "canary" not in converted.report() + to_toml(converted.config, secrets=True) + " ".join(
        map(str, converted.lines())
    )


def test_settings_that_do_not_go_together_are_named():
    converted = imported("lora", "sdxl", full_bf16=True, mixed_precision="fp16")
    assert any("full_bf16 needs" in str(problem) for problem in converted.problems)
    assert converted.config.precision.full_bf16


WEIRD = [
    None,
    "",
    " ",
    "nan",
    "inf",
    float("nan"),
    float("inf"),
    -1,
    0,
    1e30,
    "x",
    "1,2",
    True,
    False,
    [],
    [1, "a"],
    {},
    {"a": [1]},
]


def strange(tab, family):
    """Each key of a tab with each strange value, a dozen at a time: keys that are far apart, together with others for
    every value."""
    keys = [row["key"] for row, its_tab, its_family in CASES if (its_tab, its_family) == (tab, family)]
    groups = len(keys) // 12
    for shift in range(len(WEIRD)):
        pairs = [(key, WEIRD[(number + shift) % len(WEIRD)]) for number, key in enumerate(keys)]
        yield from (dict(pairs[first::groups]) for first in range(groups))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", "flux"])
@pytest.mark.parametrize("tab", TABS)
def test_no_value_whatever_breaks_the_import(tab, family):
    seen = set()

    def refused(keys):
        try:
            converted = imported(tab, family, **keys)
        except ConfigError:
            return True
        assert (
            keys.keys() <= {f.key for f in converted.outcomes}
            and converted.report()
            and to_toml(converted.config) is not None
        )
        return False

    for keys in strange(tab, family):
        seen.update((key, repr(value)) for key, value in keys.items())
        if refused(keys):  # one of them says that it is no training of ours, and nothing else was read then
            for key, value in keys.items():
                refused({key: value})
    assert len(seen) == len({key for key, _ in seen}) * len(set(map(repr, WEIRD)))


def test_an_imported_config_is_the_same_when_it_is_read_again(tmp_path):
    converted = imported(
        "lora", "flux", learning_rate="1e-4", network_dim=16, optimizer="AdamW8bit", train_data_dir="C:\\x"
    )
    path = tmp_path / "a.toml"
    path.write_text(to_toml(converted.config), encoding="utf-8")
    assert build_config(type(converted.config), read_toml(path), notes=[]) == converted.config
    assert importers.import_file(path, CONFIGS, "flux_train_network").config == converted.config


# What kohya_ss' tab for textual inversion writes besides what its other tabs have, all of them.
WORD = {"sdxl": True, "token_string": "zorb", "init_word": "*", "num_vectors_per_token": 8, "weights": "w.safetensors"}
OF_WORDS = re.findall(
    r"\w+",
    """
    adaptive_noise_scale additional_parameters async_upload bucket_no_upscale bucket_reso_steps cache_latents
    cache_latents_to_disk caption_dropout_every_n_epochs caption_dropout_rate caption_extension clip_skip color_aug
    dataset_config disable_mmap_load_safetensors dynamo_backend dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph
    enable_bucket epoch extra_accelerate_launch_args flip_aug full_fp16 gpu_ids gradient_accumulation_steps
    gradient_checkpointing huber_c huber_scale huber_schedule huggingface_path_in_repo huggingface_repo_id
    huggingface_repo_type huggingface_repo_visibility huggingface_token ip_noise_gamma ip_noise_gamma_random_strength
    keep_tokens learning_rate log_config log_tracker_config log_tracker_name log_with logging_dir loss_type
    lr_scheduler lr_scheduler_args lr_scheduler_num_cycles lr_scheduler_power lr_scheduler_type lr_warmup
    lr_warmup_steps main_process_port max_bucket_reso max_data_loader_n_workers max_resolution max_timestep
    max_token_length max_train_epochs max_train_steps mem_eff_attn metadata_author metadata_description
    metadata_license metadata_tags metadata_title min_bucket_reso min_snr_gamma min_timestep mixed_precision model_list
    multi_gpu multires_noise_discount multires_noise_iterations no_token_padding noise_offset
    noise_offset_random_strength noise_offset_type num_cpu_threads_per_process num_machines num_processes optimizer
    optimizer_args output_dir output_name persistent_data_loader_workers pretrained_model_name_or_path
    prior_loss_weight random_crop reg_data_dir resume resume_from_huggingface sample_every_n_epochs
    sample_every_n_steps sample_prompts sample_sampler save_as_bool save_every_n_epochs save_every_n_steps
    save_last_n_epochs save_last_n_epochs_state save_last_n_steps save_last_n_steps_state save_model_as save_precision
    save_state save_state_on_train_end save_state_to_huggingface scale_v_pred_loss_like_noise_pred sdxl_no_half_vae
    seed shuffle_caption skip_cache_check stop_text_encoder_training template train_batch_size train_data_dir
    v2 v_parameterization v_pred_like_loss vae vae_batch_size wandb_api_key wandb_run_name xformers
""",
)


def test_a_file_for_a_word_arrives_whole():
    """Each key has an outcome, and those that reached the script there are options here."""
    rows = {row["key"]: row for row in ROWS}
    for key in OF_WORDS:
        value = sample(rows[key]) if key in rows else "x"
        imported = importers.import_content({**WORD, key: value}, CONFIGS)
        keys = outcome(imported, key)
        assert keys.kind in ("kept", "empty", "renamed", "changed") or len(str(keys.text)) > 3, (key, keys)
        assert "supported by this trainer" not in str(keys.text) and "it is for" not in str(keys.text), (key, keys)
    imported = importers.import_content({**WORD, "template": "object template", "caption_dropout_rate": 0.5}, CONFIGS)
    words = imported.config.embedding
    assert (words.token_string, words.init_word, words.num_vectors_per_token) == ("zorb", "*", 8)
    assert words.use_object_template and not words.use_style_template and words.weights == "w.safetensors"
    assert (
        imported.config.captions.caption_dropout_rate == 0
        and "never passes" in outcome(imported, "caption_dropout_rate").text
    )
    assert importers.import_content({"sdxl": True, "token_string": "zorb"}, CONFIGS).config.embedding.init_word == "*"
