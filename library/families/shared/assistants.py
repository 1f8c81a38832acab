"""Assistant LoRAs, with which a distilled model is trained so that it stays distilled."""

from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.families.facts import HubLora


def lacks_assistant(config: RunConfig) -> bool:
    """Return whether nothing keeps a distilled model distilled; base_weights may hold what does."""
    return not (isinstance(config, AdapterRun) and (config.network.assistant_lora or config.network.base_weights))


def assistant_fix(config: RunConfig, lora: HubLora) -> JsonObject:
    """Return the fix with this assistant, if the training can have one."""
    return {"assistant_lora": lora.value} if takes_assistant(config) else {}


def takes_assistant(config: RunConfig) -> bool:
    """Return whether a distilled model can be trained with an assistant: a fine-tune has no place for one."""
    return isinstance(config, AdapterRun)
