"""The command that starts a training: `accelerate launch`, or the script itself if that would only set variables."""

import os
import sys
from pathlib import Path
from typing import Any

import psutil
import yaml

from library.config import environment
from library.config.command import Launch, check_launch_options, training_command

# Values of an `accelerate config` file with which a single process can be started without the launcher: the neutral
# value, or None if our own options take precedence.
WITHOUT_EFFECT = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "debug": False,
    "use_cpu": False,
    "enable_cpu_affinity": False,
    "downcast_bf16": False,
    "gpu_ids": "all",
    "machine_rank": 0,
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "tpu_env": [],
    "mixed_precision": None,
    "num_processes": None,
    "num_machines": None,
    "main_training_function": None,
    "rdzv_backend": None,
    "same_network": None,
}
# Variables of MPI by which accelerate divides CPU threads.
MPI = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


# The launcher imports PyTorch only to set eight variables: 2.2 s of CPU time, and 230 MB until the training ends.
# Why: docs/decisions/2026-11-22-one-process-without-a-launcher.md
def launch_command(config_path: str | Path, script: str, **how: Any) -> tuple[list[str], dict[str, str]]:
    """Return the arguments that train with a config file, and their environment variables; see `training_command`.

    Raises ConfigError for contradictory launch options.
    """
    arguments = training_command(config_path, script, **how)
    variables = _variables(check_launch_options(how))
    if variables is None:
        return arguments, {}
    return [sys.executable, *arguments[-3:]], variables


def _variables(launch: Launch) -> dict[str, str] | None:
    """Return the variables that `accelerate launch` would set for its only process; None if it would do more."""
    if launch.num_processes > 1 or launch.num_machines > 1 or launch.extra_accelerate_launch_args:
        return None
    if not launch.cpu and not _is_plain(_config_file()):
        return None
    threads_variable = os.environ.get("OMP_NUM_THREADS", "0")
    if not threads_variable.isdecimal() or any(name in os.environ for name in MPI):
        return None
    threads = launch.num_cpu_threads_per_process or int(threads_variable)
    if not threads and launch.cpu:
        threads = psutil.cpu_count(logical=False) or 1
    variables = {
        environment.DIRECT: "1",
        "ACCELERATE_USE_CPU": str(launch.cpu),
        "ACCELERATE_MIXED_PRECISION": launch.mixed_precision,
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
        "OMP_NUM_THREADS": str(threads or 1),
    }
    if launch.gpu_ids not in (None, "all"):
        variables["CUDA_VISIBLE_DEVICES"] = launch.gpu_ids
    if launch.cpu:
        variables |= {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
    return variables


def _config_file() -> Path:
    """Return the path of the answers to `accelerate config`."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
    return Path(os.path.expanduser(home), "accelerate", "default_config.yaml")


def _is_plain(path: Path) -> bool:
    """Return whether the file is missing, or configures nothing beyond a single process."""
    if path.with_suffix(".json").is_file():
        return False
    try:
        answers = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return True
    except (OSError, ValueError, yaml.YAMLError):
        return False
    if not isinstance(answers, dict) or "distributed_type" not in answers:
        return False
    return all(
        name in WITHOUT_EFFECT and (WITHOUT_EFFECT[name] is None or value == WITHOUT_EFFECT[name])
        for name, value in answers.items()
    )
