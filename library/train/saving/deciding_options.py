"""The options and the machine that decide the results of a training, to compare a saved state with a resuming run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import Message, MessageLike, option_name
from library.config.run_config import RunConfig
from library.config.schema import options

# Sections whose options decide where files go or how fast a step is, but not its result.
ELSEWHERE = ("save", "sample", "validation", "metadata", "hub", "log", "compile", "memory", "distributed", "cache")
# Options of these sections that change rounding, or what is drawn.
ROUNDING = ("compile", "compile_from_step", "cuda_allow_tf32", "attention_kernel", "fsdp", "cached_caption_variants")
# These, and options that `auto_compute` sets: what is used is known when a training has started.
MEASURED = (*ROUNDING, "auto_compute", "fp8_base", "fp8_base_unet", "fp8_compute", "int8_base", "int8_compute")
# Options of other sections that only say where to start or how data is read, or that the comparison of the data covers.
NO_MATTER = (
    *("resume", "resume_from_huggingface", "initial_epoch", "initial_step", "skip_until_initial_step", "seed"),
    *("max_data_loader_n_workers", "persistent_data_loader_workers", "cache_info", "debug_dataset", "dataset_class"),
    *("tokenizer_cache_dir", "disable_mmap_load_safetensors", "clip_skip", "training_comment", "no_metadata"),
    *("max_train_steps", "max_train_epochs", "network_weights", "dim_from_weights", "weights", "init_word"),
)
LENGTH = "number of steps"  # stands beside the options where the schedule depends on it
FLAT = ("constant", "constant_with_warmup")  # schedules that do not depend on the number of steps


def deciding_options(config: RunConfig, total_steps: int) -> JsonObject:
    """The options that decide results, as JSON values; of files and folders the name alone, as they may have moved."""
    found = {}
    for name, option in options(type(config)).items():
        if (option.section in ELSEWHERE and name not in ROUNDING) or name in NO_MATTER:
            continue
        value = getattr(getattr(config, option.section), name)
        is_path = option.hints.get("kind") in ("file", "folder")
        if not (is_path and option.section == "data"):  # images and captions themselves are compared
            found[name] = Path(value).name if is_path and value else value
    if config.optim.lr_scheduler not in FLAT or isinstance(config.optim.lr_warmup_steps, float):
        found[LENGTH] = total_steps
    return json.loads(json.dumps(found, default=str))


def is_rescheduled(known: JsonMapping, now: JsonMapping) -> bool:
    """Whether an option of the learning rate's course differs, or the number of steps that it depends on."""
    decisive = (name for name in now if name.startswith("lr_") or name == LENGTH)
    return any(name in known and known[name] != now[name] for name in decisive)


def computed_by(device: torch.device) -> dict[str, str]:
    """What determines rounding: the kind of device, and PyTorch's version."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"the device": kind, "torch": torch.__version__}


def differences(known: JsonMapping, now: JsonMapping) -> Iterator[MessageLike]:
    """A sentence for each setting that differs. Options that one of the two versions of this program lacks are
    skipped."""
    for name, value in now.items():
        if name in known and known[name] != value:
            yield Message(
                "{name} was {before} and is {now}",
                name=option_name(name),
                before=_shown(known[name]),
                now=_shown(value),
            )


def _shown(value: Any) -> MessageLike:
    if isinstance(value, list):
        return " ".join(map(str, value)) or Message("not set")
    return Message("not set") if value is None else str(value).lower() if isinstance(value, bool) else str(value)
