"""ai-toolkit: YAML files of a training (job: extension), as far as their meaning carries over."""

from collections.abc import Mapping
from typing import Any

from library.config.foreign.ledger import Ledger, is_empty
from library.config.foreign.trees import PREPARED, dataset_toml, dotted, precision, rest, set_by, tables, take
from library.config.schema import ConfigError

TRAINER = "ai-toolkit"
RENAMED = {
    "model.name_or_path": "pretrained_model_name_or_path",
    "name": "output_name",
    "network.linear": "network_dim",
    "network.linear_alpha": "network_alpha",
    "network.dropout": "network_dropout",
    "save.save_every": "save_every_n_steps",
    "train.batch_size": "train_batch_size",
    "train.steps": "max_train_steps",
    "train.gradient_accumulation_steps": "gradient_accumulation_steps",
    "train.gradient_accumulation": "gradient_accumulation_steps",
    "train.gradient_checkpointing": "gradient_checkpointing",
    "train.lr": "learning_rate",
    "train.unet_lr": "unet_lr",
    "train.lr_scheduler": "lr_scheduler",
    "train.max_grad_norm": "max_grad_norm",
    "train.seed": "seed",
    "train.noise_offset": "noise_offset",
    "train.min_snr_gamma": "min_snr_gamma",
    "train.cache_text_embeddings": "cache_text_encoder_outputs",
    "sample.sample_every": "sample_every_n_steps",
}
OPTIMIZERS = {
    "adam8bit": "AdamW8bit", "adamw8bit": "AdamW8bit", "adamw": "AdamW", "adam": "torch.optim.Adam", "lion": "Lion",
    "lion8bit": "Lion8bit", "prodigy": "Prodigy", "adafactor": "Adafactor", "dadaptation": "DAdaptation",
}  # fmt: skip
SAMPLINGS = {"sigmoid": "sigmoid", "linear": "uniform", "shift": "flux_shift", "flux_shift": "flux_shift"}
IGNORED = {
    "device": "it is for `accelerate launch`",
    "type": "it is always this trainer",
    "train.train_unet": "the image model is always trained",
    "train.noise_scheduler": "it follows from the model",
    "sample.sampler": "it follows from the model",
    "save.push_to_hub": "upload the file when it is done",
    "model.low_vram": "set blocks_to_swap, which saves as much as is wanted",
    "meta.": "metadata_title and its neighbours are what stands in the file",
}


def fits(found: Mapping[str, Any]) -> bool:
    """Whether this is a file of ai-toolkit."""
    inner = found.get("config")
    return isinstance(inner, Mapping) and isinstance(inner.get("process"), list)


def read(found: Mapping[str, Any], script: str = "") -> Ledger:
    """Every key of the first process -> our values, and what became of it. Raises ConfigError for other models."""
    inner = found["config"]
    if not inner["process"] or not isinstance(inner["process"][0], Mapping):
        raise ConfigError("config.process is empty: there is no training in this file")
    process = {"name": inner.get("name"), **inner["process"][0], "meta": found.get("meta")}
    flat = dotted(process)
    ledger = Ledger(flat, script or _script(flat), TRAINER)
    take(ledger, RENAMED)
    for part in (_model, _output, _network, _training, _datasets, _samples):
        part(ledger)
    if len(inner["process"]) > 1:
        ledger.notes.append(f"only the first of {len(inner['process'])} processes is read")
    rest(ledger, IGNORED)
    return ledger


def _script(flat: Mapping[str, Any]) -> str:
    arch = str(flat.get("model.arch") or "").casefold()
    name = str(flat.get("model.name_or_path") or "")
    family = "flux" if flat.get("model.is_flux") or arch == "flux" else ""
    family = "sdxl" if flat.get("model.is_xl") or arch in ("sdxl", "xl") else family
    if not family:
        raise ConfigError(
            f"this file is for {arch or name or 'another model'}, which is not trained here; "
            "or choose the training script with --script"
        )
    return f"{family}_train_network" if any(key.startswith("network.") for key in flat) else f"{family}_train"


def _model(ledger: Ledger) -> None:
    for key in ("model.is_flux", "model.is_xl", "model.arch"):
        if ledger.get(key):
            ledger.change(key, f"chooses the script: {ledger.script}")
    if ledger.get("model.quantize"):
        ledger.change("model.quantize", "8 bits are fp8_base here", {"fp8_base": True})


def _output(ledger: Ledger) -> None:
    folder, name = ledger.get("training_folder"), ledger.get("name")
    if folder:
        path = f"{folder}/{name}" if name else str(folder)
        ledger.change("training_folder", f"output_dir = {path}", {"output_dir": path})
    if dtype := ledger.get("save.dtype"):
        ledger.rename("save.dtype", "save_precision", precision(dtype, "float"))
    keep, every = ledger.number("save.max_step_saves_to_keep"), ledger.number("save.save_every")
    if keep and every:
        steps = int(keep * every)
        ledger.change("save.max_step_saves_to_keep", f"save_last_n_steps = {steps}", {"save_last_n_steps": steps})


def _network(ledger: Ledger) -> None:
    kind = str(ledger.get("network.type") or "lora").casefold()
    arguments = []
    for key, argument in (("network.conv", "conv_dim"), ("network.conv_alpha", "conv_alpha")):
        if ledger.number(key):
            arguments.append(f"{argument}={ledger.get(key)}")
            ledger.change(key, f"is network_args {argument}")
    lycoris = {"lokr": "lokr", "locon": "locon", "loha": "loha"}.get(kind)
    if lycoris:
        values = {"network_module": "lycoris.kohya", "network_args": [f"algo={lycoris}", *arguments]}
        ledger.change("network.type", f"{kind} is LyCORIS here", values)
    elif "network.type" in ledger.source:
        ledger.change("network.type", "LoRA", {"network_args": arguments} if arguments else {})
    if ledger.adapters and "network.linear_alpha" not in ledger.source and ledger.number("network.linear"):
        said = f"not in the file; {TRAINER} takes the rank"
        set_by(ledger, "network.linear_alpha", said, {"network_alpha": ledger.number("network.linear")})


def _training(ledger: Ledger) -> None:
    if name := ledger.get("train.optimizer"):
        ledger.rename("train.optimizer", "optimizer_type", OPTIMIZERS.get(str(name).casefold(), str(name)))
    found = {key: value for key, value in ledger.source.items() if key.startswith("train.optimizer_params.")}
    arguments = [f"{key.rpartition('.')[2]}={value}".replace(" ", "") for key, value in found.items()]
    for key in found:
        ledger.change(key, "becomes one of optimizer_args", {"optimizer_args": arguments})
    if dtype := ledger.get("train.dtype"):
        ledger.rename("train.dtype", "mixed_precision", precision(dtype))
    if ledger.adapters and not ledger.get("train.train_text_encoder"):
        set_by(
            ledger, "train.train_text_encoder", "false is network_train_unet_only", {"network_train_unet_only": True}
        )
    elif ledger.get("train.train_text_encoder") and not ledger.adapters:
        ledger.keep("train.train_text_encoder")
        ledger.rename("train.train_text_encoder", "train_text_encoder")
    if ledger.get("train.ema_config.use_ema"):
        decay = ledger.number("train.ema_config.ema_decay") or 0.99
        ledger.change("train.ema_config.use_ema", f"ema_decay = {decay}", {"ema_decay": decay})
        ledger.empty("train.ema_config.ema_decay")
    if ledger.family == "flux":
        kind = str(ledger.get("train.timestep_type") or "sigmoid")
        values = {
            "timestep_sampling": SAMPLINGS.get(kind, "sigmoid"),
            "model_prediction_type": "raw",
            "guidance_scale": 1.0,
        }
        said = f"{kind}: timestep_sampling = {values['timestep_sampling']}, raw predictions, guidance_scale = 1"
        set_by(ledger, "train.timestep_type", said, values)


def _datasets(ledger: Ledger) -> None:
    found = [d for d in tables(ledger.get("datasets")) if d.get("folder_path")]
    if not found:
        return
    word = ledger.get("trigger_word")
    sets = []
    for table in found:
        sizes = table.get("resolution") or 512
        for size in sizes if isinstance(sizes, list) else [sizes]:
            sets.append(({"resolution": size}, [_subset(table, word)]))
    general = {
        "enable_bucket": True,
        "max_bucket_reso": 2048,
        "batch_size": int(ledger.number("train.batch_size") or 1),
    }
    ledger.texts["dataset_config"] = dataset_toml(general, sets)
    on_disk = any(d.get("cache_latents_to_disk") for d in found)
    said = f"{len(sets)} datasets, one for each folder and resolution: {PREPARED}"
    cached = {"cache_latents": on_disk or any(d.get("cache_latents") for d in found), "cache_latents_to_disk": on_disk}
    ledger.change("datasets", said, cached)
    if word:
        said = f"stands before every caption and in the metadata; {TRAINER} puts it only where it is not there yet"
        ledger.change("trigger_word", said, {"metadata_trigger_phrase": word})


def _subset(table: Mapping[str, Any], word: Any) -> dict[str, Any]:
    ending = str(table.get("caption_ext") or "txt")
    subset = {
        "image_dir": table["folder_path"],
        "caption_extension": ending if ending.startswith(".") else f".{ending}",
        "num_repeats": table.get("num_repeats"),
        "caption_dropout_rate": table.get("caption_dropout_rate"),
        "shuffle_caption": table.get("shuffle_tokens"),
        "keep_tokens": table.get("keep_tokens"),
        "flip_aug": table.get("flip_x"),
        "is_reg": table.get("is_reg"),
        "caption_prefix": f"{word}, " if word else None,
    }
    return {key: value for key, value in subset.items() if not is_empty(value) and value is not False}


def _samples(ledger: Ledger) -> None:
    prompts = ledger.get("sample.prompts")
    if not isinstance(prompts, list):
        return
    word = str(ledger.get("trigger_word") or "")
    flags = {"width": "--w", "height": "--h", "seed": "--d", "sample_steps": "--s", "neg": "--n"}
    flags["guidance_scale"] = "--g" if ledger.family == "flux" else "--l"
    ending = ""
    for name, flag in flags.items():
        if (value := ledger.get(f"sample.{name}")) is not None:
            ending += f" {flag} {value}"
            ledger.change(f"sample.{name}", f"stands in the prompt file as {flag}")
    lines = [" ".join(str(prompt).replace("[trigger]", word).split()) + ending for prompt in prompts]
    ledger.texts["sample_prompts"] = "\n".join(lines) + "\n"
    ledger.change("sample.prompts", f"{len(lines)} prompts in a file of their own")
    if ledger.source.get("train.skip_first_sample") is not True:
        set_by(ledger, "train.skip_first_sample", "samples are drawn before training", {"sample_at_first": True})
