"""OneTrainer: JSON files of its presets and configs, as far as their meaning carries over."""

from collections.abc import Mapping
from typing import Any

from library.config.foreign.ledger import Ledger, is_empty, to_number
from library.config.foreign.trees import (
    PREPARED,
    dataset_toml,
    dotted,
    precision,
    rest,
    set_by,
    split_path,
    tables,
    take,
)
from library.config.schema import ConfigError

TRAINER = "OneTrainer"
MODELS = {"STABLE_DIFFUSION_XL_10_BASE": "sdxl", "FLUX_DEV_1": "flux"}
RENAMED = {
    "base_model_name": "pretrained_model_name_or_path",
    "learning_rate": "learning_rate",
    "learning_rate_warmup_steps": "lr_warmup_steps",
    "epochs": "max_train_epochs",
    "batch_size": "train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "lora_rank": "network_dim",
    "lora_alpha": "network_alpha",
    "lora_model_name": "network_weights",
    "clip_grad_norm": "max_grad_norm",
    "compile": "compile",
    "seed": "seed",
    "latent_caching": "cache_latents",
    "rescale_noise_scheduler_to_zero_terminal_snr": "zero_terminal_snr",
    "force_v_prediction": "v_parameterization",
    "unet.learning_rate": "unet_lr",
    "prior.learning_rate": "unet_lr",
    "transformer.learning_rate": "unet_lr",
}
NUMBERS = {
    "offset_noise_weight": "noise_offset",
    "perturbation_noise_weight": "ip_noise_gamma",
    "dropout_probability": "network_dropout",
}
SCHEDULES = {
    "CONSTANT": "constant", "LINEAR": "linear", "COSINE": "cosine", "COSINE_WITH_HARD_RESTARTS": "cosine_with_restarts",
    "COSINE_WITH_RESTARTS": "cosine_with_restarts", "ADAFACTOR": "adafactor",
}  # fmt: skip
OPTIMIZERS = {
    "ADAMW": "AdamW", "ADAMW_8BIT": "AdamW8bit", "ADAFACTOR": "Adafactor", "PRODIGY": "Prodigy", "LION": "Lion",
    "LION_8BIT": "Lion8bit", "DADAPT_ADAM": "DAdaptAdam", "DADAPT_LION": "DAdaptLion", "DADAPT_SGD": "DAdaptSGD",
    "SCHEDULE_FREE_ADAMW": "AdamWScheduleFree", "SCHEDULE_FREE_SGD": "SGDScheduleFree",
}  # fmt: skip
ARGUMENTS = ("weight_decay", "eps", "relative_step", "scale_parameter", "warmup_init", "d_coef", "use_bias_correction",
             "safeguard_warmup", "decouple", "momentum", "clip_threshold")  # fmt: skip
_PLACE = "OneTrainer's own folders and logs; ours are output_dir and logging_dir"
_PARTS = "the number format of all parts is mixed_precision; fp8_base saves memory"
IGNORED = {
    **dict.fromkeys(
        ["workspace_dir", "cache_dir", "debug_dir", "debug_mode", "tensorboard", "tensorboard_expose"], _PLACE
    ),
    **dict.fromkeys(["weight_dtype", "unet.weight_dtype", "prior.weight_dtype", "transformer.weight_dtype"], _PARTS),
    **dict.fromkeys(["text_encoder.weight_dtype", "text_encoder_2.weight_dtype", "vae.weight_dtype"], _PARTS),
    "attention_mechanism": "attention is PyTorch's SDPA",
    "masked_training": "set alpha_mask, or masked_loss with masks that the dataset file names",
    "layer_offload_fraction": "set blocks_to_swap",
    "optimizer.": "OneTrainer keeps all arguments of all optimizers; only those of this one are taken",
    "optimizer_defaults.": "OneTrainer keeps all arguments of all optimizers; only those of this one are taken",
}


def fits(found: Mapping[str, Any]) -> bool:
    """Whether this is a file of OneTrainer."""
    return "training_method" in found and "model_type" in found


def read(found: Mapping[str, Any], script: str = "") -> Ledger:
    """Every key -> our values, and what became of it. Raises ConfigError for other models and methods."""
    ledger = Ledger(dotted(found), script or _script(found), TRAINER)
    ledger.change("training_method", f"chooses the script: {ledger.script}")
    ledger.change("model_type", f"chooses the script: {ledger.script}")
    take(ledger, RENAMED)
    take(ledger, {key: option for key, option in NUMBERS.items() if ledger.number(key)})
    for part in (_output, _optimizer, _schedule, _memory, _parts, _loss, _noise, _intervals, _images):
        part(ledger)
    rest(ledger, IGNORED)
    return ledger


def _script(found: Mapping[str, Any]) -> str:
    family, method = MODELS.get(str(found["model_type"])), str(found["training_method"])
    if family is None or method not in ("LORA", "FINE_TUNE"):
        raise ConfigError(
            f"this file is for {found['model_type']} with {method}, which is not trained here; "
            "or choose the training script with --script"
        )
    return f"{family}_train_network" if method == "LORA" else f"{family}_train"


def _output(ledger: Ledger) -> None:
    if path := ledger.get("output_model_destination"):
        folder, name = split_path(str(path))
        said = f"output_dir = {folder}, output_name = {name}"
        ledger.change("output_model_destination", said, {"output_dir": folder, "output_name": name})
    take(ledger, {"output_dtype": "save_precision"}, lambda value: precision(value, "float"))
    take(ledger, {"train_dtype": "mixed_precision"}, precision)


def _optimizer(ledger: Ledger) -> None:
    key = "optimizer.optimizer" if "optimizer.optimizer" in ledger.source else "optimizer"
    if not (name := ledger.get(key)):
        return
    ledger.rename(key, "optimizer_type", OPTIMIZERS.get(str(name), str(name)))
    arguments, used = [], []
    betas = [ledger.number(f"optimizer.beta{i}") for i in (1, 2)]
    if None not in betas:
        arguments.append(f"betas={betas[0]},{betas[1]}")
        used += ["optimizer.beta1", "optimizer.beta2"]
    for argument in ARGUMENTS:
        place = f"optimizer.{argument}"
        if not is_empty(ledger.source.get(place)):
            arguments.append(f"{argument}={ledger.source[place]}".replace(" ", ""))
            used.append(place)
    for place in used:
        ledger.change(place, "becomes one of optimizer_args", {"optimizer_args": arguments})


def _schedule(ledger: Ledger) -> None:
    name, warmup = str(ledger.get("learning_rate_scheduler") or "CONSTANT"), ledger.number("learning_rate_warmup_steps")
    ours = SCHEDULES.get(name)
    if ours == "constant" and warmup:
        ours = "constant_with_warmup"
    if ours:
        set_by(ledger, "learning_rate_scheduler", f"{name} is {ours}", {"lr_scheduler": ours})
    if ours == "cosine_with_restarts" and ledger.number("learning_rate_cycles"):
        cycles = max(1, round(ledger.number("learning_rate_cycles") or 1))
        ledger.rename("learning_rate_cycles", "lr_scheduler_num_cycles", cycles)
    if ours == "adafactor" and warmup:
        ledger.values.pop("lr_warmup_steps")
        ledger.ignore("learning_rate_warmup_steps", "lr_scheduler = adafactor has no warm-up")


def _memory(ledger: Ledger) -> None:
    kind = ledger.source.get("gradient_checkpointing")
    if kind is not None:
        word = str(kind).upper()
        option = "cpu_offload_checkpointing" if word == "CPU_OFFLOADED" else "gradient_checkpointing"
        ledger.change(
            "gradient_checkpointing", f"{kind} is {option}", {option: word in ("ON", "TRUE", "CPU_OFFLOADED")}
        )
    mode = str(ledger.get("ema") or "OFF").upper()
    if mode in ("GPU", "CPU"):
        values = {"ema_decay": ledger.number("ema_decay") or 0.999, "ema_device": mode.casefold()}
        values["ema_every_n_steps"] = int(ledger.number("ema_update_step_interval") or 5)
        ledger.change("ema", f"an average is kept on the {mode}", values)
        for key in ("ema_decay", "ema_update_step_interval"):
            if key in ledger.source:
                ledger.change(key, "is a setting of that average")
    else:
        ledger.empty("ema", "ema_decay", "ema_update_step_interval")


def _parts(ledger: Ledger) -> None:
    """Which parts learn, and how fast."""
    trains = [ledger.source.get(f"{part}.train", ledger.source.get(old)) for part, old in
              (("text_encoder", "train_text_encoder"), ("text_encoder_2", "train_text_encoder_2"))]  # fmt: skip
    rates = [ledger.number(f"{part}.learning_rate") for part in ("text_encoder", "text_encoder_2")]
    learns = [train is not False for train in trains] if ledger.family == "sdxl" else [bool(train) for train in trains]
    place = "text_encoder.train" if "text_encoder.train" in ledger.source else "train_text_encoder"
    if ledger.adapters and not any(learns):
        set_by(ledger, place, "no text encoder learns: network_train_unet_only", {"network_train_unet_only": True})
    elif ledger.adapters:
        given = [(rate or 0.0) if on else 0.0 for rate, on in zip(rates, learns, strict=True)]
        base = ledger.number("learning_rate") or 0.0
        each = [rate or base * on for rate, on in zip(given, learns, strict=True)]
        set_by(ledger, place, f"text_encoder_lr = {each}", {"text_encoder_lr": each})
    elif ledger.family == "sdxl":
        values: dict[str, Any] = {"train_text_encoder": any(learns)}
        for option, rate, on in zip(("learning_rate_te1", "learning_rate_te2"), rates, learns, strict=True):
            if any(learns) and (rate is not None or not on):
                values[option] = rate if on else 0
        set_by(ledger, place, f"train_text_encoder is {'on' if any(learns) else 'off'}", values)
    for part in ("text_encoder", "text_encoder_2"):
        for key in (f"{part}.train", f"{part}.learning_rate"):
            if key in ledger.left() and ledger.get(key) is not None:
                ledger.change(key, "is part of the rates of the text encoders")


def _loss(ledger: Ledger) -> None:
    kind, strength = str(ledger.get("loss_weight_fn") or "CONSTANT"), ledger.number("loss_weight_strength")
    if kind == "MIN_SNR_GAMMA":
        ledger.change("loss_weight_fn", f"min_snr_gamma = {strength or 5}", {"min_snr_gamma": strength or 5})
    elif kind == "DEBIASED_ESTIMATION":
        ledger.change("loss_weight_fn", "debiased_estimation_loss", {"debiased_estimation_loss": True})
    if kind in ("CONSTANT", "MIN_SNR_GAMMA"):
        ledger.empty("loss_weight_fn", "loss_weight_strength")
    mse, mae = ledger.number("mse_strength"), ledger.number("mae_strength")
    if mae and not mse:
        ledger.change("mae_strength", "loss_type = l1", {"loss_type": "l1"})
    elif not mae:
        ledger.empty("mse_strength", "mae_strength")


def _noise(ledger: Ledger) -> None:
    for key, option, off in (("min_noising_strength", "min_timestep", 0), ("max_noising_strength", "max_timestep", 1)):
        share = ledger.number(key)
        if share is not None and share != off:
            ledger.change(key, f"{option} = {round(share * 1000)}", {option: round(share * 1000)})
        elif share is not None:
            ledger.empty(key)
    if ledger.family != "flux":
        return
    kind = str(ledger.get("timestep_distribution") or "UNIFORM")
    shift = ledger.number("timestep_shift") or 1.0
    sampling = "uniform" if kind == "UNIFORM" else "sigmoid" if shift == 1 else "shift"
    if ledger.get("dynamic_timestep_shifting"):
        ledger.change("dynamic_timestep_shifting", "timestep_sampling = flux_shift")
        sampling = "flux_shift"
    values = {"timestep_sampling": sampling, "discrete_flow_shift": shift, "model_prediction_type": "raw"}
    values |= {"guidance_scale": ledger.number("transformer.guidance_scale") or 1.0}
    values |= {"sigmoid_scale": 1 + (ledger.number("noising_weight") or 0.0)}
    set_by(ledger, "timestep_distribution", f"{kind}: {', '.join(f'{k} = {v}' for k, v in values.items())}", values)
    for key in ("timestep_shift", "noising_weight", "transformer.guidance_scale"):
        if ledger.get(key) is not None:
            ledger.change(key, "is part of timestep_distribution")


def _intervals(ledger: Ledger) -> None:
    """How often is saved and sampled; only steps and epochs can be counted here."""
    for key, unit_key, option in (
        ("save_every", "save_every_unit", "save_every_n"),
        ("save_after", "save_after_unit", "save_every_n"),
        ("sample_after", "sample_after_unit", "sample_every_n"),
    ):
        unit, count = str(ledger.get(unit_key) or "NEVER"), ledger.number(key)
        if unit in ("STEP", "EPOCH") and count:
            name = f"{option}_{unit.casefold()}s"
            ledger.change(key, f"{name} = {int(count)}", {name: int(count)})
            ledger.change(unit_key, f"is {unit.casefold()}s")
        elif unit in ("NEVER", "ALWAYS"):
            ledger.empty(key, unit_key)


def _images(ledger: Ledger) -> None:
    """Concepts, which become a dataset file with one dataset for each resolution."""
    sizes = [int(n) for s in str(ledger.get("resolution") or "").replace("x", ",").split(",") if (n := to_number(s))]
    buckets = ledger.source.get("aspect_ratio_bucketing") is not False
    concepts = [c for c in tables(ledger.get("concepts")) if c.get("path")]
    concepts = [c for c in concepts if c.get("enabled", True)]
    if concepts:
        general = {"enable_bucket": buckets, "max_bucket_reso": 2048, "caption_extension": ".txt"}
        general["batch_size"] = int(ledger.number("batch_size") or 1)
        sets = [({"resolution": size}, [_subset(c) for c in concepts]) for size in sizes or [1024]]
        ledger.texts["dataset_config"] = dataset_toml(general, sets)
        ledger.change("concepts", f"{len(concepts)} folders: {PREPARED}")
        ledger.empty("concept_file_name")
    elif ledger.get("concept_file_name"):
        ledger.ignore(
            "concept_file_name", "this file was not found; name the images with train_data_dir or dataset_config"
        )
    if sizes:
        more = f"; {len(sizes)} sizes are datasets of their own" if len(sizes) > 1 else ""
        ledger.change("resolution", f"{max(sizes)}{more}", {"resolution": max(sizes)})
    if "aspect_ratio_bucketing" in ledger.source:
        ledger.rename("aspect_ratio_bucketing", "enable_bucket")
        ledger.values["max_bucket_reso"], ledger.keys["max_bucket_reso"] = 2048, "aspect_ratio_bucketing"


def _subset(concept: Mapping[str, Any]) -> dict[str, Any]:
    text, image = (dict(*tables([concept.get(part)])) for part in ("text", "image"))
    subset = {
        "image_dir": concept["path"],
        "num_repeats": max(1, round(to_number(concept.get("balancing", concept.get("repeats"))) or 1)),
        "shuffle_caption": text.get("enable_tag_shuffling"),
        "keep_tokens": text.get("keep_tags_count") if text.get("enable_tag_shuffling") else None,
        "flip_aug": image.get("enable_random_flip"),
    }
    return {key: value for key, value in subset.items() if not is_empty(value) and value is not False}
