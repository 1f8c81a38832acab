"""What OneTrainer does where a file of it says nothing: its presets hold only what differs from that."""

from library.config.json_types import JsonMapping, JsonObject
from library.importers.ledger import to_number

# Only what decides how a training goes. Parts are "unet" (SDXL) or "transformer" (FLUX.1).
DEFAULTS: JsonMapping = {
    "training_method": "FINE_TUNE",
    "model_type": "STABLE_DIFFUSION_15",
    "output_dtype": "FLOAT_32",
    "output_model_destination": "models/model.safetensors",
    "aspect_ratio_bucketing": True,
    "latent_caching": True,
    "learning_rate_scheduler": "CONSTANT",
    "learning_rate": 3e-6,
    "learning_rate_warmup_steps": 200.0,
    "learning_rate_cycles": 1.0,
    "learning_rate_min_factor": 0.0,
    "learning_rate_scaler": "NONE",
    "epochs": 100,
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "ema": "OFF",
    "ema_decay": 0.999,
    "ema_update_step_interval": 5,
    "train_dtype": "FLOAT_16",
    "resolution": "512",
    "mse_strength": 1.0,
    "mae_strength": 0.0,
    "log_cosh_strength": 0.0,
    "huber_strength": 0.0,
    "huber_delta": 1.0,
    "loss_weight_fn": "CONSTANT",
    "loss_weight_strength": 5.0,
    "dropout_probability": 0.0,
    "clip_grad_norm": 1.0,
    "offset_noise_weight": 0.0,
    "perturbation_noise_weight": 0.0,
    "min_noising_strength": 0.0,
    "max_noising_strength": 1.0,
    "noising_weight": 0.0,
    "noising_bias": 0.0,
    "timestep_shift": 1.0,
    "dynamic_timestep_shifting": False,
    "unet.train": True,
    "transformer.train": True,
    "transformer.guidance_scale": 1.0,
    "text_encoder.train": True,
    "text_encoder_2.train": True,
    "text_encoder.stop_training_after": 30,
    "text_encoder_2.stop_training_after": 30,
    "text_encoder_2_sequence_length": 77,
    "vae.weight_dtype": "FLOAT_32",
    "layer_filter_preset": "full",
    "peft_type": "LORA",
    "lora_rank": 16,
    "lora_alpha": 1.0,
    "lora_decompose": False,
    "optimizer.optimizer": "ADAMW",
    "backup_after": 30,
    "backup_after_unit": "MINUTE",
    "sample_after": 10,
    "sample_after_unit": "MINUTE",
}
NULLABLE = ("clip_grad_norm", "text_encoder_2_sequence_length")  # where null says something of its own
# Keys of old versions -> those of today. {part} is each of the parts that had one.
PARTS = ("unet", "prior", "text_encoder", "text_encoder_2", "vae")
OLD_OF_PARTS = {
    "train_{part}": "{part}.train",
    "train_{part}_epochs": "{part}.stop_training_after",
    "{part}_learning_rate": "{part}.learning_rate",
    "{part}_weight_dtype": "{part}.weight_dtype",
    "{part}_model_name": "{part}.model_name",
}
OLD = {
    "optimizer": "optimizer.optimizer",
    "save_after": "save_every",
    "save_after_unit": "save_every_unit",
    "lora_layers": "layer_filter",
    "lora_layer_preset": "layer_filter_preset",
    "lora_layers_regex": "layer_filter_regex",
    **{old.format(part=part): new.format(part=part) for part in PARTS for old, new in OLD_OF_PARTS.items()},
}


def today(flat: JsonMapping) -> tuple[JsonObject, dict[str, str]]:
    """A file's keys, with dots, in the names of today, and what the file calls those that had another one."""
    found: JsonObject = {}
    names: dict[str, str] = {}
    for key, value in flat.items():
        new = OLD.get(key, key)
        if key.startswith("optimizer_") and "." not in key and key != "optimizer_defaults":
            new = f"optimizer.{key.removeprefix('optimizer_')}"
        if new.startswith("prior."):
            new = new.replace("prior.", "transformer.", 1)
        if new in flat and new != key:  # both names: today's counts
            found[key] = value
            continue
        found[new] = value
        if new != key:
            names[new] = key
    return found, names


def completed(found: JsonMapping) -> tuple[JsonObject, frozenset[str], list[str]]:
    """The settings with OneTrainer's defaults where they are missing or no such value; the keys of those that are
    missing; and a sentence for each that is no such value."""
    filled, notes = dict(found), []
    for key, default in DEFAULTS.items():
        value = found.get(key)
        if key in NULLABLE and key in found and value is None:
            continue
        if value is None:
            filled[key] = default
        elif isinstance(default, float | int) and not isinstance(default, bool) and to_number(value) is None:
            filled[key] = default
            notes.append(f"{key}: {value!r} is no number, so OneTrainer's default {default:g} is used")
    return filled, frozenset(DEFAULTS.keys() - found.keys()), notes
