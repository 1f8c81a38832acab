"""The keys of kohya_ss's JSON files that are not simply an option: other names, and those that mean nothing here."""

from library.config.json_types import JsonMapping, JsonObject


def names(text: str) -> frozenset[str]:
    """Names from a text with blanks between, which reads better than a column of a hundred."""
    return frozenset(text.split())


# Where the page and the scripts differ: family ("" is any) and key -> option.
RENAMED: dict[tuple[str, str], str] = {
    ("", "max_resolution"): "resolution",
    ("", "optimizer"): "optimizer_type",
    ("", "lora_network_weights"): "network_weights",
    ("", "advanced_disable_mmap_load_safetensors"): "disable_mmap_load_safetensors",
    ("sdxl", "sdxl_disable_mmap_load_safetensors"): "disable_mmap_load_safetensors",
    ("sdxl", "sdxl_cache_text_encoder_outputs"): "cache_text_encoder_outputs",
    ("sdxl", "sdxl_no_half_vae"): "no_half_vae",
    ("sdxl", "sdxl_blocks_to_swap"): "blocks_to_swap",
    ("flux", "flux1_cache_text_encoder_outputs"): "cache_text_encoder_outputs",
    ("flux", "flux1_cache_text_encoder_outputs_to_disk"): "cache_text_encoder_outputs_to_disk",
    ("flux", "flux1_clip_l"): "clip_l",
    ("flux", "flux1_t5xxl"): "t5xxl",
    ("flux", "flux_fused_backward_pass"): "fused_backward_pass",
}

# 0 is how the page says "not set".
ZERO_IS_UNSET = names("""
    seed min_snr_gamma min_timestep max_timestep clip_skip noise_offset adaptive_noise_scale ip_noise_gamma
    v_pred_like_loss scale_weight_norms network_dropout vae_batch_size blocks_to_swap sdxl_blocks_to_swap
    fused_optimizer_groups max_train_epochs lr_scheduler_num_cycles t5xxl_max_token_length save_every_n_epochs
    save_every_n_steps save_last_n_epochs save_last_n_steps save_last_n_epochs_state save_last_n_steps_state
    sample_every_n_epochs sample_every_n_steps multires_noise_iterations
""")
# kohya_ss drops every 0 of a LoRA file, and trains with the script's default instead of what is on screen.
ZERO_WAS_DROPPED = names("""
    learning_rate max_grad_norm prior_loss_weight huber_c huber_scale lr_scheduler_power discrete_flow_shift
    guidance_scale multires_noise_discount
""")

_PAGE = "it belongs to the page of kohya_ss and never reached the training"
_LAUNCH = "it is for `accelerate launch`: set it beside the Train button, or give it to `kohya train`"
_PREPARE = "images and captions are read as they are; nothing has to be prepared"
_NOTHING = "no SDXL or FLUX.1 script reads it"
_DYNAMO = "it had no effect on SDXL and FLUX.1; compile is the switch for compiling"
_SD3 = "it is for SD3, which is not trained here"

IGNORED: dict[str, str] = {
    "model_list": _PAGE,
    "save_as_bool": _PAGE,
    "lowvram": _PAGE,
    "train_blocks": "kohya_ss never passes it on; network_args train_blocks=double does what it says",
    "num_cpu_threads_per_process": _LAUNCH,
    "num_processes": _LAUNCH,
    "num_machines": _LAUNCH,
    "multi_gpu": _LAUNCH,
    "gpu_ids": _LAUNCH,
    "main_process_port": _LAUNCH,
    "extra_accelerate_launch_args": _LAUNCH,
    "dynamo_backend": _DYNAMO,
    "dynamo_mode": _DYNAMO,
    "dynamo_use_fullgraph": _DYNAMO,
    "dynamo_use_dynamic": _DYNAMO,
    "train_inpainting": _NOTHING,
    "show_timesteps": _NOTHING,
    "show_timesteps_resolution": _NOTHING,
    "no_token_padding": _NOTHING,
    "stop_text_encoder_training": "SDXL and FLUX.1 scripts never stop a text encoder early",
    "stop_text_encoder_training_pct": "SDXL and FLUX.1 scripts never stop a text encoder early",
    "fp8_scaled": _NOTHING + "; fp8_base is the one that saves memory",
    "fp8_fast": _NOTHING + "; fp8_base is the one that saves memory",
    "disable_numpy_memmap": _NOTHING,
    "flux1_cache_text_encoder_outputs_on_cpu": _NOTHING,
    "conv_dims": "an old field; block ranks are conv_block_dims in network_args",
    "conv_alphas": "an old field; block ranks are conv_block_alphas in network_args",
    "resume_from_huggingface": "download the state and give its folder to resume",
    "batch_size": _PREPARE,
    "full_path": _PREPARE,
    "create_caption": _PREPARE,
    "create_buckets": _PREPARE,
    "generate_caption_database": _PREPARE,
    "generate_image_buckets": _PREPARE,
    **dict.fromkeys(
        [
            "clip_g",
            "clip_g_dropout_rate",
            "pos_emb_random_crop_rate",
            "save_clip",
            "save_t5xxl",
            "t5xxl_device",
            "t5xxl_dtype",
        ],
        _SD3,
    ),
}
# What the names of fields for other models begin with.
STRANGERS = {
    "sd3_": _SD3,
    "hunyuan_": "it is for HunyuanImage, which is not trained here",
    "anima_": "it is for Anima, which is not trained here",
    "lumina_": "it is for Lumina, which is not trained here",
}
# Model files and settings that mean SD3's in the files of the tabs DreamBooth and Finetune.
SD3_IN_FULL = {
    "clip_l": "in this tab it is SD3's; FLUX.1's is flux1_clip_l",
    "t5xxl": "in this tab it is SD3's; FLUX.1's is flux1_t5xxl",
}
# Keys that only the files of one tab have: of its later or earlier versions.
ONLY_FINETUNE = names("""
    batch_size block_lr caption_metadata_filename create_buckets create_caption dataset_repeats full_path
    generate_caption_database generate_image_buckets image_folder latent_metadata_filename train_dir train_text_encoder
    use_latent_files sdxl_checkbox
""")
ONLY_DREAMBOOTH = names("""
    enable_bucket lr_scheduler_num_cycles lr_scheduler_power max_grad_norm no_token_padding prior_loss_weight
    reg_data_dir sdxl sdxl_disable_mmap_load_safetensors advanced_disable_mmap_load_safetensors
    stop_text_encoder_training stop_text_encoder_training_pct train_data_dir vae
""")
OTHER_TABS = {
    ("num_vectors_per_token", "token_string", "init_word"): "Textual Inversion (an embedding)",
    ("prompts_file", "leco_denoise_guidance_scale"): "LECO (a slider or an erased concept)",
    ("cond_emb_dim", "lllite_mlp_dim", "conditioning_data_dir"): "ControlNet (LLLite)",
}
# kohya_ss's page starts with these, where the scripts and we have another default.
_STARTS: JsonObject = {
    "optimizer": "AdamW8bit",
    "lr_scheduler": "cosine",
    "lr_warmup": 10,
    "max_resolution": "512,512",
    "max_bucket_reso": 2048,
    "bucket_no_upscale": True,
    "mixed_precision": "fp16",
    "save_precision": "fp16",
    "caption_extension": ".txt",
    "enable_bucket": True,
    "cache_latents": True,
    "save_every_n_epochs": 1,
    "max_data_loader_n_workers": 0,
    "sample_sampler": "euler_a",
    "learning_rate": 1e-5,
}
_OF_TABS: dict[str, JsonObject] = {
    "lora": {"learning_rate": 1e-4, "unet_lr": 1e-4, "text_encoder_lr": 1e-4, "network_dim": 8, "network_alpha": 1},
    "dreambooth": {"save_model_as": "safetensors"},
    "finetune": {"lr_scheduler": "constant", "lr_warmup": 0, "max_bucket_reso": 1024, "dataset_repeats": 40,
                 "train_text_encoder": True, "save_model_as": "safetensors"},
}  # fmt: skip


def starts(tab: str, family: str, found: JsonMapping) -> JsonObject:
    """What the page of kohya_ss starts with in a tab, where a file says nothing about it."""
    values = _STARTS | _OF_TABS[tab]
    if family == "flux":
        values.pop("train_text_encoder", None)
    elif tab == "dreambooth":  # files from before these fields had one rate for all parts
        values |= dict.fromkeys(("learning_rate_te1", "learning_rate_te2"), found.get("learning_rate") or 1e-5)
    if "optimizer" not in found:  # older files have a switch instead, and loading them sets the optimizer
        values["optimizer"] = None if "use_8bit_adam" in found else "AdamW"
    if "max_train_steps" not in found and "epoch" not in found and "max_train_epochs" not in found:
        values["max_train_steps"] = 1600
    return {key: value for key, value in values.items() if found.get(key) is None and value is not None}
