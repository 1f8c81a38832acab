"""kohya_ss's LoRA_type and its fields <-> network_module and network_args."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from library.config.converted import convert_blocks_to_swap
from library.config.json_types import JsonMapping, JsonObject, JsonValue
from library.config.problems import Message, join_messages
from library.importers.builder import ImportBuilder, to_number
from library.importers.result import KeyOutcome
from library.importers.shared import load_tables

KOHYA_TABLES = load_tables("kohya_ss")
DROPOUTS: list[str] = KOHYA_TABLES["adapter_fields"]["dropouts"]
LORA_PLUS = ["loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio"]
# Where kohya_ss's field and the argument have different names.
ARGUMENTS: Mapping[str, str] = KOHYA_TABLES["arguments"]
FIELDS = {argument: key for key, argument in ARGUMENTS.items()}
# Values that are the adapter's defaults.
SILENT: JsonMapping = {"preset": "full", "factor": -1} | dict.fromkeys(
    ("train_double_block_indices", "train_single_block_indices"), "all"
)


@dataclass(frozen=True, slots=True)
class AdapterType:
    """One LoRA_type: its equivalent, and the fields of kohya_ss's page that are its arguments."""

    module: str
    groups: Sequence[str] = ()  # of fields, in the table adapter_fields
    fields: Sequence[str] = ()  # besides those
    algo: str = ""
    said: str = ""  # how it differs from its name

    def all_fields(self) -> list[str]:
        return [*(name for group in self.groups for name in KOHYA_TABLES["adapter_fields"][group]), *self.fields]


ADAPTERS = {kind: AdapterType(**table) for kind, table in KOHYA_TABLES["adapters"].items()}
FAMILY_LORA_TYPES = {"flux": "Flux1", "anima": "Anima"}  # the LoRA_type of families that have one of their own
OF = {ADAPTERS[kind].module: kind for kind in FAMILY_LORA_TYPES.values()}
LORA_TYPE_ALIASES = {"LoCon": "LyCORIS/LoCon"}
# Every field of the page that is an argument of some adapter.
ALL_FIELDS = {
    *(FIELDS.get(name, name) for adapter in ADAPTERS.values() for name in adapter.all_fields()),
    *LORA_PLUS,
    "constrain",
    "train_lora_ggpo",
    "ggpo_sigma",
    "ggpo_beta",
    "enable_all_linear",
}


def read_lora_type(builder: ImportBuilder) -> None:
    """Convert LoRA_type and the fields that it uses to network_module and network_args; ignore the other fields."""
    kind = str(builder.get("LoRA_type") or "Standard")
    kind = LORA_TYPE_ALIASES.get(kind, kind)
    adapter = ADAPTERS.get(kind)
    if adapter is None:
        builder.ignore("LoRA_type", "no adapter of this name is offered; LoRA is used")
        adapter = ADAPTERS["Standard"]
    family_type = FAMILY_LORA_TYPES.get(builder.family, "Standard")
    if adapter.module.startswith("networks.") and OF.get(adapter.module, "Standard") != family_type:
        adapter = ADAPTERS[family_type]  # the LoRA_type is that of another model
    module = adapter.module
    algo = [f"algo={adapter.algo}"] if adapter.algo else []
    arguments = [*algo, *_adapter_arguments(builder, adapter, kind)]
    _import_flux_fields(builder, kind, arguments)
    if "LoRA_type" in builder.source and "LoRA_type" not in builder.outcomes:
        args = {"network_args": arguments} if arguments else {}
        text = f"{kind} -> network_module = {module}" + (f", network_args = {' '.join(arguments)}" if arguments else "")
        text = Message("{what}: {why}", what=text, why=adapter.said) if adapter.said else text
        builder.change("LoRA_type", text, {"network_module": module, **args})
    elif arguments:
        builder.values["network_args"], builder.keys["network_args"] = arguments, arguments[0].partition("=")[0]
    for key in builder.left():
        if key in ALL_FIELDS:
            builder.ignore(key, Message("adapters of the type {kind} have no such setting", kind=kind))


def _adapter_arguments(builder: ImportBuilder, adapter: AdapterType, kind: str) -> list[str]:
    arguments = []
    for name in (*adapter.all_fields(), *LORA_PLUS):
        key = FIELDS.get(name, name)
        if key not in builder.source:
            continue
        value, argument = builder.get(key), ARGUMENTS.get(key, key)
        if value is None or _is_silent(argument, value):
            builder.empty(key)
            continue
        arguments.append(f"{argument}={str(value).replace(' ', '')}")
        builder.outcomes[key] = KeyOutcome(key, "renamed", f"network_args {argument}")
    if kind in ("Kohya LoHa", "Kohya LoKr") and not any(a.startswith("conv_dim=") for a in arguments):
        arguments.append("preset=attn-mlp")  # without a conv_dim these skip convolutions, unlike LyCORIS
    return arguments


def _is_silent(argument: str, value: JsonValue) -> bool:
    """Return whether a value is the adapter's default, so that it need not be written."""
    # iA3's switch is on by default, so "off" must be written.
    if argument == "train_on_input":
        return False
    return to_number(value) == 0 or str(value).casefold() in ("false", str(SILENT.get(argument)))


def _import_flux_fields(builder: ImportBuilder, kind: str, arguments: list[str]) -> None:
    """Convert split_mode and GGPO, which have formats of their own."""
    if "split_mode" in builder.source and builder.family == "flux":
        if builder.get("split_mode") in (True, "True", "true", 1) and kind == "Flux1":
            arguments.append("train_blocks=single")
            values, notes = convert_blocks_to_swap({"split_mode": True}, is_set=bool(builder.number("blocks_to_swap")))
            text = Message("network_args train_blocks=single, as kohya_ss does")
            builder.change("split_mode", join_messages([text, *notes], "; "), values)
        else:
            builder.ignore("split_mode", "set blocks_to_swap instead")
    if builder.get("train_lora_ggpo") in (True, "True", "true", 1):
        strengths = {"ggpo_sigma": 0.03, "ggpo_beta": 0.01}
        if kind == "Flux1":
            arguments += [f"{key}={builder.get(key) or default}" for key, default in strengths.items()]
        for key in ("train_lora_ggpo", *strengths):
            if key in builder.source and kind == "Flux1":
                builder.change(key, "network_args ggpo_sigma and ggpo_beta")
            elif key in builder.source:
                builder.ignore(key, "GGPO is for LoRA of FLUX.1")
    if "enable_all_linear" in builder.source:
        builder.ignore("enable_all_linear", "LyCORIS always adapts all linear layers of its preset")


def adapter_fields(module: str, arguments: Mapping[str, str]) -> tuple[JsonObject, list[str]]:
    """Convert network_module and network_args to LoRA_type and its fields; return these and the arguments without a
    field."""
    kind = _lora_type(module, arguments)
    fields: JsonObject = {"LoRA_type": kind}
    lost = []
    for argument, value in arguments.items():
        key = FIELDS.get(argument, argument)
        if argument == "algo":
            continue
        if argument == "train_blocks" and value == "single" and kind == "Flux1":
            fields["split_mode"] = True
        elif key in ALL_FIELDS:
            fields[key] = _typed_number(value)
        else:
            lost.append(f"{argument}={value}")
    return fields, lost


def _lora_type(module: str, arguments: Mapping[str, str]) -> str:
    if module == "networks.lora_flux":
        return "Flux1"
    if module == "networks.lora_fa":
        return "LoRA-FA"
    if module != "lycoris.kohya":
        return "Kohya LoCon" if "conv_dim" in arguments else "Standard"
    algo = {"lora": "locon", "": "locon"}.get(arguments.get("algo", ""), arguments.get("algo", ""))
    named = (kind for kind, a in ADAPTERS.items() if kind.startswith("LyCORIS/") and a.algo == algo)
    return next(named, "LyCORIS/LoCon")


def _typed_number(value: str) -> Any:
    if value.casefold() in ("true", "false"):
        return value.casefold() == "true"
    number = to_number(value)
    if number is None:
        return value
    return int(number) if number.is_integer() and "." not in value else number
