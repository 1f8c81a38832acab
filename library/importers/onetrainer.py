"""OneTrainer: JSON files of its presets and configs, as far as their meaning carries over."""

from library.config.json_types import JsonMapping
from library.config.schema import ConfigError
from library.importers import onetrainer_data, onetrainer_learning, onetrainer_model
from library.importers.ledger import KeyLedger
from library.importers.onetrainer_defaults import completed, today
from library.importers.trees import ONLY, dotted, precision, rest, split_path, take

TRAINER = "OneTrainer"
MODELS = {"STABLE_DIFFUSION_XL_10_BASE": "sdxl", "FLUX_DEV_1": "flux"}
TITLES = {
    "STABLE_DIFFUSION_15": "Stable Diffusion 1.5",
    "STABLE_DIFFUSION_XL_10_BASE_INPAINTING": "SDXL inpainting",
    "FLUX_FILL_DEV_1": "FLUX.1 Fill",
    "FLUX_2": "FLUX.2",
    "CHROMA_1": "Chroma",
}
METHODS = {
    "EMBEDDING": "an embedding (textual inversion)",
    "FINE_TUNE_VAE": "a VAE",
    "CONTROLNET": "a ControlNet",
    "LECO": "a LECO slider",
}
RENAMED = {
    "base_model_name": "pretrained_model_name_or_path",
    "vae.model_name": "vae",
    "epochs": "max_train_epochs",
    "batch_size": "train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "lora_model_name": "network_weights",
    "compile": "compile",
    "seed": "seed",
    "dataloader_threads": "max_data_loader_n_workers",
    "rescale_noise_scheduler_to_zero_terminal_snr": "zero_terminal_snr",
    "force_v_prediction": "v_parameterization",
}
_PLACE = "OneTrainer's own folders and logs; ours are output_dir and logging_dir"
_OTHERS = "OneTrainer keeps all arguments of all optimizers; only those of this one are taken"
_PART = "it is no part of this model"
IGNORED = {
    **dict.fromkeys(
        ["workspace_dir", "cache_dir", "debug_dir", "debug_mode", "tensorboard", "tensorboard_expose",
         "tensorboard_always_on", "tensorboard_port", "huggingface_cache_dir", "save_filename_prefix"], _PLACE
    ),
    **dict.fromkeys(["multi_gpu", "device_indexes"], "it is for `accelerate launch --num_processes N --gpu_ids ...`"),
    **dict.fromkeys(["train_device", "temp_device"], "it is for `accelerate launch`"),
    **dict.fromkeys(
        ["prior.", "effnet_encoder.", "decoder.", "decoder_text_encoder.", "decoder_vqgan.", "text_encoder_3.",
         "text_encoder_4.", "unconditional_transformer.", "text_encoder_3_", "text_encoder_4_", "frames"], _PART
    ),
    "__version": "OneTrainer's number of its own format",
    "attention_mechanism": "attention is PyTorch's SDPA",
    "masked_training": "set alpha_mask, or masked_loss with masks that the dataset file names",
    "fallback_train_dtype": "mixed_precision is used for all parts",
    "enable_autocast_cache": "PyTorch decides that",
    "async_offloading": "swapped blocks are always moved beside the computing",
    "enable_async_offloading": "swapped blocks are always moved beside the computing",
    "clear_cache_before_training": "a cache is used again only where it fits",
    "continue_last_backup": "name the state to continue from with resume",
    "validation": "validation_split holds images back",
    "cloud.": "training runs on this machine",
    "secrets.": "tokens and keys stay out of configs",
    "embedding.": "embeddings are not trained here",
    "additional_embeddings": "embeddings are not trained here",
    "optimizer.stochastic_rounding": "weights in 16 bits are always rounded at random where the optimizer allows it",
    "optimizer.": _OTHERS,
    "optimizer_defaults": _OTHERS,
    "optimizer_defaults.": _OTHERS,
}  # fmt: skip


def fits(found: JsonMapping) -> bool:
    """Whether this is a file of OneTrainer."""
    told = found.keys() & {"training_method", "base_model_name", "output_model_destination", "concept_file_name"}
    return str(found.get("model_type") or "").isupper() or "training_method" in told or len(told) > 1


def read(found: JsonMapping, script: str = "") -> KeyLedger:
    """Every key -> our values, and what became of it. Raises ConfigError for other models and methods."""
    flat, names = today(dotted(found))
    source, absent, notes = completed(flat)
    ledger = KeyLedger(source, _script(source, script), TRAINER, absent=absent, names=names, notes=notes)
    for key in ("training_method", "model_type"):
        ledger.change(key, f"chooses the script: {ledger.script}")
    take(ledger, RENAMED)
    _output(ledger)
    for part in (*onetrainer_model.PARTS, *onetrainer_learning.PARTS, *onetrainer_data.PARTS):
        part(ledger)
    rest(ledger, IGNORED)
    return ledger


def _script(source: JsonMapping, script: str) -> str:
    method, model = str(source["training_method"]), str(source["model_type"])
    if method not in ("LORA", "FINE_TUNE"):
        what = METHODS.get(method, method)
        raise ConfigError(f"this file of {TRAINER} trains {what}, which is not trained here: train it there; {ONLY}")
    family = script.partition("_")[0] or MODELS.get(model)
    if family is None:
        model = f"{TITLES[model]} ({model})" if model in TITLES else model
        raise ConfigError(f"this file of {TRAINER} is for {model}, which is not trained here: train it there; {ONLY}")
    return script or (f"{family}_train_network" if method == "LORA" else f"{family}_train")


def _output(ledger: KeyLedger) -> None:
    if path := ledger.get("output_model_destination"):
        folder, name = split_path(str(path))
        values = {"output_dir": folder, "output_name": name} if ledger.given("output_model_destination") else {}
        said = f"output_dir = {folder}, output_name = {name}"
        ledger.change("output_model_destination", said, values)
    take(ledger, {"output_dtype": "save_precision"}, lambda value: precision(value, "float"))
    kind = str(ledger.get("output_model_format") or "")
    if kind and not ledger.adapters and ledger.family == "sdxl":
        ours = {"DIFFUSERS": "diffusers_safetensors", "CKPT": "ckpt"}.get(kind, "safetensors")
        ledger.change("output_model_format", f"{kind} is save_model_as = {ours}", {"save_model_as": ours})
    elif kind:
        ledger.change("output_model_format", f"{kind}: saved as a .safetensors file with sd-scripts' names")
