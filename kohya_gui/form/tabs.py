"""The training tabs, and the options on top of each."""

from collections.abc import Mapping
from dataclasses import dataclass

from library import families
from library.downloads import finding
from library.families import RUNS, config_class

FAMILIES = {family.name: family.title for family in families.every()}
BASE = {finding.BASE: 6}


@dataclass(frozen=True)
class Tab:
    """What tells the training tabs apart."""

    id: str
    title: str
    kind: str  # of the configs that it trains
    basics: Mapping[str, int]  # the options on top, and the sixths of a row that each takes

    @property
    def configs(self) -> dict[str, type]:
        """The config class of each family in this tab."""
        made = (config_class(script) for script in RUNS)
        return {config.family: config for config in made if config.kind == self.kind}


TABS = (
    Tab(
        "lora",
        "LoRA",
        "lora",
        {
            **BASE,
            "train_data_dir": 3,
            "output_dir": 3,
            "output_name": 2,
            "resolution": 2,
            "train_batch_size": 2,
            "max_train_steps": 2,
            "network_dim": 2,
            "learning_rate": 2,
            "sample_images": 6,
        },
    ),
    Tab(
        "dreambooth",
        "DreamBooth",
        "finetune",
        {
            **BASE,
            "train_data_dir": 3,
            "reg_data_dir": 3,
            "output_dir": 4,
            "output_name": 2,
            "resolution": 2,
            "max_train_steps": 2,
            "learning_rate": 2,
            "sample_images": 6,
        },
    ),
    Tab(
        "finetune",
        "Finetune",
        "finetune",
        {
            **BASE,
            "in_json": 3,
            "train_data_dir": 3,
            "dataset_config": 3,
            "output_dir": 3,
            "output_name": 2,
            "resolution": 2,
            "train_batch_size": 2,
            "max_train_steps": 2,
            "learning_rate": 2,
            "mixed_precision": 2,
            "sample_images": 6,
        },
    ),
    Tab(
        "textual-inversion",
        "Textual inversion",
        "textual-inversion",
        {
            **BASE,
            "train_data_dir": 3,
            "output_dir": 3,
            "token_string": 2,
            "init_word": 2,
            "num_vectors_per_token": 2,
            "output_name": 2,
            "resolution": 2,
            "train_batch_size": 2,
            "max_train_steps": 3,
            "learning_rate": 3,
            "sample_images": 6,
        },
    ),
    Tab(
        "lllite",
        "LLLite",
        "lllite",
        {
            **BASE,
            "train_data_dir": 3,
            "conditioning_data_dir": 3,
            "output_dir": 4,
            "output_name": 2,
            "network_dim": 3,
            "cond_emb_dim": 3,
            "resolution": 2,
            "max_train_steps": 2,
            "learning_rate": 2,
            "sample_images": 6,
        },
    ),
)
