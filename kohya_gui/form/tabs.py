"""The training tabs: the kind of training of each, and the options on top of its form."""

from collections.abc import Mapping
from dataclasses import dataclass

from library import families
from library.downloads import finding
from library.families import RUNS, config_class

FAMILY_TITLES = {family.name: family.title for family in families.all_families()}
ROW_WIDTH = 6


@dataclass(frozen=True)
class Tab:
    """What distinguishes the training tabs."""

    id: str
    title: str
    kind: str  # of the configs that it trains
    basics: Mapping[str, int]  # the options on top, with their widths in sixths of a row

    @property
    def configs(self) -> dict[str, type]:
        """The config of each family that it trains."""
        config_classes = (config_class(script) for script in RUNS)
        of_kind = (config for config in config_classes if config.kind == self.kind)
        return {config.family: config for config in of_kind if self.id in (config.tabs or (self.id,))}


def _rows(*rows: str) -> dict[str, int]:
    """Return the widths of options in rows below the base model: equal ones, except of options written as
    name:width."""
    widths = {finding.MODEL_OPTION: ROW_WIDTH}
    for row in rows:
        for part in row.split():
            name, _, width = part.partition(":")
            widths[name] = int(width or ROW_WIDTH // len(row.split()))
    return widths


TABS = (
    Tab(
        "lora",
        "LoRA",
        "lora",
        _rows(
            "train_data_dir",
            "control_directory",
            "output_dir:4 output_name:2",
            "resolution train_batch_size max_train_steps",
            "network_dim learning_rate",
            "sample_images",
        ),
    ),
    Tab(
        "dreambooth",
        "DreamBooth",
        "finetune",
        _rows(
            "train_data_dir reg_data_dir",
            "output_dir:4 output_name:2",
            "resolution max_train_steps learning_rate",
            "sample_images",
        ),
    ),
    Tab(
        "finetune",
        "Finetune",
        "finetune",
        _rows(
            "in_json train_data_dir",
            "dataset_config",
            "output_dir:4 output_name:2",
            "resolution train_batch_size",
            "max_train_steps learning_rate mixed_precision",
            "sample_images",
        ),
    ),
    Tab(
        "textual-inversion",
        "Textual inversion",
        "textual-inversion",
        _rows(
            "train_data_dir",
            "output_dir:4 output_name:2",
            "token_string init_word num_vectors_per_token",
            "resolution train_batch_size",
            "max_train_steps learning_rate",
            "sample_images",
        ),
    ),
    Tab(
        "lllite",
        "LLLite",
        "lllite",
        _rows(
            "train_data_dir conditioning_data_dir",
            "output_dir:4 output_name:2",
            "network_dim cond_emb_dim",
            "resolution max_train_steps learning_rate",
            "sample_images",
        ),
    ),
)
FIRST_KIND = TABS[0].id  # open on a first visit


def tab_of_kind(kind: str, has_data_file: bool) -> str:
    """Return the tab of a kind of training, whose images a file may describe."""
    if kind != "finetune":
        return kind
    return "finetune" if has_data_file else "dreambooth"


def in_order_of_kohya_ss() -> list[Tab]:
    """Return the tabs in kohya_ss's order, followed by those that it lacks."""
    order = ("dreambooth", "lora", "textual-inversion", "finetune", "lllite")
    return sorted(TABS, key=lambda tab: order.index(tab.id))
