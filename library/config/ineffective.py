"""Options without effect because of other options, and why. A form greys them out; the trainer ignores them.

A rule covers one or several options and names the option that would enable them, so that a reader knows what to change.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from library.config.problems import Message, MessageLike, Problem, as_message, option_name
from library.config.run_config import INEFFECTIVE_EVERYWHERE, Rule, RunConfig
from library.config.schema import option_values, options_of
from library.config.sections import AdapterRun, EmbeddingRun


def remark(name: str, reason: MessageLike, **arguments: Any) -> Problem:
    message = reason if isinstance(reason, Message) else Message(reason, **arguments)
    return Problem(name, "has no effect here: {reason}", reason=message, code="ineffective")


# One table serves the form, the run's record, and a test that every option is read or listed here.
# Why: docs/decisions/2026-11-20-one-table-of-ineffective-options.md
# Such fields are greyed but usable, as a disabled field could not be corrected.
# Why: docs/decisions/2026-11-20-ineffective-fields-stay-usable.md
def remarks(config: RunConfig, other_remarks: Iterable[MessageLike]) -> Iterator[Problem]:
    """Return a remark on each set option without effect, unless other remarks cover it."""
    covered = {name for other in other_remarks if isinstance(other, Problem) for name in other.options}
    ineffective, options = ineffective_options(config), options_of(type(config))
    for name, value in option_values(config).items():
        if name in ineffective and name not in covered and value != options[name].default:
            yield remark(name, ineffective[name]).replaced(fix={name: options[name].default})


def ineffective_options(config: RunConfig) -> dict[str, Message]:
    """Return options without effect -> the reason, a text that continues "No effect:"."""
    options = options_of(type(config))
    fixed = {**INEFFECTIVE_EVERYWHERE, **config.ineffective}
    reasons = {name: reason for name, reason in fixed.items() if name in options}
    for names, applies, reason in _rules(config):
        if not applies(config):
            reasons |= {name: reason for name in names.split() if name in options and name not in reasons}
    return {name: as_message(reason) for name, reason in reasons.items()}


def of_model(config: RunConfig) -> dict[str, MessageLike]:
    """Return the options that have no effect on this model -> the reason."""
    rules = (rule for rule in config.ineffective_rules if not rule[1](config))
    return {**{name: reason for names, _, reason in rules for name in names.split()}, **config.ineffective}


def _rules(config: RunConfig) -> Iterator[Rule]:
    yield from SHARED
    yield from config.ineffective_rules
    yield from ADAPTER_RULES if config.adapters else WHOLE_MODEL_RULES
    yield from ADAPTERS if isinstance(config, AdapterRun) else ()
    yield from EMBEDDING_RULES if isinstance(config, EmbeddingRun) else ()


def _uses_scheduler(config: RunConfig, *names: str) -> bool:
    return bool(config.optim.lr_scheduler_type) or config.optim.lr_scheduler.split(":")[0] in names


# How samples are generated.
GENERATION = " ".join(
    (
        "sample_sampler sample_steps sample_scale sample_guidance_scale sample_shift sample_sigmas sample_lora",
        "sample_batch_size sample_cache sample_attention sample_compile",
    )
)
CYCLES = ("cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay")


def _splits_tags(config: RunConfig) -> bool:
    """Return whether captions are split into tags: shuffled, dropped or warmed up; a subset may enable that, too."""
    captions = config.captions
    return bool(
        captions.shuffle_caption
        or captions.caption_tag_dropout_rate
        or captions.token_warmup_step
        or config.data.dataset_config
    )


def _uses_shared_rate(config: AdapterRun) -> bool:
    """Return whether a part of the adapters uses learning_rate, because it has no rate of its own."""
    network, optim = config.network, config.optim
    image = optim.unet_lr is None and not network.network_train_text_encoder_only
    return image or (not optim.text_encoder_lr and not network.network_train_unet_only)


def _saves_by_epochs(config: RunConfig) -> bool:
    return bool(config.save.save_every_n_epochs or config.save.save_n_epoch_ratio)


def _compiles_samples(config: RunConfig) -> bool:
    return config.sample.wanted and config.sample.sample_compile == "true"


SHARED: tuple[Rule, ...] = (
    (
        "compile_fallback compile_scope compile_activation_budget compile_compare_steps compile_warmup "
        "compile_from_step",
        lambda c: c.compile.compile or c.compile.compile_autotune,
        Message("{option} is off", option=option_name("compile")),
    ),
    (
        "compile_backend compile_mode compile_dynamic compile_fullgraph compile_cache_size_limit compile_cache_dir "
        "compile_blocks",
        lambda c: c.compile.compile or c.compile.compile_autotune or _compiles_samples(c),
        Message("{option} is off", option=option_name("compile")),
    ),
    ("compile_mode", lambda c: c.compile.compile_backend == "inductor", "only inductor has modes"),
    ("checkpoint_keep_attention", lambda c: c.memory.checkpointing, "gradient_checkpointing is off"),
    ("train_data_dir reg_data_dir in_json", lambda c: not c.data.dataset_config, "dataset_config describes the images"),
    (
        "reg_data_dir caption_extension cache_info",
        lambda c: not c.data.in_json or c.data.dataset_config,
        "in_json describes the images",
    ),
    (
        "min_bucket_reso max_bucket_reso bucket_reso_steps bucket_no_upscale",
        lambda c: c.data.enable_bucket or c.data.dataset_config,
        "enable_bucket is off",
    ),
    (
        "min_bucket_reso max_bucket_reso",
        lambda c: not c.data.bucket_no_upscale,
        "bucket_no_upscale cuts each image to its own size",
    ),
    ("keep_tokens", _splits_tags, "shuffle_caption and caption_tag_dropout_rate are off"),
    (
        "caption_separator",
        lambda c: (
            _splits_tags(c) or c.captions.secondary_separator or c.captions.keep_tokens_separator or c.data.in_json
        ),
        "shuffle_caption and caption_tag_dropout_rate are off",
    ),
    ("prior_loss_weight", lambda c: c.data.reg_data_dir or c.data.dataset_config, "reg_data_dir is not set"),
    ("token_warmup_min", lambda c: c.captions.token_warmup_step or c.data.dataset_config, "token_warmup_step is 0"),
    ("cached_caption_variants", lambda c: c.cache.text, "cache_text_encoder_outputs is off"),
    (
        "cached_caption_variants",
        lambda c: (
            c.captions.shuffle_caption
            or c.captions.caption_tag_dropout_rate
            or c.captions.enable_wildcard
            or c.data.dataset_config
        ),
        "shuffle_caption, caption_tag_dropout_rate and enable_wildcard are off",
    ),
    ("text_encoder_batch_size", lambda c: c.cache.text, "cache_text_encoder_outputs is off"),
    ("persistent_data_loader_workers", lambda c: c.data.max_data_loader_n_workers, "max_data_loader_n_workers is 0"),
    ("no_half_vae", lambda c: c.precision.mixed_precision != "no", "mixed_precision = no computes in float32 anyway"),
    ("vae_batch_size", lambda c: c.cache.latents, "cache_latents is off"),
    (
        "skip_cache_check",
        lambda c: c.cache.cache_latents_to_disk or c.cache.cache_text_encoder_outputs_to_disk,
        "nothing is cached to disk",
    ),
    ("noise_offset_random_strength", lambda c: c.noise.noise_offset, "noise_offset is not set"),
    ("multires_noise_discount", lambda c: c.noise.multires_noise_iterations, "multires_noise_iterations is not set"),
    ("ip_noise_gamma_random_strength", lambda c: c.noise.ip_noise_gamma, "ip_noise_gamma is not set"),
    (
        "normalize_masked_area_loss",
        lambda c: c.data.masked_loss or c.data.alpha_mask or c.data.dataset_config,
        "masked_loss and alpha_mask are off",
    ),
    (
        "huber_schedule huber_c huber_scale",
        lambda c: c.loss.loss_type in ("huber", "smooth_l1"),
        "loss_type is neither huber nor smooth_l1",
    ),
    ("huber_scale", lambda c: c.loss.huber_schedule != "snr", "huber_schedule = snr has no factor"),
    ("lr_scheduler_num_cycles", lambda c: _uses_scheduler(c, *CYCLES), "lr_scheduler has no cycles"),
    ("lr_scheduler_power", lambda c: _uses_scheduler(c, "polynomial"), "lr_scheduler is not polynomial"),
    ("lr_scheduler_timescale", lambda c: _uses_scheduler(c, "inverse_sqrt"), "lr_scheduler is not inverse_sqrt"),
    (
        "lr_scheduler_min_lr_ratio",
        lambda c: _uses_scheduler(c, "cosine_with_min_lr", "warmup_stable_decay"),
        "lr_scheduler has no lowest rate",
    ),
    ("lr_warmup_steps", lambda c: not c.optim.without_schedule, "this optimizer follows no schedule"),
    ("lr_decay_steps", lambda c: _uses_scheduler(c, "warmup_stable_decay"), "lr_scheduler is not warmup_stable_decay"),
    ("lr_scheduler", lambda c: not c.optim.lr_scheduler_type, "lr_scheduler_type names another"),
    ("ema_every_n_steps ema_device", lambda c: c.optim.ema_decay, "ema_decay is 0"),
    ("max_train_steps", lambda c: not c.steps.max_train_epochs, "max_train_epochs decides"),
    ("save_every_n_epochs", lambda c: not c.save.save_n_epoch_ratio, "save_n_epoch_ratio decides"),
    (
        "save_from_step",
        lambda c: c.save.save_every_n_steps or _saves_by_epochs(c),
        "nothing is saved every N steps or epochs",
    ),
    ("save_last_n_epochs save_last_n_epochs_state", _saves_by_epochs, "save_every_n_epochs is not set"),
    ("save_last_n_steps save_last_n_steps_state", lambda c: c.save.save_every_n_steps, "save_every_n_steps is not set"),
    ("save_last_n_epochs_state save_last_n_steps_state", lambda c: c.save.save_state, "save_state is off"),
    (
        f"sample_prompts sample_from_captions sample_every_n_epochs sample_every_n_steps sample_at_first {GENERATION}",
        lambda c: c.sample.sample_images,
        "sample_images is off",
    ),
    ("sample_from_captions", lambda c: not c.sample.sample_prompts, "sample_prompts names the prompts"),
    (GENERATION, lambda c: c.sample.wanted, "neither sample_prompts nor sample_from_captions is set"),
    ("sample_steps sample_shift", lambda c: not c.sample.sample_sigmas, "sample_sigmas decides"),
    ("sample_every_n_steps", lambda c: not c.sample.sample_every_n_epochs, "sample_every_n_epochs decides"),
    ("log_tracker_name log_config", lambda c: c.log.logging_dir or c.log.log_with, "logging_dir is not set"),
    ("logging_dir log_prefix", lambda c: c.log.log_with != "wandb", "log_with = wandb has no folder of its own"),
    ("log_prefix", lambda c: c.log.logging_dir, "logging_dir is not set"),
    ("log_tracker_config", lambda c: c.log.log_with in ("wandb", "all"), "log_with is not wandb"),
    ("wandb_run_name wandb_api_key", lambda c: c.log.log_with in ("wandb", "all"), "log_with is not wandb"),
    (
        "huggingface_repo_type huggingface_path_in_repo huggingface_token huggingface_repo_visibility "
        "save_state_to_huggingface async_upload",
        lambda c: c.hub.huggingface_repo_id,
        "huggingface_repo_id is not set",
    ),
)

ADAPTER_RULES: tuple[Rule, ...] = (
    ("int8_rotation", lambda c: c.precision.int8_compute or c.precision.auto_compute, "int8_compute is off"),
    ("fp8_transposed_weights", lambda c: c.precision.fp8_compute or c.precision.auto_compute, "fp8_compute is off"),
    ("fp8_transposed_weights", lambda c: not c.memory.blocks_to_swap, "blocks_to_swap saves memory"),
    ("fused_backward_pass", lambda c: False, "adapters have few gradients to save"),
)

EMBEDDING_RULES: tuple[Rule, ...] = (
    (
        "shuffle_caption caption_tag_dropout_rate caption_prefix caption_suffix enable_wildcard token_warmup_step "
        "secondary_separator",
        lambda c: not c.caption_change.sentences,
        "ready sentences take the place of captions",
    ),
    ("init_word", lambda c: not c.embedding.weights, "weights says where to begin"),
)

ADAPTERS: tuple[Rule, ...] = (
    ("network_dim", lambda c: not c.network.dim_from_weights, "dim_from_weights takes the ranks from the file"),
    ("preserve_prompt", lambda c: c.preservation, "preserve_weight is 0"),
    ("training_comment", lambda c: not c.network.no_metadata, "no_metadata is on"),
    ("learning_rate", _uses_shared_rate, "unet_lr and text_encoder_lr decide"),
    ("text_encoder_lr", lambda c: not c.network.network_train_unet_only, "network_train_unet_only is on"),
    ("unet_lr", lambda c: not c.network.network_train_text_encoder_only, "network_train_text_encoder_only is on"),
    ("base_weights_multiplier", lambda c: c.network.base_weights, "base_weights is not set"),
    (
        "max_validation_steps validation_seed validate_every_n_steps validate_every_n_epochs",
        lambda c: c.validation.validation_split or c.data.dataset_config,
        "validation_split is 0",
    ),
)

WHOLE_MODEL_RULES: tuple[Rule, ...] = (
    (
        "fp8_base int8_base fp8_compute fp8_transposed_weights int8_compute int8_rotation auto_compute",
        lambda c: False,
        "the whole model is trained, which needs more than 8 bits",
    ),
    (
        "use_safetensors",
        lambda c: c.save.save_model_as is None and not c.save.only_safetensors,
        "save_model_as, or the base model, decides",
    ),
    ("learning_rate_te1 learning_rate_te2", lambda c: c.trains_whole_encoders, "train_text_encoder is off"),
    ("learning_rate_te", lambda c: c.trains_whole_encoders, "the text encoder is not trained"),
)
