"""ai-toolkit: YAML files of a training (job: extension), as far as their meaning carries over."""

from collections.abc import Mapping

from library.config.json_types import JsonMapping, JsonObject
from library.config.schema import ConfigError
from library.importers import aitoolkit_data, aitoolkit_learning
from library.importers.kohya_ss import is_on
from library.importers.ledger import KeyLedger
from library.importers.trees import ONLY, dotted, precision, rest, take

TRAINER = "ai-toolkit"
RENAMED = {
    "model.name_or_path": "pretrained_model_name_or_path",
    "model.vae_path": "vae",
    "model.is_v_pred": "v_parameterization",
    "model.compile": "compile",
    "model.compile_mode": "compile_mode",
    "model.compile_fullgraph": "compile_fullgraph",
    "model.compile_dynamic": "compile_dynamic",
    "model.cache_size_limit": "compile_cache_size_limit",
    "model.attn_masking": "apply_t5_attn_mask",
    "name": "output_name",
    "network.dropout": "network_dropout",
    "network.pretrained_lora_path": "network_weights",
    "save.save_every": "save_every_n_steps",
    "train.batch_size": "train_batch_size",
    "train.gradient_checkpointing": "gradient_checkpointing",
    "train.lr": "learning_rate",
    "train.max_grad_norm": "max_grad_norm",
    "train.seed": "seed",
    "train.start_step": "initial_step",
    "train.reg_weight": "prior_loss_weight",
    "train.cache_text_embeddings": "cache_text_encoder_outputs",
    "train.prompt_dropout_prob": "caption_dropout_rate",
    "logging.run_name": "wandb_run_name",
}
NUMBERS = {
    "train.noise_offset": "noise_offset",
    "train.min_snr_gamma": "min_snr_gamma",
    "train.min_denoising_steps": "min_timestep",
}
DEFAULTS: JsonMapping = {
    "save.dtype": "float16",
    "save.save_every": 1000,
    "save.max_step_saves_to_keep": 5,
    "train.steps": 1000,
    "train.lr": 1e-6,
    "train.optimizer": "adamw",
    "train.lr_scheduler": "constant",
    "train.batch_size": 1,
    "train.dtype": "fp32",
    "train.train_unet": True,
    "train.train_text_encoder": False,
    "train.gradient_checkpointing": True,
    "train.max_grad_norm": 1.0,
    "train.timestep_type": "sigmoid",
    "train.loss_type": "mse",
    "train.skip_first_sample": False,
}
OF_ADAPTERS: JsonMapping = {"network.type": "lora", "network.linear": 4, "network.linear_alpha": 1.0}
TRAINERS = ("sd_trainer", "ui_trainer", "diffusion_trainer")
OTHERS = {
    "textual_inversion_trainer": "an embedding (textual inversion)", "concept_slider": "a concept slider",
    "slider": "a slider", "slider_old": "a slider", "ultimate_slider_trainer": "a slider",
    "image_reference_slider_trainer": "a slider", "reference": "a slider from pairs of images",
    "concept_replacer": "a replaced concept", "vae": "a VAE", "esrgan": "an upscaler (ESRGAN)",
    "rescale_sd": "a rescaled model", "lora_hack": "a changed LoRA file",
}  # fmt: skip
JOBS = {"generate": "images", "extract": "a LoRA file from two models", "mod": "a changed LoRA file",
        "merge": "a merged model"}  # fmt: skip
_GPU = "it is for `accelerate launch`"
IGNORED = {
    "device": _GPU,
    "type": "it is always this trainer",
    "train.noise_scheduler": "it follows from the model",
    "train.xformers": "attention is PyTorch's SDPA",
    "train.sdp": "attention is PyTorch's SDPA",
    "train.attention_backend": "attention is PyTorch's SDPA",
    "train.unload_text_encoder": "cache_text_encoder_outputs takes the text encoders off the GPU",
    "train.bypass_guidance_embedding": "the guidance is guidance_scale",
    "sample.sampler": "it follows from the model",
    "save.save_format": "adapters and FLUX.1 models are always .safetensors files",
    "model.low_vram": "set blocks_to_swap, which saves as much as is wanted",
    "model.text_encoder_bits": "text encoders have 8 bits with fp8_base",
    "model.dtype": "frozen weights are kept in mixed_precision",
    "meta.": "metadata_title and its neighbours are what stands in the file",
    "performance_log_every": "the speed is always shown",
    "sqlite_db_path": "it belongs to ai-toolkit's own page",
}


def fits(found: JsonMapping) -> bool:
    """Whether this is a file of ai-toolkit."""
    inner = found.get("config")
    return isinstance(inner, Mapping) and isinstance(inner.get("process"), list)


def read(found: JsonMapping, script: str = "") -> KeyLedger:
    """Every key of the first process -> our values, and what became of it. Raises ConfigError for other models."""
    inner = found["config"]
    if not inner["process"] or not isinstance(inner["process"][0], Mapping):
        raise ConfigError("config.process is empty: there is no training in this file")
    process = {"name": inner.get("name"), **inner["process"][0], "meta": found.get("meta")}
    _refuse(process, str(found.get("job") or "extension"))
    flat = dotted(process)
    script = script or _script(flat)
    source, absent = _completed(flat, script.endswith("_network"))
    ledger = KeyLedger(source, script, TRAINER, absent=absent)
    take(ledger, RENAMED)
    take(ledger, {key: option for key, option in NUMBERS.items() if ledger.number(key)})
    for part in (_model, _output, *aitoolkit_learning.PARTS, *aitoolkit_data.PARTS):
        part(ledger)
    if len(inner["process"]) > 1:
        ledger.notes.append(f"only the first of {len(inner['process'])} processes is read")
    rest(ledger, IGNORED)
    return ledger


def _refuse(process: JsonMapping, job: str) -> None:
    """Other programs than that for LoRA and whole models are named."""
    kind = str(process.get("type") or "")
    adapter = process.get("adapter")
    what = JOBS.get(job, "")
    if kind not in TRAINERS:
        what = what or OTHERS.get(kind, "") or f"a process of the type {kind or '(none)'}"
    elif isinstance(adapter, Mapping) and adapter:
        what = f"an adapter of the type {adapter.get('type') or '(none)'} (images as prompts or control images)"
    elif isinstance(process.get("embedding"), Mapping):
        what = OTHERS["textual_inversion_trainer"]
    elif isinstance(process.get("slider"), Mapping):
        what = OTHERS["slider"]
    if what:
        verb = "makes" if job in JOBS else "trains"
        raise ConfigError(f"this file of {TRAINER} {verb} {what}, which is not done here: use {TRAINER} for it; {ONLY}")


def _script(flat: JsonMapping) -> str:
    arch = str(flat.get("model.arch") or "").casefold().partition(":")[0]
    name = str(flat.get("model.name_or_path") or "")
    switches = {"model.is_flux": "flux", "model.is_xl": "sdxl"}
    family = {"flux": "flux", "sdxl": "sdxl", "xl": "sdxl"}.get(arch, "")
    if not arch:
        family = next((f for key, f in switches.items() if is_on(flat.get(key))), "")
    others = {"flex.1": "Flex.1", "flex.2": "Flex.2", "kontext": "FLUX.1 Kontext", "flux.1-fill": "FLUX.1 Fill",
              "flux.2": "FLUX.2", "chroma": "Chroma"}  # fmt: skip
    other = next((model for word, model in others.items() if word in name.casefold()), "")
    if not family or (other and family == "flux"):
        model = other or arch or name or "Stable Diffusion 1.5"
        raise ConfigError(f"this file of {TRAINER} is for {model}, which is not trained here: use {TRAINER}; {ONLY}")
    return f"{family}_train_network" if any(key.startswith("network.") for key in flat) else f"{family}_train"


def _completed(flat: JsonMapping, adapters: bool) -> tuple[JsonObject, frozenset[str]]:
    """The settings with ai-toolkit's defaults where they are missing, and the keys of those."""
    defaults = {**DEFAULTS, **(OF_ADAPTERS if adapters else {})}
    if "network.rank" in flat:
        defaults.pop("network.linear", None)
    if "network.alpha" in flat:
        defaults.pop("network.linear_alpha", None)
    nulls = {key: value for key, value in defaults.items() if flat.get(key) is None}
    return {**flat, **nulls}, frozenset(nulls.keys() - flat.keys())


def _model(ledger: KeyLedger) -> None:
    for key in ("model.is_flux", "model.is_xl", "model.arch"):
        if ledger.get(key):
            ledger.change(key, f"chooses the script: {ledger.script}")
    if is_on(ledger.get("model.quantize")) and ledger.adapters:
        _quantize(ledger)
    elif is_on(ledger.get("model.quantize")):
        ledger.ignore("model.quantize", "weights that learn have at least 16 bits")
    for key in ("model.quantize_te", "model.qtype", "model.qtype_te"):
        if key in ledger.left():
            ledger.change(
                key, "is part of model.quantize" if is_on(ledger.get("model.quantize")) else "nothing is quantized"
            )
    if path := ledger.get("model.assistant_lora_path"):
        if str(path).endswith(".safetensors"):
            ledger.rename("model.assistant_lora_path", "base_weights", [str(path)])
        else:
            said = f"download {path} and name its file in base_weights, which merges it before the training"
            ledger.ignore("model.assistant_lora_path", said)
    share = ledger.number("model.layer_offloading_transformer_percent")
    if is_on(ledger.get("model.layer_offloading")) and ledger.family == "flux":
        blocks = min(35, max(1, round((1.0 if share is None else share) * 38)))
        ledger.change("model.layer_offloading", f"blocks_to_swap = {blocks}", {"blocks_to_swap": blocks})
        if share is not None:
            ledger.change("model.layer_offloading_transformer_percent", "is part of blocks_to_swap")


def _quantize(ledger: KeyLedger) -> None:
    kind = str(ledger.get("model.qtype") or "qfloat8").casefold().partition("|")[0]
    encoders = is_on(ledger.get("model.quantize_te")) or "model.quantize_te" not in ledger.source
    name = "int8_base" if "int" in kind and "8" in kind else "fp8_base" if encoders else "fp8_base_unet"
    same = kind in ("qfloat8", "float8", "int8", "qint8", "uint8")
    said = f"{kind} is {name} here" if same else f"{kind} is not offered here; the nearest is {name}"
    ledger.change("model.quantize", said, {name: True})


def _output(ledger: KeyLedger) -> None:
    folder, name = ledger.get("training_folder"), ledger.get("name")
    if folder:
        path = f"{str(folder).rstrip('/')}/{name}" if name else str(folder)
        ledger.change("training_folder", f"output_dir = {path}", {"output_dir": path})
    ledger.rename("save.dtype", "save_precision", precision(ledger.get("save.dtype"), "float"))
    keep, every = ledger.number("save.max_step_saves_to_keep"), ledger.number("save.save_every")
    if keep and every:
        steps = int(keep * every)
        ledger.change("save.max_step_saves_to_keep", f"save_last_n_steps = {steps}", {"save_last_n_steps": steps})
    if str(ledger.get("save.save_format")) == "diffusers" and ledger.script == "sdxl_train":
        ledger.rename("save.save_format", "save_model_as", "diffusers_safetensors")
    if is_on(ledger.get("save.push_to_hub")) and ledger.get("save.hf_repo_id"):
        ledger.change("save.push_to_hub", "huggingface_repo_id says so")
        ledger.rename("save.hf_repo_id", "huggingface_repo_id")
        seen = "private" if is_on(ledger.get("save.hf_private")) else "public"
        ledger.change("save.hf_private", f"huggingface_repo_visibility = {seen}", {"huggingface_repo_visibility": seen})
    if is_on(ledger.get("logging.use_wandb")):
        ledger.change("logging.use_wandb", "log_with = wandb", {"log_with": "wandb"})
        take(ledger, {"logging.project_name": "log_tracker_name"})
