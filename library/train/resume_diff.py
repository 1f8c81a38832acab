"""What decides the numbers of a training, so that a resumed one can say what keeps it from going on exactly."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from library.config.schema import options

# Sections that decide where files go and how fast it is, but no number.
ELSEWHERE = ("save", "sample", "validation", "metadata", "hub", "log", "compile", "memory", "distributed", "cache")
# Of the others: what says where to start, how data is read, or is part of what the data themselves are compared by.
NO_MATTER = (
    *("resume", "resume_from_huggingface", "initial_epoch", "initial_step", "skip_until_initial_step", "seed"),
    *("max_data_loader_n_workers", "persistent_data_loader_workers", "cache_info", "debug_dataset", "dataset_class"),
    *("tokenizer_cache_dir", "disable_mmap_load_safetensors", "clip_skip", "training_comment", "no_metadata"),
    *("max_train_steps", "max_train_epochs", "network_weights", "dim_from_weights"),
)
FLAT = ("constant", "constant_with_warmup")  # schedules that do not look at the length of the training


def settings(config: Any, total_steps: int) -> dict[str, Any]:
    """The options that decide numbers, as JSON knows them; of files and folders the name, as they may move."""
    found = {}
    for name, option in options(type(config)).items():
        if option.section in ELSEWHERE or name in NO_MATTER:
            continue
        value = getattr(getattr(config, option.section), name)
        is_path = option.hints.get("kind") in ("file", "folder")
        if not (is_path and option.section == "data"):  # images and captions themselves are compared
            found[name] = Path(value).name if is_path and value else value
    if config.optim.lr_scheduler not in FLAT or isinstance(config.optim.lr_warmup_steps, float):
        found["number of steps"] = total_steps
    return json.loads(json.dumps(found, default=str))


def differences(known: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What is not as it was. Options that one of the two versions of this program does not have are left out."""
    for name, value in now.items():
        if name in known and known[name] != value:
            yield f"{name} was {_shown(known[name])} and is {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "not set"
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
