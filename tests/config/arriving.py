"""What the tests of imports share: short files of other trainers, and what differs from the expected settings."""

from library import importers
from library.config import dataset
from library.config.building import build_config
from library.config.schema import option_values
from library.families import RUNS, config_class

CONFIGS = {script: config_class(script) for script in RUNS}
SDXL_LORA = {"model_type": "STABLE_DIFFUSION_XL_10_BASE", "training_method": "LORA"}
FLUX_AI = {"network.type": "lora", "model.name_or_path": "dev.safetensors", "model.is_flux": True}


def arrived(content):
    return option_values(importers.import_content(content, CONFIGS).config)


def differing(config, expected):
    """The options that differ -> (what the config has, what is expected)."""
    return {name: (config.get(name), value) for name, value in expected.items() if config.get(name) != value}


def nested(pairs):
    """Keys with dots -> tables in tables."""
    tables: dict = {}
    for key, value in pairs.items():
        table, names = tables, key.split(".")
        for name in names[:-1]:
            table = table.setdefault(name, {})
        table[names[-1]] = value
    return tables


def of_aitoolkit(pairs, kind="sd_trainer", job="extension"):
    """A file of ai-toolkit with one process."""
    process = {"type": kind, "training_folder": "out", **nested(pairs)}
    return {"job": job, "config": {"name": "cat", "process": [process]}}


def sets_of(path, script="sdxl_train_network", **values):
    """The data sets that a training with these settings reads from a dataset file."""
    return dataset.load_datasets(
        build_config(CONFIGS[script], {"dataset_config": str(path), "masked_loss": True, **values}, notes=[])
    )
