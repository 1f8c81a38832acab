"""Search all settings, with the words of people who come from another page."""

import pytest

# Labels of kohya_ss's page -> the setting among the first three.
KOHYA_LABELS = {
    "Pretrained model name or path": "pretrained_model_name_or_path",
    "Image folder (containing training images subfolders)": "train_data_dir",
    "Dataset config file": "dataset_config",
    "Trained Model output name": "output_name",
    "Training comment": "training_comment",
    "Save trained model as": "save_model_as",
    "Save precision": "save_precision",
    "Logging directory": "logging_dir",
    "Regularisation directory": "reg_data_dir",
    "Output directory for trained model": "output_dir",
    "Train batch size": "train_batch_size",
    "Max train epoch": "max_train_epochs",
    "Max train steps": "max_train_steps",
    "Save every N epochs": "save_every_n_epochs",
    "Cache latents": "cache_latents",
    "Cache latents to disk": "cache_latents_to_disk",
    "LR Scheduler": "lr_scheduler",
    "LR # cycles": "lr_scheduler_num_cycles",
    "LR power": "lr_scheduler_power",
    "LR warmup steps": "lr_warmup_steps",
    "Optimizer extra arguments": "optimizer_args",
    "LR scheduler extra arguments": "lr_scheduler_args",
    "Max grad norm": "max_grad_norm",
    "Max resolution": "resolution",
    "Enable buckets": "enable_bucket",
    "Minimum bucket resolution": "min_bucket_reso",
    "Maximum bucket resolution": "max_bucket_reso",
    "Text Encoder learning rate": "text_encoder_lr",
    "Unet learning rate": "unet_lr",
    "No half VAE": "no_half_vae",
    "Cache text encoder outputs": "cache_text_encoder_outputs",
    "Network Rank (Dimension)": "network_dim",
    "Network Alpha": "network_alpha",
    "LoRA network weights": "network_weights",
    "DIM from weights": "dim_from_weights",
    "Scale weight norms": "scale_weight_norms",
    "Network dropout": "network_dropout",
    "Gradient accumulate steps": "gradient_accumulation_steps",
    "Gradient checkpointing": "gradient_checkpointing",
    "Prior loss weight": "prior_loss_weight",
    "Keep n tokens": "keep_tokens",
    "Max Token Length": "max_token_length",
    "Full fp16 training (experimental)": "full_fp16",
    "Full bf16 training (experimental)": "full_bf16",
    "Shuffle caption": "shuffle_caption",
    "Persistent data loader": "persistent_data_loader_workers",
    "Max num workers for DataLoader": "max_data_loader_n_workers",
    "Don't upscale bucket resolution": "bucket_no_upscale",
    "Bucket resolution steps": "bucket_reso_steps",
    "Random crop instead of center crop": "random_crop",
    "Min SNR gamma": "min_snr_gamma",
    "Debiased Estimation loss": "debiased_estimation_loss",
    "Noise offset": "noise_offset",
    "Adaptive noise scale": "adaptive_noise_scale",
    "Multires noise iterations": "multires_noise_iterations",
    "IP noise gamma": "ip_noise_gamma",
    "Dropout caption every n epochs": "caption_dropout_every_n_epochs",
    "Rate of caption dropout": "caption_dropout_rate",
    "VAE batch size": "vae_batch_size",
    "Save training state": "save_state",
    "Resume from saved training state": "resume",
    "Sample every n steps": "sample_every_n_steps",
    "Sample prompts": "sample_prompts",
    "Sample sampler": "sample_sampler",
}


@pytest.mark.browser
def test_a_setting_is_found_by_its_label_in_kohya_ss(visit):
    page = visit().page
    box, rows = page.locator(".search input:visible"), page.locator(".search [role=listbox]:visible li")
    missed = {}
    for words, option in KOHYA_LABELS.items():
        box.fill(words)
        if option not in (names := rows.locator("code").all_inner_texts()[:3]):
            missed[words] = names
    assert not missed
