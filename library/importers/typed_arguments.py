"""Flags that are no options of a script, but arguments of its optimizer or adapter."""

from library import families
from library.config.building import understood
from library.importers.builder import ImportBuilder
from library.importers.kohya_adapters import ADAPTERS, LORA_PLUS
from library.importers.result import KeyOutcome

ARGUMENTS = {
    "optimizer_args": {
        *("weight_decay", "betas", "eps", "momentum", "nesterov", "decouple", "use_bias_correction"),
        *("safeguard_warmup", "d_coef", "d0", "growth_rate", "relative_step", "scale_parameter", "warmup_init"),
    },
    "network_args": {
        *("algo", "preset", "ggpo_sigma", "ggpo_beta", "train_blocks", *LORA_PLUS),
        *(name for adapter in ADAPTERS.values() for name in adapter.all_fields()),
    },
}


def argument_of(name: str, script: str) -> str:
    """Return the option that takes an argument of this name; "" for options of the script and unknown names."""
    if name in understood(families.config_class(script)):
        return ""
    return next((option for option, names in ARGUMENTS.items() if name in names), "")


def add_argument(builder: ImportBuilder, key: str, option: str, name: str, value: bool | str | list[str]) -> None:
    """Add an argument to those of an option; it replaces one of the same name."""
    text = ",".join(value) if isinstance(value, list) else str(value)
    before = builder.values.get(option)
    listed = before if isinstance(before, list) else [before] if isinstance(before, str) else []
    kept = [argument for argument in listed if str(argument).partition("=")[0] != name]
    builder.values[option] = [*kept, f"{name}={text}"]
    builder.keys.setdefault(option, key)
    builder.outcomes[key] = KeyOutcome(key, "renamed", f"{option} {name}")
