"""Assistant LoRAs, with which a distilled model is trained so that it stays distilled."""

from collections.abc import Iterator

from library.config.json_types import JsonObject
from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.families.facts import HubLora


def lacks_assistant(config: RunConfig) -> bool:
    """Return whether nothing keeps a distilled model distilled: base_weights may hold what does, and preserve_weight
    keeps its predictions.
    """
    if not isinstance(config, AdapterRun):
        return True
    return not (config.network.assistant_lora or config.network.base_weights or config.preservation)


def idle_assistant(config: RunConfig, title: str) -> Iterator[Problem]:
    """Remark on an assistant beside a model that is not distilled, by its title."""
    if isinstance(config, AdapterRun) and config.network.assistant_lora:
        yield Problem(
            "assistant_lora",
            "is for distilled models, and {title} is not one: leave it out, or the LoRA learns on a changed model",
            title=title,
            fix={"assistant_lora": None},
        )


def assistant_fix(config: RunConfig, lora: HubLora) -> JsonObject:
    """Return the fix with this assistant, if the training can have one."""
    return {"assistant_lora": lora.value} if takes_assistant(config) else {}


def takes_assistant(config: RunConfig) -> bool:
    """Return whether a distilled model can be trained with an assistant: a fine-tune has no place for one."""
    return isinstance(config, AdapterRun)
