"""The options and the hardware that decide the results of a training, compared when a run resumes from a state."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from library.config.json_types import JsonMapping, JsonObject, JsonValue
from library.config.problems import Message, MessageLike, option_name
from library.config.run_config import RunConfig
from library.config.schema import options_of

# Raise it with every change after which a training computes other numbers, if only by rounding: a resume from an older
# state then says that it may not be bit-exact. States of 0.3.0 and before have no such number.
ARITHMETIC = 2
# Sections that affect where files go or how fast a step is, but not its result.
ELSEWHERE = ("save", "sample", "validation", "metadata", "hub", "log", "compile", "memory", "distributed", "cache")
# What is kept for the backward pass: compiled blocks round recomputed values less often than kept ones.
KEEPING_OPTIONS = ("gradient_checkpointing", "checkpoint_keep_attention", "compile_activation_budget")
# Options that decide the kernels of compiled blocks, which differ in rounding. Offloading weights, as with
# blocks_to_swap, changes no number.
KERNEL_OPTIONS = (
    *("compile_backend", "compile_mode", "compile_scope", "compile_blocks", "compile_dynamic"),
    *KEEPING_OPTIONS,
)
# Modes that differ only in CUDA graphs, which replay the same kernels.
EQUAL_KERNELS = {"reduce-overhead": "default", "max-autotune-no-cudagraphs": "max-autotune"}
# Options of these sections that do change rounding or random draws.
ROUNDING_OPTIONS = (
    "compile",
    *KERNEL_OPTIONS,
    "compile_from_step",
    "cuda_allow_tf32",
    "attention_kernel",
    "fsdp",
    "cached_caption_variants",
)
# Whether images and captions are encoded once -> whether on disk, and how many at a time: in other batches the encoders
# round differently, and some VAEs draw another sample for each step. Where the result is kept makes no difference.
ENCODED_ONCE = {
    "cache_latents": ("cache_latents_to_disk", "vae_batch_size"),
    "cache_text_encoder_outputs": ("cache_text_encoder_outputs_to_disk", "text_encoder_batch_size"),
}
ENCODING_OPTIONS = (*ENCODED_ONCE, *(name for names in ENCODED_ONCE.values() for name in names))
# These and the options set by `auto_compute`, whose final values are known only after the start.
MEASURED = (
    *ROUNDING_OPTIONS,
    *ENCODING_OPTIONS,
    "auto_compute",
    "fp8_base",
    "fp8_base_unet",
    "fp8_compute",
    "int8_base",
    "int8_compute",
)
# Options of other sections that say only where to start or how data is read, or that the comparison of the data covers.
INDIFFERENT_OPTIONS = (
    *(
        "fp8_transposed_weights",
        "resume",
        "resume_from_huggingface",
        "initial_epoch",
        "initial_step",
        "skip_until_initial_step",
        "seed",
    ),
    *("max_data_loader_n_workers", "persistent_data_loader_workers", "cache_info", "debug_dataset", "dataset_class"),
    *("tokenizer_cache_dir", "disable_mmap_load_safetensors", "clip_skip", "training_comment", "no_metadata"),
    *("max_train_steps", "max_train_epochs", "network_weights", "dim_from_weights", "weights", "init_word"),
)
STEPS_OR_SHARES = ("lr_warmup_steps", "lr_decay_steps")  # 1 is one step, and 1.0 all of them
LENGTH = "number of steps"  # compared like an option if the schedule depends on it
FLAT = ("constant", "constant_with_warmup")  # schedules that do not depend on the number of steps


def deciding_options(config: RunConfig, total_steps: int) -> JsonObject:
    """Return the options that decide results as JSON values."""
    # Files and folders count by name only, as they may have moved.
    options = {}
    for name, option in options_of(type(config)).items():
        if (option.section in ELSEWHERE and name not in ROUNDING_OPTIONS) or name in INDIFFERENT_OPTIONS:
            continue
        value = getattr(getattr(config, option.section), name)
        is_path = option.hints.get("kind") in ("file", "folder")
        if not (is_path and option.section == "data"):  # images and captions themselves are compared
            options[name] = Path(value).name if is_path and value else value
    options |= _encoding_options(config) | _keeping_options(config)
    if config.optim.lr_scheduler not in FLAT or isinstance(config.optim.lr_warmup_steps, float):
        options[LENGTH] = total_steps
    return json.loads(json.dumps(options, default=str))  # as they are read from a state: tuples become lists


def _encoding_options(config: RunConfig) -> JsonObject:
    """Return how images and captions are encoded; batch sizes only where they are encoded once."""
    cache, options = config.cache, options_of(type(config))
    is_cached = dict(zip(ENCODED_ONCE, (cache.latents, cache.text), strict=True))
    chosen: JsonObject = {**is_cached}
    for name, (on_disk, batch) in ENCODED_ONCE.items():
        chosen[on_disk] = getattr(cache, on_disk)
        if is_cached[name] and batch in options:  # empty: the batch size of the training
            chosen[batch] = getattr(cache, batch) or config.data.train_batch_size
    return chosen


def _keeping_options(config: RunConfig) -> JsonObject:
    """Return what compiled blocks keep for the backward pass, from all options that decide it: swapped blocks keep
    nothing."""
    recomputed = config.memory.recomputes_all(config)
    attention = recomputed and config.memory.checkpoint_keep_attention
    return dict(zip(KEEPING_OPTIONS, (recomputed, attention, config.compile.compile_activation_budget), strict=True))


def inexact_differences(saved: JsonMapping, now: JsonMapping) -> Iterator[MessageLike]:
    """Yield a sentence for each setting of `MEASURED` that differs and keeps a resume from being exact."""
    unimportant = {on_disk for on_disk, _ in ENCODED_ONCE.values()}
    # Files that both runs read were encoded once.
    unimportant |= {batch for on_disk, batch in ENCODED_ONCE.values() if saved.get(on_disk) and now.get(on_disk)}
    if not (saved.get("compile") and now.get("compile")):
        unimportant |= {*KERNEL_OPTIONS}
    modes = [str(settings.get("compile_mode")) for settings in (saved, now)]
    before, after = (EQUAL_KERNELS.get(mode, mode) for mode in modes)
    unimportant |= {"compile_mode"} if before == after else set()
    names = [name for name in MEASURED if name in now and name not in unimportant]
    return compare_settings(saved, {name: now[name] for name in names})


def is_rescheduled(saved: JsonMapping, now: JsonMapping) -> bool:
    decisive = (name for name in now if name.startswith("lr_") or name == LENGTH)
    return any(_is_another(saved, name, now[name]) for name in decisive)


def computed_by(device: torch.device) -> dict[str, str]:
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"the device": kind, "torch": torch.__version__}


def compare_settings(saved: JsonMapping, now: JsonMapping) -> Iterator[MessageLike]:
    """Yield a sentence for each setting that differs. Skips options that one of the two program versions lacks."""
    for name, value in now.items():
        if _is_another(saved, name, value):
            yield Message(
                "{name} was {before} and is {now}",
                name=option_name(name),
                before=_setting_text(saved[name]),
                now=_setting_text(value),
            )


def _is_another(saved: JsonMapping, name: str, value: JsonValue) -> bool:
    if name not in saved:
        return False
    return saved[name] != value or (name in STEPS_OR_SHARES and type(saved[name]) is not type(value))


def _setting_text(value: Any) -> MessageLike:
    if isinstance(value, list):
        return " ".join(map(str, value)) or Message("not set")
    return Message("not set") if value is None else str(value).lower() if isinstance(value, bool) else str(value)
