"""What the tests of imports share: files of other trainers in a few words, and what differs from what should arrive."""

from library import importers
from library.config import dataset
from library.config.building import build_config
from library.config.schema import option_values
from library.families import RUNS, config_class

CONFIGS = {script: config_class(script) for script in RUNS}
SDXL_LORA = {"model_type": "STABLE_DIFFUSION_XL_10_BASE", "training_method": "LORA"}
FLUX_AI = {"network.type": "lora", "model.name_or_path": "dev.safetensors", "model.is_flux": True}


def arrived(found):
    """A file's settings here, by option."""
    return option_values(importers.import_content(found, CONFIGS).config)


def differing(config, expected):
    """The options that are not as expected: what they are, and what they should be."""
    return {name: (config.get(name), value) for name, value in expected.items() if config.get(name) != value}


def nested(pairs):
    """Keys with dots -> tables in tables."""
    out: dict = {}
    for key, value in pairs.items():
        table, names = out, key.split(".")
        for name in names[:-1]:
            table = table.setdefault(name, {})
        table[names[-1]] = value
    return out


def of_aitoolkit(pairs, kind="sd_trainer", job="extension"):
    """A file of ai-toolkit with one process."""
    process = {"type": kind, "training_folder": "out", **nested(pairs)}
    return {"job": job, "config": {"name": "cat", "process": [process]}}


def sets_of(path, script="sdxl_train_network", **given):
    """The data sets of a dataset file, of a training with these settings."""
    return dataset.load_datasets(
        build_config(CONFIGS[script], {"dataset_config": str(path), "masked_loss": True, **given}, notes=[])
    )
