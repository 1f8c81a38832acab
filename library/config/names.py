"""Names in old command lines and TOML files that are no options here, each with what to do instead."""

# Other spellings of existing options, read as those with a note.
OPTION_ALIASES: dict[str, str] = {
    "caption_extention": "caption_extension",
    "skip_latents_validity_check": "skip_cache_check",
}

_DEEPSPEED = (
    "DeepSpeed is not used; several GPUs share the work with `accelerate launch --num_processes N`, and memory "
    "is saved by blocks_to_swap, fused_backward_pass or fp8_base"
)
_BLOCKS = "set blocks_to_swap"  # families that still convert them list them in `old`

# Removed flags of sd-scripts. Setting one is an error with this advice; leaving it off (false, 0) is not.
RETIRED: dict[str, str] = {
    "split_mode": _BLOCKS,
    "double_blocks_to_swap": _BLOCKS,
    "single_blocks_to_swap": _BLOCKS,
    "torch_compile": "set compile, which compiles block by block and leaves the saved names alone",
    "dataset_class": "describe the data with train_data_dir or a dataset_config",
    "conditioning_data_dir": "name the mask folder in a subset of the dataset_config (it never worked as a flag)",
    "controlnet_model_name_or_path": "ControlNet is not trained by this script; leave it out (it never had an effect)",
    "deepspeed": _DEEPSPEED,
    "zero_stage": _DEEPSPEED,
    "offload_optimizer_device": _DEEPSPEED,
    "offload_optimizer_nvme_path": _DEEPSPEED,
    "offload_param_device": _DEEPSPEED,
    "offload_param_nvme_path": _DEEPSPEED,
    "zero3_init_flag": _DEEPSPEED,
    "zero3_save_16bit_model": _DEEPSPEED,
    "fp16_master_weights_and_gradients": _DEEPSPEED,
}

# The same for models with reference images, which people also call conditioning images.
RETIRED_BESIDE_REFERENCES = RETIRED | {
    "conditioning_data_dir": "name the folder of reference images in control_directory, and that of masks in a subset "
    "of the dataset_config",
}

# Keys of dataset files that no run has, beside those whose option has another name (library/config/common_names.py).
OF_DATASET_FILES = (
    "class_tokens",
    "is_reg",
    "network_multiplier",
    "custom_attributes",
    "image_suffix",
    "control_suffix",
    "more_control_directories",
    "control_resolution",
    "no_resize_control",
)

_SDPA = "attention is PyTorch's SDPA, which is faster and needs less memory"
_GUI = "it is a setting of the kohya_ss page that no script reads"
_SCRIPT = "no script reads it"
_LAUNCHER = "it belongs to `accelerate launch`"

# Harmless keys that are ignored with a note.
FOREIGN: dict[str, str] = {
    "mem_eff_attn": _SDPA,
    "diffusers_xformers": _SDPA,
    "dynamo_backend": "compile_backend is used instead",
    "epoch": "it is a setting of the kohya_ss page that no script reads; max_train_epochs is used instead",
    "noise_offset_type": _GUI,
    "stop_text_encoder_training": "only train_db stops the training of a text encoder early",
    "no_token_padding": _SCRIPT,
    "lowvram": _SCRIPT,
    "train_inpainting": _SCRIPT,
    "show_timesteps": _SCRIPT,
    "show_timesteps_resolution": _SCRIPT,
    "qwen_image_vae_2d": _SCRIPT,
    "fp8_scaled": _SCRIPT,
    "fp8_fast": _SCRIPT,
    "disable_numpy_memmap": _SCRIPT,
    "cache_text_encoder_outputs_on_cpu": _SCRIPT,
    "learning_rate_te": "text encoders that can be trained have learning_rate_te1 and learning_rate_te2",
    "num_cpu_threads_per_process": _LAUNCHER,
    "num_processes": _LAUNCHER,
    "num_machines": _LAUNCHER,
    "machine_rank": _LAUNCHER,
    "multi_gpu": _LAUNCHER,
    "gpu_ids": _LAUNCHER,
    "main_process_ip": _LAUNCHER,
    "main_process_port": _LAUNCHER,
    "dynamo_mode": "compile_mode is used instead",
    "dynamo_use_fullgraph": "compile_fullgraph is used instead",
    "dynamo_use_dynamic": "compile_dynamic is used instead",
}
