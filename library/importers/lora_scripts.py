"""Import files of lora-scripts (SD-Trainer): options of sd-scripts, with fields of its page between them."""

import contextlib
from collections.abc import Mapping

from library.config import schema
from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import parse_toml
from library.config.problems import ConfigError, Message, option_name
from library.importers.builder import ImportBuilder, describe, is_empty, is_on
from library.importers.shared import NO_MODEL, describe_prompts, equal, load_tables, other_model_error

TRAINER = "lora-scripts"
APPLIES_EXIF = False  # as sd-scripts
LORA_SCRIPTS_TABLES = load_tables("lora_scripts")
FLAGS = {
    "sample_width": "--w",
    "sample_height": "--h",
    "sample_cfg": "--l",
    "sample_steps": "--s",
    "sample_seed": "--d",
    "negative_prompts": "--n",
}
DEFAULTS = {"sample_width": 512, "sample_height": 512, "sample_cfg": 7, "sample_steps": 24, "sample_seed": 2333}
BLOCK_RATE_KEYS = ("down_lr_weight", "mid_lr_weight", "up_lr_weight", "block_lr_zero_threshold")
PRODIGY = {"prodigy_d0": "d0", "prodigy_d_coef": "d_coef"}


def recognises(settings: JsonMapping) -> bool:
    """Return whether these are settings of lora-scripts, or of a file that it keeps beside a LoRA."""
    metadata = settings.get("metadata")
    return "model_train_type" in settings or (
        isinstance(metadata, Mapping) and "train_type" in metadata and "data" in settings
    )


def read_config(settings: JsonMapping, script: str = "") -> ImportBuilder:
    """Convert every key to our values and an outcome. Raises ConfigError for unsupported models."""
    flat = {**schema.flatten_sections(settings), **_parse_typed_options(settings.get("ui_custom_params"))}
    builder = ImportBuilder(flat, script or _lora_scripts_script(flat), TRAINER, keeps_ineffective=True)
    key = "model_train_type" if "model_train_type" in flat else "train_type"
    builder.chooses_script(key)
    for part in (_import_scripts_network, _import_scripts_optimizer, _import_scripts_prompts, _import_base_weights):
        part(builder)
    if "ui_custom_params" in flat:
        builder.explain("its lines are options like the others", "ui_custom_params")
    builder.keep_rest(LORA_SCRIPTS_TABLES["ignored"])
    return builder


def _parse_typed_options(text: object) -> JsonObject:
    """Return options that were typed as TOML into its page; none if they cannot be parsed."""
    with contextlib.suppress(ConfigError):
        return schema.flatten_sections(parse_toml(text, "ui_custom_params")) if isinstance(text, str) else {}
    return {}


def _lora_scripts_script(flat: JsonMapping) -> str:
    kind = str(flat.get("model_train_type") or flat.get("train_type") or "")
    older = kind.startswith("sd-") and is_on(flat.get("v2"))
    if not older and (script := LORA_SCRIPTS_TABLES["scripts"].get(kind)):
        return script
    if not kind:
        raise ConfigError(NO_MODEL, trainer=TRAINER, key="model_train_type")
    model = LORA_SCRIPTS_TABLES["other_models"].get(kind, kind)
    model = "Stable Diffusion 2" if older else model
    raise other_model_error(TRAINER, model)


def _import_scripts_network(builder: ImportBuilder) -> None:
    """Import the module, and the fields that are its arguments."""
    if not builder.adapters:
        return
    module, arguments = str(builder.get("network_module") or ""), list[str]()
    algorithm = LORA_SCRIPTS_TABLES["algorithms"].get(module) or (
        builder.get("lycoris_algo") if "lycoris" in module else ""
    )
    if algorithm:
        arguments.append(f"algo={algorithm}")
        builder.change(
            "network_module", equal(module, f"lycoris.kohya, algo={algorithm}"), {"network_module": "lycoris.kohya"}
        )
    builder.explain("becomes one of network_args", "lycoris_algo")
    builder.explain("it is 0", "dropout") if "dropout" not in builder.outcomes else None
    blocks = is_on(builder.get("enable_block_weights"))
    if builder.number("dropout"):
        builder.rename("dropout", "network_dropout")
    for key, name in LORA_SCRIPTS_TABLES["arguments"].items():
        value = builder.get(key)
        if value is None or (key in BLOCK_RATE_KEYS and not blocks) or value is False:
            builder.explain("enable_block_weights is off", key) if key in BLOCK_RATE_KEYS else builder.empty(key)
            continue
        arguments.append(f"{name}={value}".replace(" ", ""))
        builder.change(key, "becomes one of network_args")
    builder.explain("becomes one of network_args", "enable_block_weights")
    typed_args = builder.get("network_args_custom")
    explicit_args = [*_list_or_lines(typed_args), *_list_or_lines(builder.get("network_args"))]
    names = {argument.partition("=")[0].strip() for argument in explicit_args}
    arguments = [*(argument for argument in arguments if argument.partition("=")[0] not in names), *explicit_args]
    builder.explain("becomes one of network_args", "network_args_custom", "network_args")
    if arguments:
        builder.set_by("network_args", describe({"network_args": " ".join(arguments)}), {"network_args": arguments})


def _list_or_lines(value: object) -> list[str]:
    entries = value if isinstance(value, list) else str(value or "").splitlines()
    return [str(entry).strip() for entry in entries if str(entry).strip()]


def _import_scripts_optimizer(builder: ImportBuilder) -> None:
    arguments = [*_list_or_lines(builder.get("optimizer_args")), *_list_or_lines(builder.get("optimizer_args_custom"))]
    names = {argument.partition("=")[0].strip() for argument in arguments}
    if str(builder.get("optimizer_type") or "").casefold().startswith("prodigy"):
        for key, name in PRODIGY.items():
            if builder.get(key) is not None and name not in names:
                arguments.append(f"{name}={builder.get(key)}")
            builder.explain("becomes one of optimizer_args", key)
    else:
        builder.explain("it is for Prodigy", *PRODIGY)
    builder.explain("becomes one of optimizer_args", "optimizer_args_custom", "optimizer_args")
    if arguments:
        key = "optimizer_args_custom" if "optimizer_args_custom" in builder.source else "optimizer_args"
        builder.change(key, "becomes one of optimizer_args", {"optimizer_args": arguments})
    if (cycles := builder.get("lr_restart_cycles")) is not None:
        builder.rename("lr_restart_cycles", "lr_scheduler_num_cycles", cycles)


def _import_scripts_prompts(builder: ImportBuilder) -> None:
    """Import a file of prompts, or the single prompt of its page."""
    prompt, file = builder.get("positive_prompts"), str(builder.get("prompt_file") or "").strip()
    is_off = "enable_preview" in builder.source and not is_on(builder.get("enable_preview"))
    keys = ("positive_prompts", "randomly_choice_prompt", "prompt_file", *FLAGS)
    if is_off:
        builder.explain("enable_preview is off", "enable_preview", *keys, "sample_every_n_epochs", "sample_sampler")
        return
    if file:
        builder.rename("prompt_file", "sample_prompts", file)
    elif prompt:
        flags = {
            flag: builder.get(key) if builder.get(key) is not None else DEFAULTS.get(key) for key, flag in FLAGS.items()
        }
        flag_text = " ".join(f"{flag} {value}" for flag, value in flags.items() if not is_empty(value))
        builder.texts["sample_prompts"] = f"{' '.join(str(prompt).split())} {flag_text}\n"
        builder.explain(describe_prompts(1), "positive_prompts")
    builder.explain(
        "sample prompts have these settings",
        "enable_preview",
        *(key for key in keys if key not in builder.outcomes),
    )


def _import_base_weights(builder: ImportBuilder) -> None:
    if not is_on(builder.get("enable_base_weight")):
        builder.explain("enable_base_weight is off", "enable_base_weight", "base_weights", "base_weights_multiplier")
        return
    files = _list_or_lines(builder.get("base_weights"))
    multipliers = _list_or_lines(builder.get("base_weights_multiplier"))
    builder.explain(Message("is {option} here", option=option_name("base_weights")), "enable_base_weight")
    builder.keep("base_weights", files)
    if multipliers:
        builder.keep("base_weights_multiplier", multipliers)
