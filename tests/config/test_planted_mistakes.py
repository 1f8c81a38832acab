"""Mistakes that people make in configs, by kind: each is named in a clear sentence, all of a file at once, and no
traceback comes of any."""

import json

import pytest

from library.cli.train_script import read_command_line, read_flags
from library.config import building, dataset
from library.config.common_names import COMMON_NAMES
from library.config.dataset import DATASET_KEYS, SUBSET_KEYS
from library.config.problems import ConfigError
from library.config.schema import options_of
from library.config.values import closest
from library.families import RUNS, config_class, lora_script, network_args
from library.optim import optimizers
from library.sampling import prompts

SDXL, FLUX, FULL = "sdxl_train_network", "flux_train_network", "sdxl_train"
ANIMA, QWEN = "anima_train_network", "qwen_image_train_network"
FLUX_2, ZIMAGE = "flux_2_train_network", "zimage_train_network"
FOLDER = "[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = 'IMAGES'\n"

# Kind -> rows of: script, lines of the config, what the sentence says, each word of it.
SETTINGS = {
    "wrong type": [
        (SDXL, "seed = 'abc'", "seed must be a whole number"),
        (SDXL, "seed = 1.5", "seed must be a whole number"),
        (SDXL, "learning_rate = 'fast'", "learning_rate must be a number"),
        (SDXL, "learning_rate = true", "learning_rate must be a number"),
        (SDXL, "learning_rate = []", "learning_rate"),
        (SDXL, "network_dim = '16 32'", "network_dim must be a whole number"),
        (SDXL, "max_train_steps = {a = 1}", "a is not an option"),
        (SDXL, "shuffle_caption = 'perhaps'", "shuffle_caption must be true or false"),
        (SDXL, "shuffle_caption = 2", "shuffle_caption must be true or false"),
        (SDXL, "output_name = []", "output_name"),
        (SDXL, "train_batch_size = 1979-05-27", "train_batch_size must be a whole number"),
        (SDXL, "learning_rate = nan", "learning_rate"),
        (SDXL, "network_alpha = inf", "network_alpha"),
        (SDXL, "resolution = 'large'", "resolution must be one size in pixels"),
        (SDXL, "resolution = [512]\nseed = 'x'", "seed must be a whole number"),
        (SDXL, "text_encoder_lr = 'x'", "text_encoder_lr"),
        (SDXL, "optimizer_args = 5", "optimizer_args"),
    ],
    "range": [
        (SDXL, "learning_rate = -1", "learning_rate must be at least 0"),
        (SDXL, "network_dim = 0", "network_dim must be at least 1"),
        (SDXL, "network_dim = -4", "network_dim must be at least 1"),
        (SDXL, "network_dropout = 1.5", "network_dropout must be at least 0.0 and at most 1.0"),
        (SDXL, "train_batch_size = 0", "train_batch_size must be at least 1"),
        (SDXL, "max_train_steps = -5", "max_train_steps"),
        (SDXL, "resolution = '0,512'", "resolution must be one size"),
        (SDXL, "resolution = 99999999", "resolution must be at most 65536"),
        (SDXL, "caption_dropout_rate = 2", "caption_dropout_rate must be at least 0.0 and at most 1.0"),
        (SDXL, "caption_tag_dropout_rate = -0.1", "caption_tag_dropout_rate must be at least 0"),
        (SDXL, "min_snr_gamma = -1", "min_snr_gamma"),
        (SDXL, "save_every_n_steps = -2", "save_every_n_steps"),
        (SDXL, "gradient_accumulation_steps = 0", "gradient_accumulation_steps must be at least 1"),
        (SDXL, "max_grad_norm = -1", "max_grad_norm must be at least 0"),
        (SDXL, "validation_split = 1.5", "validation_split must be at least 0.0 and at most 1.0"),
        (SDXL, "ema_decay = 2", "ema_decay must be"),
        (SDXL, "clip_skip = 99", "clip_skip"),
        (SDXL, "min_timestep = 900\nmax_timestep = 100", "min_timestep"),
        (SDXL, "keep_tokens = -1", "keep_tokens must be at least 0"),
        (SDXL, "max_data_loader_n_workers = -1", "max_data_loader_n_workers must be at least 0"),
        (SDXL, "seed = 123456789012345678901234567890123456789012345", "a number of"),
        (SDXL, "train_batch_size = 100000000", "train_batch_size"),
    ],
    "choice": [
        (SDXL, "mixed_precision = 'fp32'", "mixed_precision must be one of"),
        (SDXL, "save_precision = 'int4'", "save_precision must be one of"),
        (SDXL, "save_model_as = 'zip'", "save_model_as must be one of"),
        (SDXL, "loss_type = 'l3'", "loss_type must be one of"),
        (SDXL, "sample_sampler = 'best'", "sample_sampler must be one of"),
        (SDXL, "log_with = 'excel'", "log_with must be one of"),
        (SDXL, "huber_schedule = 'none'", "huber_schedule must be one of"),
        (FLUX, "timestep_sampling = 'gauss'", "timestep_sampling must be one of"),
        (FLUX, "model_prediction_type = 'v'", "model_prediction_type must be one of"),
        (FLUX, "weighting_scheme = 'x'", "weighting_scheme must be one of"),
        (SDXL, "lr_scheduler = 'cosin'", "lr_scheduler cosin is not known (did you mean cosine"),
        (SDXL, "max_token_length = 100", "max_token_length must be"),
        (SDXL, "compile_mode = 'fast'", "compile_mode must be one of"),
        (SDXL, "cuda_graphs = 'perhaps'", "cuda_graphs must be one of"),
        (SDXL, "console_log_level = 'LOUD'", "console_log_level must be one of"),
    ],
    "typo": [
        (
            SDXL,
            "config_file = 'other.toml'",
            "works only on the command line: copy the options of that file into this one",
        ),
        (SDXL, "lerning_rate = 1", "lerning_rate is not an option (did you mean learning_rate"),
        (SDXL, "network-dim = 4", "network-dim is not an option (did you mean network_dim"),
        (SDXL, "Network_Dim = 4", "Network_Dim is not an option (did you mean network_dim"),
        (SDXL, "optimiser_type = 'AdamW'", "optimiser_type is not an option (did you mean optimizer_type"),
        (SDXL, "max_train_step = 4", "max_train_step is not an option (did you mean max_train_steps"),
        (SDXL, "gradient_checkpoint = true", "gradient_checkpoint is not an option (did you mean gradient"),
        (SDXL, "xyz = true", "xyz is not an option"),
        (SDXL, "'' = true", "is not an option"),
        (SDXL, "[[steps]]\nseed = 1", "steps"),
        (SDXL, "[a.b]\nseed = 1", "b is not an option"),
    ],
    "wrong family": [
        (SDXL, "guidance_scale = 3.5", "guidance_scale is an option of"),
        (SDXL, "t5xxl = 'x.safetensors'", "t5xxl is an option of"),
        (SDXL, "qwen3 = 'x.safetensors'", "qwen3 is an option of"),
        (SDXL, "timestep_sampling = 'sigmoid'", "timestep_sampling is an option of"),
        (FLUX, "min_snr_gamma = 5", "min_snr_gamma has no effect here"),
        (FLUX, "clip_skip = 2", "clip_skip"),
        (FLUX, "v_parameterization = true", "v_parameterization has no effect here"),
        (FULL, "network_dim = 4", "network_dim is an option of"),
        (FULL, "unet_lr = 4", "unet_lr is an option of"),
        (SDXL, "block_lr = '1e-4'", "block_lr is an option of"),
        (ANIMA, "t5xxl = 'x.safetensors'", "t5xxl is an option of"),
        (QWEN, "ae = 'x.safetensors'", "ae is an option of"),
        (FLUX_2, "noise_offset = 0.1", "noise_offset"),
        (ZIMAGE, "zero_terminal_snr = true", "zero_terminal_snr has no effect here"),
        (SDXL, "network_module = 'networks.lora_flux'", "network_module networks.lora_flux is for FLUX.1"),
        (FLUX, "network_module = 'networks.lora_anima'", "network_module networks.lora_anima is for Anima"),
        (SDXL, "network_module = 'networks.hypernetwork'", "network_module networks.hypernetwork is not offered"),
    ],
    "exclusive": [
        (SDXL, "lowram = true\nhighvram = true", "lowram and highvram"),
        (SDXL, "network_train_unet_only = true\nnetwork_train_text_encoder_only = true", "network_train_"),
        (SDXL, "use_8bit_adam = true\nuse_lion_optimizer = true", "choose an optimizer"),
        (SDXL, "optimizer_type = 'Lion'\nuse_8bit_adam = true", "choose an optimizer"),
        (SDXL, "full_fp16 = true\nfull_bf16 = true", "full_"),
        (SDXL, "full_fp16 = true\nmixed_precision = 'bf16'", "full_fp16"),
        (SDXL, "cache_latents = true\nrandom_crop = true", "random_crop"),
        (SDXL, "cache_latents = true\ncolor_aug = true", "color_aug"),
        (SDXL, "cache_text_encoder_outputs = true\nshuffle_caption = true", "shuffle_caption"),
        (SDXL, "cache_text_encoder_outputs = true\ncaption_tag_dropout_rate = 0.1", "caption_tag_dropout_rate"),
        (SDXL, "fused_backward_pass = true", "fused_backward_pass works with Adafactor only"),
        (SDXL, "dim_from_weights = true", "dim_from_weights"),
        (SDXL, "scale_v_pred_loss_like_noise_pred = true", "scale_v_pred_loss_like_noise_pred"),
        (SDXL, "min_bucket_reso = 2048\nmax_bucket_reso = 512\nenable_bucket = true", "min_bucket_reso"),
        (SDXL, "enable_bucket = true\nbucket_reso_steps = 7", "bucket_reso_steps"),
        (SDXL, "base_weights_multiplier = [1.0]", "base_weights_multiplier"),
        (SDXL, "seed = 1\n[steps]\nseed = 2", "seed is in both the part above all tables and [steps]"),
        (SDXL, "log_prefix = '../../x'", "log_prefix leads outside logging_dir"),
        (SDXL, "log_tracker_name = '/etc/x'", "log_tracker_name leads outside logging_dir"),
        (SDXL, "log_tracker_name = 'a/../../x'", "log_tracker_name leads outside logging_dir"),
        (SDXL, "caption_extension = '/../x'", "caption_extension must be a file extension"),
        (SDXL, "in_json = 'a.json'", "in_json needs train_data_dir"),
        (SDXL, "dataset_config = 'a.toml'\ntrain_data_dir = 'x'", "train_data_dir"),
        (FULL, "ema_decay = 0.9\noptimizer_type = 'AdamWScheduleFree'", "ema_decay cannot be used with AdamW"),
    ],
    "code by name": [
        (SDXL, "optimizer_type = 'os.system'", "optimizer_type os.system: os is part of Python itself"),
        (SDXL, "optimizer_type = '../x.AdamW'", "optimizer_type must be a name"),
        (SDXL, "network_module = '/tmp/x.py'", "network_module must be a name"),
        (SDXL, "compile_backend = '.x'", "compile_backend must be a name"),
        (SDXL, f"lr_scheduler_type = '{'a.' * 300}B'", "lr_scheduler_type must be a name"),
        (SDXL, "optimizer_type = 'torch.optim.Optimizer'", "torch.optim.Optimizer is not a subclass of Optimizer"),
        (SDXL, "optimizer_type = 'torch.optim.lr_scheduler.Optimizer'", "is not a subclass of Optimizer"),
        (SDXL, "lr_scheduler_type = 'LRScheduler'", "LRScheduler is not a subclass of LRScheduler"),
        (SDXL, f"optimizer_args = ['weight_decay={'-' * 9000}1']", "optimizer_args: 'weight_decay=-"),
        (SDXL, f"lr_scheduler_args = ['x={'(' * 9000}1']", "lr_scheduler_args: 'x=("),
        (SDXL, "optimizer_type = 'AdamX'", "optimizer_type AdamX: torch.optim has no AdamX"),
        (SDXL, "optimizer_type = 'nope.Such'", "optimizer_type nope.Such names the package nope"),
        (SDXL, "optimizer_type = 'torch.nn.Linear'", "torch.nn.Linear is not a subclass of Optimizer"),
        (SDXL, "lr_scheduler_type = 'pydoc.pipepager'", "lr_scheduler_type pydoc.pipepager: pydoc is part of Python"),
        (SDXL, "lr_scheduler_type = 'CosineLR'", "torch.optim.lr_scheduler has no CosineLR"),
        (SDXL, "lr_scheduler_type = 'torch.optim.AdamW'", "is not a subclass of LRScheduler"),
    ],
    "optimizer_args": [
        (SDXL, "optimizer_args = ['weight_decay']", "optimizer_args: 'weight_decay' must be written key=value"),
        (SDXL, "optimizer_args = ['weight_dekay=1']", "has no argument weight_dekay (did you mean weight_decay"),
        (SDXL, "optimizer_args = ['betas=__import__(\"os\")']", "must be written key=value"),
        (SDXL, "optimizer_args = ['weight decay=1']", "must be written key=value"),
        (SDXL, "optimizer_args = ['betas=2,3']", "optimizer_args: AdamW does not take these values"),
        (SDXL, "optimizer_args = ['eps=abc']", "must be written key=value"),
        (SDXL, "lr_scheduler_args = ['foo=1']\nlr_scheduler = 'cosine'", "cosine has no argument foo"),
        (SDXL, "lr_scheduler = 'cosine_with_min_lr'", "cosine_with_min_lr needs lr_scheduler_min_lr_ratio"),
        (SDXL, "lr_scheduler = 'piecewise_constant'", "piecewise_constant needs lr_scheduler_args"),
        (SDXL, "lr_scheduler = 'adafactor'", "adafactor goes with optimizer_type Adafactor only"),
        (SDXL, "optimizer_type = 'Prodigy'\nunet_lr = 1\ntext_encoder_lr = 0.5", "one learning rate for all"),
    ],
    "network_args": [
        (SDXL, "network_args = ['conv_dim']", "conv_dim"),
        (SDXL, "network_args = ['conv_dim=x']", "conv_dim must be a whole number"),
        (SDXL, "network_args = ['conv_dimm=4']", "did you mean conv_dim"),
        (SDXL, "network_args = ['loraplus_lr_ration=4']", "did you mean loraplus_lr_ratio"),
        (SDXL, "network_args = ['rank_dropout=7']", "rank_dropout must be at least 0.0 and at most 0.99"),
        (SDXL, "network_args = ['block_dims=1,2']", "block_dims"),
        (SDXL, "network_module = 'lycoris.kohya'\nnetwork_args = ['algo=best']", "algo must be one of"),
        (SDXL, "network_module = 'lycoris.kohya'\nnetwork_args = ['preset=none.toml']", "is neither a file nor one of"),
        (SDXL, "network_module = 'lycoris.kohya'\nnetwork_args = ['factor=a']", "factor must be a whole number"),
        (FLUX, "network_args = ['train_double_block_indices=99-']", "train_double_block_indices"),
        (FLUX, "network_args = ['img_attn_dim=x']", "img_attn_dim must be a whole number"),
    ],
    "retired": [
        (SDXL, "config_file = 'x'", "config_file"),
        (SDXL, "v2 = true", "v2"),
        (SDXL, "deepspeed = true", "deepspeed"),
    ],
}
DATASETS = {
    "empty": ("", "there is no [[datasets]] table"),
    "no subsets": ("[[datasets]]\nresolution = 512\n", "it has no [[datasets.subsets]] table"),
    "no folder": ("[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nnum_repeats = 1\n", "image_dir is not set"),
    "a typo of the folder": (FOLDER.replace("image_dir", "imagedir"), "is not a known key (did you mean image_dir"),
    "a typo at the top": (FOLDER.replace("[[datasets]]", "[[dataset]]"), "dataset is not known at the top"),
    "a word for a number": (FOLDER + "num_repeats = 'x'\n", "num_repeats must be a whole number"),
    "repeats below nought": (FOLDER + "num_repeats = -1\n", "num_repeats must be at least 0"),
    "a key of the wrong level": (FOLDER + "batch_size = 2\n", "batch_size belongs in [[datasets]] or [general]"),
    "a folder in general": ("[general]\nimage_dir = 'x'\n" + FOLDER, "image_dir belongs in [[datasets.subsets]]"),
    "one table and no list": ("[datasets]\nresolution = 512\n", "datasets must be written as tables, [[datasets]]"),
    "subsets as a text": ("[[datasets]]\nresolution = 1\nsubsets = 'x'\n", "subsets must be written as tables"),
    "general as a text": ("general = 'x'\n" + FOLDER, "must be a table"),
    "a size that is none": (FOLDER.replace("512", "'wide'"), "resolution must be one size"),
    "a wrong step": (
        FOLDER.replace("= 512\n", "= 512\nenable_bucket = true\nbucket_reso_steps = 7\n"),
        "bucket_reso_steps must be a multiple of",
    ),
    "buckets upside down": (
        FOLDER.replace("= 512\n", "= 512\nenable_bucket = true\nmin_bucket_reso = 1024\nmax_bucket_reso = 512\n"),
        "min_bucket_reso must not be above max_bucket_reso",
    ),
    "a share above one": (FOLDER + "caption_dropout_rate = 7\n", "must be at least 0.0 and at most 1.0"),
    "masks without the option": (FOLDER + "conditioning_data_dir = 'x'\n", "conditioning_data_dir needs masked_loss"),
    "references that the model does not take": (FOLDER + "control_directory = 'x'\n", "SDXL LoRA takes none"),
    "two kinds of subsets": (FOLDER + "[[datasets.subsets]]\nmetadata_file = 'x.json'\n", "either all subsets have"),
    "of musubi-tuner": ("[[datasets]]\nimage_directory = 'x'\n", "is written for musubi-tuner"),
    "broken": ("[[datasets]\n", "is not valid TOML"),
    "a path of Windows": ('[[datasets]]\n[[datasets.subsets]]\nimage_dir = "C:\\Users\\me"\n', "use single quotes"),
    "further references alone": (FOLDER + "more_control_directories = ['x']\n", "needs control_directory"),
    "a face range that is none": (FOLDER + "face_crop_aug_range = 'x'\n", "face_crop_aug_range must be two numbers"),
}
PROMPTS = {
    "nothing": ("a.txt", "", "a.txt holds no prompt"),
    "comments alone": ("a.txt", "# a cat\n", "holds no prompt"),
    "broken JSON": ("a.json", "[", "is not valid JSON"),
    "a table": ("a.json", "{}", "a list of texts or of objects"),
    "a number": ("a.json", "[5]", "entry 1 is neither a text nor an object"),
    "an unknown key": ("a.json", '[{"prompt": "x", "widht": 5}]', "there is no option widht"),
    "no prompt": ("a.json", '[{"width": 512}]', "entry 1 has no prompt"),
    "a word for a number": ("a.json", '[{"prompt": "x", "width": "wide"}]', "width"),
    "broken TOML": ("a.toml", "[prompt", "is not valid TOML"),
    "subsets that are no tables": ("a.toml", "[prompt]\nsubset = ['x']\n", "are tables, [[prompt.subset]]"),
    "twice": ("a.toml", "[prompt]\nwidth = 512\n[[prompt.subset]]\nprompt = 'x'\nwidth = 5\n", "is in [prompt]"),
    "deep": ("a.json", "[" * 9999, "levels deep"),
}
ROWS = [(kind, *row) for kind, rows in SETTINGS.items() for row in rows]


def problems(script, text, tmp_path):
    """All that is wrong with a config and what it names, as far as no model, no image and no GPU is needed."""
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    reading = read_command_line(config_class(script), ["--config_file", str(path)])
    found = [*reading.problems, *building.config_notes(reading.config)]
    if reading.config.adapters and "network_module" not in reading.wrong:
        found += network_args.find_network_args_problems(reading.config)
    found += optimizers.find_optimizer_problems(reading.config)
    return [str(problem) for problem in dict.fromkeys([*found, *reading.notes])]


@pytest.mark.parametrize(("kind", "script", "text", "word"), ROWS, ids=[f"{row[0]}: {row[2]}" for row in ROWS])
def test_a_mistake_in_a_config_is_named(kind, script, text, word, tmp_path):
    said = problems(script, text, tmp_path)
    assert any(word in problem for problem in said), said
    assert all("Traceback" not in problem and len(problem) < 1000 for problem in said)


@pytest.mark.parametrize("name", DATASETS)
def test_a_mistake_in_a_data_set_file_is_named(name, tmp_path):
    text, word = DATASETS[name]
    path = tmp_path / "data.toml"
    path.write_text(text.replace("IMAGES", str(tmp_path)), encoding="utf-8")
    config = building.draft(config_class(SDXL), {"dataset_config": str(path)})
    _, said = dataset.drafted(config)
    assert any(word in str(problem) for problem in said), [str(problem) for problem in said]
    assert all("data.toml" in str(problem) for problem in said)


@pytest.mark.parametrize("name", PROMPTS)
def test_a_mistake_in_a_prompt_file_is_named(name, tmp_path):
    file, text, word = PROMPTS[name]
    (tmp_path / file).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        prompts.read_prompts(tmp_path / file)
    assert any(word in str(problem) for problem in refused.value.problems), str(refused.value)
    assert all(problem.option == "sample_prompts" for problem in refused.value.problems)


BROKEN = [b"\xff\xfe\x00", b"\x00\x01\x02" * 50, b"[a\n", b"a = \n", b"= 1\n", b"a = 1 b = 2\n", b"a = 'x\n"]


@pytest.mark.parametrize("content", BROKEN)
def test_a_file_that_is_no_config_is_named(content, tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    reading = read_command_line(config_class(SDXL), ["--config_file", str(path)])
    assert not reading.known and any(str(path) in str(problem) for problem in reading.problems)


def test_all_mistakes_of_a_file_are_named_at_once(tmp_path):
    rows = [
        (text, word)
        for kind in ("typo", "choice", "range")
        for script, text, word in SETTINGS[kind]
        if script == SDXL and "\n" not in text and "[" not in text and "a number of" not in word
    ]
    chosen = dict(reversed([(text.partition(" ")[0], (text, word)) for text, word in rows]))
    said = problems(SDXL, "\n".join(text for text, _ in chosen.values()), tmp_path)
    for text, word in chosen.values():
        assert any(word in problem for problem in said), (text, word)


def test_there_are_more_than_a_hundred_and_twenty():
    assert len(ROWS) + len(DATASETS) + len(PROMPTS) >= 120
    assert json.dumps(sorted(SETTINGS))


@pytest.mark.parametrize("script", [script for script in RUNS if config_class(script).kind == "finetune"])
def test_an_option_of_another_script_is_named_with_that_of_the_same_family(script):
    config = config_class(script)
    (problem,) = building.read_layers(config, [building.Layer({"network_dim": 4})]).problems
    assert f"is an option of {lora_script(config.family)}, and this is {script}" in str(problem)


def test_names_of_other_programs_and_papers_lead_to_the_option():
    """And not to one that only looks like them, as alpha_mask does for alpha."""
    options = {script: options_of(config_class(script)) for script in RUNS}
    for name, option in COMMON_NAMES.items():
        having = [known for known in options.values() if option in known]
        assert having and not any(name in known for known in options.values()), name
        assert {closest(name, known) for known in having} == {option}, name


def test_keys_of_dataset_files_lead_to_the_file_or_to_the_option_of_another_name():
    """And not to an option that only looks like them, as keep_tokens does for class_tokens."""
    options = {option for script in RUNS for option in options_of(config_class(script))}
    meant = {"batch_size": "train_batch_size", "num_repeats": "dataset_repeats"}
    meant |= {"image_dir": "train_data_dir", "metadata_file": "in_json"}
    for key in (
        {**SUBSET_KEYS, **DATASET_KEYS}.keys() - options - {"conditioning_data_dir"}
    ):  # which has advice of its own
        expected = (
            f"is not an option (did you mean {meant[key]}?)" if key in meant else "write it into the dataset_config"
        )
        (in_file,) = building.read_layers(config_class("sdxl_train_network"), [building.Layer({key: "x"})]).problems
        (as_flag,) = read_flags(config_class("sdxl_train_network"), [f"--{key}", "x"])[1]
        assert all(str(problem).endswith(expected) for problem in (in_file, as_flag)), key
