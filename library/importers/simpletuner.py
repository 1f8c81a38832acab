"""Import SimpleTuner's config.json, with the files of data sets, prompts and LyCORIS settings that it names."""

import re
from collections.abc import Mapping

from library.config.json_types import JsonMapping, JsonObject, JsonValue
from library.config.problems import ConfigError, Message, Problem, option_name
from library.importers import simpletuner_data, simpletuner_learning
from library.importers.builder import UNETS, ImportBuilder, describe, is_empty, is_on, script_of_family
from library.importers.shared import (
    ENCODED_ONCE,
    NO_MODEL,
    chooses_chroma,
    chooses_version,
    compute_dtype,
    equal,
    import_assistant,
    load_tables,
    other_method_error,
    other_model_error,
    other_networks,
    own_name,
    precision,
    say_nearest,
    steps_of_kept,
    takes_4_bits,
    transformer_of,
)

TRAINER = "SimpleTuner"
APPLIES_EXIF = True  # its TrainingSample calls exif_transpose
SIMPLETUNER_TABLES = load_tables("simpletuner")
ADAPTERS_ALONE = ("lora_rank", "lora_alpha", "lora_dropout", "lora_type", "init_lora", "lycoris_config")
OTHER_METHODS = {
    "controlnet": "ControlNet",
    "slider_lora_target": "a slider",
    "refiner_training": "SDXL's refiner",
    "distillation_method": "a distilled model",
}


def recognises(settings: JsonMapping) -> bool:
    """Return whether this is a file of SimpleTuner."""
    keys = {current_key(key) for key in settings}
    telling = {"data_backend_config", "model_flavour", "lora_rank", "base_model_precision", "model_type"}
    return "model_family" in keys and not telling.isdisjoint(keys)


def current_key(key: str) -> str:
    """Return a key without -- and under its current name; in upper case it is a variable of a config.env."""
    plain = key.removeprefix("--")
    if plain.isupper():
        plain = SIMPLETUNER_TABLES["variables"].get(plain, plain.lower())
    return SIMPLETUNER_TABLES["old"].get(plain, plain)


def unwrapped(content: JsonValue) -> JsonValue:
    """Return the settings in a file of SimpleTuner's page, which has them under "config"; other content unchanged."""
    inner = content.get("config") if isinstance(content, Mapping) and "_metadata" in content else None
    return inner if isinstance(inner, Mapping) and recognises(inner) else content


def read_config(settings: JsonMapping, script: str = "") -> ImportBuilder:
    """Convert every key to our values and an outcome. Raises ConfigError for unsupported models and methods."""
    current, names = _current_simpletuner_keys(settings)
    _refuse_method(current)
    script = script or _simpletuner_script(current)
    defaults = {key: value for key, value in SIMPLETUNER_TABLES["defaults"].items() if is_empty(current.get(key))}
    if not script.endswith("_network"):
        defaults.pop("lora_rank", None)
    absent = frozenset(defaults.keys() - current.keys())
    builder = ImportBuilder({**current, **defaults}, script, TRAINER, absent=absent, names=names)
    builder.import_keys(SIMPLETUNER_TABLES["renamed"])
    builder.import_keys({key: option for key, option in SIMPLETUNER_TABLES["numbers"].items() if builder.number(key)})
    for part in (
        _import_simpletuner_model,
        _import_prediction,
        _import_simpletuner_precision,
        _import_simpletuner_output,
        *simpletuner_learning.SIMPLETUNER_IMPORTS,
        *simpletuner_data.DATA_IMPORTS,
        _import_simpletuner_captions,
    ):
        part(builder)
    if not builder.adapters:
        for key in ADAPTERS_ALONE:
            if key in builder.source:
                builder.ignore(key, "the whole model is trained")
                builder.values.pop(
                    SIMPLETUNER_TABLES["renamed"].get(key, SIMPLETUNER_TABLES["numbers"].get(key, "")), None
                )
    builder.ignore_rest(SIMPLETUNER_TABLES["ignored"])
    if current.get("model_family") == "chroma" and builder.family == "flux":
        chooses_chroma(builder, "model_family")
    return builder


def _current_simpletuner_keys(settings: JsonMapping) -> tuple[JsonObject, dict[str, str]]:
    """Return the keys without -- by their current names, and the names in the file by current name."""
    current: JsonObject = {}
    names: dict[str, str] = {}
    for key, value in settings.items():
        new = current_key(key)
        new = key.removeprefix("--") if new in current else new
        current[new] = value
        if new != key:
            names[new] = key
    return current, names


def _refuse_method(settings: JsonMapping) -> None:
    """Raise ConfigError, naming the method, if it trains neither a LoRA nor a whole model."""
    method = next(
        (
            method
            for key, method in OTHER_METHODS.items()
            if not is_empty(settings.get(key)) and (is_on(settings[key]) or key == "distillation_method")
        ),
        "",
    )
    kind = str(settings.get("model_type") or "full").casefold()
    if "refiner" in str(settings.get("model_flavour")):
        method = method or OTHER_METHODS["refiner_training"]
    if kind not in ("lora", "full"):
        method = method or kind
    if method:
        raise other_method_error(TRAINER, method)


def _simpletuner_script(settings: JsonMapping) -> str:
    kind = str(settings.get("model_family") or "").casefold()
    if not kind:
        raise ConfigError(NO_MODEL, trainer=TRAINER, key="model_family")
    named = SIMPLETUNER_TABLES["families"]
    family = named.get(f"{kind} {settings.get('model_flavour')}", named.get(kind))
    if family is None:
        model = SIMPLETUNER_TABLES["other_models"].get(kind, kind)
        raise other_model_error(TRAINER, model)
    return script_of_family(family, str(settings.get("model_type")).casefold() == "lora")


def _import_simpletuner_model(builder: ImportBuilder) -> None:
    """Import the files of the model, and choose among models whose files look the same."""
    kind, flavour = str(builder.get("model_family")), str(builder.get("model_flavour") or "")
    models = SIMPLETUNER_TABLES["models"].get(kind, {})
    key = "pretrained_model_name_or_path"
    named = Message("{option} names the model", option=option_name(key)) if builder.get(key) else "chooses the model"
    builder.explain(named, "model_flavour")
    base = builder.get(key) or models.get(flavour)
    if not base and flavour and models:
        builder.problems.append(_unnamed_model(flavour, key))
    elif not base:
        flavour, base = next(iter(models.items()), ("", None))
    words = f"{flavour} {own_name(base)}".casefold()
    relative = next((word for word in ("kontext", "krea") if word in words and builder.family == "flux"), "")
    values = {"model_type": relative} if relative else {}
    builder.chooses_script("model_family", values)
    builder.chooses_script("model_type")
    is_edit = builder.family == "qwen_image"
    name = own_name(models.get(flavour) or base) if is_edit else re.sub(r"^klein", "klein-base", words)
    chooses_version(builder, "model_family", name)
    if base:
        builder.assume(key, base)
        builder.keep(key, base)
    _import_assistant_lora(builder, flavour)
    _import_other_networks(builder, base)


def _unnamed_model(flavour: str, option: str) -> Problem:
    template = "is not set, and model_flavour = {flavour} is a model that is not known here: name its file or hub id"
    return Problem(option, template, flavour=flavour)


def _import_prediction(builder: ImportBuilder) -> None:
    """Import what the U-Net predicts; transformers always predict a velocity."""
    key, kind = "prediction_type", str(builder.get("prediction_type") or "")
    if not kind or not builder.is_unet:
        builder.explain("it follows from the model", key)
    elif kind in ("eps", "epsilon", "vpred", "v_prediction", "v-prediction"):
        is_velocity = kind.startswith("v")
        text = describe({"v_parameterization": str(is_velocity).lower()})
        builder.change(key, text, {"v_parameterization": is_velocity})
    else:
        builder.ignore(key, say_nearest(kind, "epsilon"))


def _import_assistant_lora(builder: ImportBuilder, flavour: str) -> None:
    """Import the adapter with which SimpleTuner by default trains a distilled model."""
    key = "assistant_lora_path"
    default_path = SIMPLETUNER_TABLES["assistants"].get(f"{builder.get('model_family')} {flavour or 'turbo'}")
    path = builder.get(key) or default_path
    if (name := builder.get("assistant_lora_weight_name")) and str(path).count("/") == 1:
        path = f"{path}/{name}"
    builder.explain("is part of assistant_lora", "assistant_lora_weight_name")
    if not path or is_on(builder.get("disable_assistant_lora")) or not builder.adapters:
        builder.explain("no assistant takes part in the training", key, "disable_assistant_lora")
    else:
        builder.assume(key, path)
        strength = builder.number("assistant_lora_strength")
        import_assistant(builder, key, str(path), 1.0 if strength is None else strength)
        builder.explain("is part of assistant_lora", "assistant_lora_strength")
    builder.empty("disable_assistant_lora", "assistant_lora_strength", "assistant_lora_inference_strength")


def _import_other_networks(builder: ImportBuilder, base: object) -> None:
    """Import networks that replace those of the base model."""
    option_by_key = {
        "pretrained_vae_model_name_or_path": "ae" if builder.family == "flux" else "vae",
        "pretrained_t5_model_name_or_path": "t5xxl",
        "qwen_text_encoder_model_name_or_path": "text_encoder",
    }
    builder.import_keys(option_by_key)
    key = next(
        (
            f"pretrained_{part}_model_name_or_path"
            for part in ("transformer", "unet")
            if builder.get(f"pretrained_{part}_model_name_or_path")
        ),
        "",
    )
    if key and base:
        options = [option for option in transformer_of(builder).parts if option not in builder.values]
        parts = dict.fromkeys(options, base) if not builder.is_unet else {}
        builder.convert(key, {"pretrained_model_name_or_path": builder.get(key)})
        builder.change("pretrained_model_name_or_path", other_networks(parts), parts)


def _import_simpletuner_precision(builder: ImportBuilder) -> None:
    half = precision(builder.get("mixed_precision") or "bf16")
    builder.convert("mixed_precision", compute_dtype(builder, half))
    kind = str(builder.get("base_model_precision") or "no_change").casefold()
    key = "base_model_precision"
    if kind in ("no_change", "bf16"):
        builder.empty(key)
    elif not builder.adapters:
        builder.ignore(key, "weights that learn have at least 16 bits")
    else:
        option = "fp8_base_unet" if "fp8" in kind or "float8" in kind else "int8_base"
        values = {"base_bits": 4} if takes_4_bits(kind.partition("-")[0]) else {option: True}
        same = "8" in kind.partition("-")[0] or kind.startswith("nf4")
        text = equal(kind, describe(values)) if same else say_nearest(kind, describe(values))
        builder.change(key, text, values)
    if (count := builder.number("musubi_blocks_to_swap")) and transformer_of(builder).blocks:
        builder.values["blocks_to_swap"] = min(int(count), transformer_of(builder).most_swapped)
    backend = str(builder.get("dynamo_backend") or "no").casefold()
    if backend not in ("no", "none"):
        builder.convert("dynamo_backend", {"compile": True, "compile_backend": backend})
    builder.empty("dynamo_backend")


def _import_simpletuner_output(builder: ImportBuilder) -> None:
    interval = builder.number("checkpoint_step_interval")
    epochs = builder.number("checkpoint_epoch_interval")
    if epochs:
        builder.convert("checkpoint_epoch_interval", {"save_every_n_epochs": int(epochs), "save_state": True})
        builder.ignore(
            "checkpoint_step_interval", Message("another key says {option}", option=option_name("save_every_n_epochs"))
        )
    elif interval:
        builder.convert("checkpoint_step_interval", {"save_every_n_steps": int(interval), "save_state": True})
    if keep := builder.number("checkpoints_total_limit"):
        name = "save_last_n_epochs" if epochs else "save_last_n_steps"  # the first counts files, the second steps
        kept = int(keep) if epochs else steps_of_kept(keep, interval or 1)
        builder.convert("checkpoints_total_limit", {name: kept, f"{name}_state": kept})
    if not is_on(builder.get("push_to_hub")) and "hub_model_id" in builder.source:
        builder.ignore("hub_model_id", "push_to_hub is off")
        builder.values.pop("huggingface_repo_id", None)
    builder.explain("huggingface_repo_id says so", "push_to_hub", "push_checkpoints_to_hub")
    report = str(builder.get("report_to") or "none").casefold()
    if report in ("wandb", "tensorboard", "all"):
        builder.rename("report_to", "log_with", report)
        if "logging_dir" not in builder.values and report != "wandb":
            builder.derive("logging_dir", {"logging_dir": "logs"})
        builder.import_keys({"tracker_project_name": "log_tracker_name"})
        if report == "wandb":
            builder.import_keys({"tracker_run_name": "wandb_run_name"})
    builder.explain("nothing is logged", "report_to", "tracker_project_name") if report == "none" else None


def _import_simpletuner_captions(builder: ImportBuilder) -> None:
    """Import the caches, which SimpleTuner always uses, and the dropout and length of captions."""
    values = {"cache_latents": True, "cache_latents_to_disk": True}
    values |= {"cache_text_encoder_outputs": True, "cache_text_encoder_outputs_to_disk": True}
    builder.derive("cache_latents", values)
    if share := builder.number("caption_dropout_probability"):
        builder.rename("caption_dropout_probability", "caption_dropout_rate", share)
    builder.empty("caption_dropout_probability")
    if "max_token_length" in builder.values:
        names = {"flux": "t5xxl_max_token_length", **dict.fromkeys(UNETS, "max_token_length")}
        length = names.get(builder.family, "")
        builder.values.pop("max_token_length")
        if length and not builder.is_unet:
            builder.rename("tokenizer_max_length", length)
        else:
            builder.ignore("tokenizer_max_length", "the length of captions follows from the model")
    if is_on(builder.get("flux_attention_masked_training")) and builder.family == "flux":
        builder.rename("flux_attention_masked_training", "apply_t5_attn_mask", True)
    if builder.adapters:
        builder.freeze_encoders()
    elif builder.is_unet:
        builder.derive("train_text_encoder", {"train_text_encoder": False})
    if is_on(builder.get("train_text_encoder")):
        builder.ignore("train_text_encoder", ENCODED_ONCE)
