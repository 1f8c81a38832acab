"""Import diffusion-pipe's TOML files, with the file of data sets that they name."""

from collections.abc import Mapping

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, option_name
from library.importers import diffusion_pipe_data, diffusion_pipe_learning
from library.importers.builder import ImportBuilder, describe, is_on
from library.importers.shared import (
    NO_MODEL,
    chooses_chroma,
    chooses_version,
    compute_dtype,
    equal,
    flatten_tables,
    load_tables,
    other_model_error,
    other_networks,
    own_name,
    precision,
    tables_of_list,
    texts_of_list,
    transformer_of,
)

TRAINER = "diffusion-pipe"
APPLIES_EXIF = False  # it trains images as they are stored
PIPE_TABLES = load_tables("diffusion_pipe")
DECISIVE = {"pipeline_stages", "micro_batch_size_per_gpu", "activation_checkpointing"}
# The files of a model, in order of precedence, and the option that its VAE and text encoder are.
TRANSFORMERS = ("model.transformer_path", "model.diffusion_model", "model.checkpoint_path", "model.diffusers_path")
VAES, ENCODERS = ("model.vae_path", "model.vae"), ("model.text_encoder_path", "model.llm_path", "model.text_encoders")


def recognises(settings: JsonMapping) -> bool:
    model = settings.get("model")
    return isinstance(model, Mapping) and "type" in model and not DECISIVE.isdisjoint(settings)


def read_config(settings: JsonMapping, script: str = "") -> ImportBuilder:
    """Convert every key to our values and an outcome. Raises ConfigError for unsupported models."""
    data = settings.get("dataset")
    flat = flatten_tables({**settings, "dataset": "" if isinstance(data, Mapping) else data})
    builder = ImportBuilder(flat, script or _pipe_script(settings), TRAINER)
    builder.import_keys(PIPE_TABLES["renamed"])
    for part in (_import_pipe_model, _import_pipe_precision, _import_pipe_memory, _import_pipe_caches):
        part(builder)
    _import_text_adapter(builder)
    for part in diffusion_pipe_learning.LEARNING_IMPORTS:
        part(builder)
    diffusion_pipe_data.read_data_file(builder, data)
    builder.ignore_rest(PIPE_TABLES["ignored"])
    if flat.get("model.type") == "chroma" and builder.family == "flux":
        chooses_chroma(builder, "model.type")
    return builder


def _pipe_script(settings: JsonMapping) -> str:
    kind = str(settings["model"]["type"] or "").strip()
    if not kind:
        raise ConfigError(NO_MODEL, trainer=TRAINER, key="model.type")
    family = PIPE_TABLES["families"].get(kind)
    if family is None:
        model = PIPE_TABLES["other_models"].get(kind, kind)
        raise other_model_error(TRAINER, model)
    return f"{family}_train_network" if isinstance(settings.get("adapter"), Mapping) else f"{family}_train"


def _import_pipe_model(builder: ImportBuilder) -> None:
    """Import the files of the model, and choose among models whose files look the same."""
    model_keys = [key for key in TRANSFORMERS if builder.get(key)]
    words = " ".join(own_name(builder.get(key)) for key in model_keys)
    kind = {"model_type": "kontext"} if "kontext" in words and builder.family == "flux" else {}
    builder.chooses_script("model.type", kind)
    chooses_version(builder, "model.type", words)
    if model_keys:
        builder.rename(model_keys[0], "pretrained_model_name_or_path")
    _import_pipe_parts(builder)
    part_options = [option for option in transformer_of(builder).parts if option not in builder.values]
    part_options = [
        option for option in part_options if builder.source.get("model.type") != "chroma" or option != "clip_l"
    ]
    for key in model_keys[1:]:
        if key == "model.diffusers_path" and part_options:
            builder.change(key, other_networks(part_options), dict.fromkeys(part_options, builder.get(key)))
        else:
            builder.ignore(
                key, Message("another key says {option}", option=option_name("pretrained_model_name_or_path"))
            )


def _import_pipe_parts(builder: ImportBuilder) -> None:
    """Import separate files of VAE and text encoder, and adapters that are merged before the training."""
    options = transformer_of(builder).parts
    for key in VAES:
        if builder.get(key):
            builder.rename(key, "ae" if "ae" in options else "vae")
    encoder = next((option for option in options if option in ("text_encoder", "qwen3")), "")
    for key in ENCODERS if encoder else ():
        value = builder.get(key)
        listed = tables_of_list(value, key, builder.notes) if isinstance(value, list) else []
        paths = [encoder_table.get("path") or encoder_table.get("paths") for encoder_table in listed]
        path = paths[0] if paths else value
        if isinstance(path, str) and path:
            builder.rename(key, encoder, path)
    merged = builder.get("model.merge_adapters")
    if isinstance(merged, list) and merged:
        paths = texts_of_list(merged, "model.merge_adapters", builder.notes)
        builder.rename("model.merge_adapters", "base_weights", paths)
    if fused := tables_of_list(builder.get("adapter.fuse_adapters"), "adapter.fuse_adapters", builder.notes):
        weights = [adapter.get("weight", 1.0) for adapter in fused]
        values: JsonObject = {"base_weights": [str(adapter.get("path")) for adapter in fused]}
        builder.change("adapter.fuse_adapters", describe(values), values | {"base_weights_multiplier": weights})


def _import_pipe_precision(builder: ImportBuilder) -> None:
    builder.derive("model.dtype", compute_dtype(builder, precision(builder.get("model.dtype") or "bfloat16")))
    if builder.get("save_dtype"):
        builder.rename("save_dtype", "save_precision", precision(builder.get("save_dtype"), "float"))
    for key in ("model.transformer_dtype", "model.diffusion_model_dtype"):
        kind = str(builder.get(key) or "")
        if not kind or not builder.adapters:
            builder.ignore(key, "weights that learn have at least 16 bits")
        elif kind.startswith("float8"):
            builder.convert(key, {"fp8_base_unet": True})
        elif kind == "nf4":
            builder.change(key, equal(kind, describe({"base_bits": 4})), {"base_bits": 4})
        else:
            builder.ignore(key, "frozen weights are kept in mixed_precision")


def _import_text_adapter(builder: ImportBuilder) -> None:
    """Import the rate of Anima's module between text encoder and model, which gets adapters unless its rate is 0."""
    key = "model.llm_adapter_lr"
    if builder.family != "anima" or not builder.adapters:
        return
    builder.values.pop("llm_adapter_lr", None)
    if builder.number(key) == 0:
        builder.change(key, "adapters leave the text adapter out, unless network_args say train_llm_adapter=True")
    else:
        arguments = ["train_llm_adapter=True"]
        builder.set_by(key, "network_args train_llm_adapter=True", {"network_args": arguments})


def _import_pipe_memory(builder: ImportBuilder) -> None:
    if (count := builder.number("blocks_to_swap")) and transformer_of(builder).blocks:
        builder.convert("blocks_to_swap", {"blocks_to_swap": min(int(count), transformer_of(builder).most_swapped)})
    key = "activation_checkpointing"
    if str(builder.get(key)) == "unsloth":
        builder.convert(key, {"gradient_checkpointing": True, "cpu_offload_checkpointing": True})
    elif key in builder.source:
        builder.rename(key, "gradient_checkpointing", is_on(builder.get(key)))
    if is_on(builder.get("monitoring.enable_wandb")):
        builder.change("monitoring.enable_wandb", "log_with = wandb", {"log_with": "wandb"})
    else:
        builder.explain("wandb is off", "monitoring.wandb_tracker_name", "monitoring.wandb_run_name")
        for option in ("log_tracker_name", "wandb_run_name"):
            builder.values.pop(option, None)
    if "model.cache_text_embeddings" in builder.source and builder.family == "sdxl":
        builder.ignore("model.cache_text_embeddings", "the text encoders learn")


def _import_pipe_caches(builder: ImportBuilder) -> None:
    """Map what it does in every training: caches latents on disk, and text encoder outputs except SDXL's, which are
    trained.
    """
    builder.derive("cache_latents", {"cache_latents": True, "cache_latents_to_disk": True})
    if builder.family == "sdxl":
        if not builder.adapters:
            builder.derive("train_text_encoder", {"train_text_encoder": True})
        return
    if builder.adapters:
        builder.freeze_encoders()
    key = "model.cache_text_embeddings"
    if key not in builder.source or is_on(builder.source[key]):
        builder.derive(key, {"cache_text_encoder_outputs": True, "cache_text_encoder_outputs_to_disk": True})
    else:
        builder.change(key, describe({"cache_text_encoder_outputs": False}))
