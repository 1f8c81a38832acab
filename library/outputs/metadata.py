"""Metadata of a saved file: kohya's `ss_*` keys and the `modelspec.*` keys of Stability AI.

All values are text. Local paths are never written: a path becomes the name of its file.
"""

import base64
import hashlib
import importlib.metadata
import json
import mimetypes
import random
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from library import families
from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import check_file_size, open_regular, read_regular
from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig
from library.config.schema import option_values
from library.config.sections import AdapterRun
from library.config.values import split_strength
from library.families.base import Family

# ss_ keys equal to option names; options that this kind of run lacks are left out.
OPTIONS = (
    *("learning_rate", "text_encoder_lr", "unet_lr", "gradient_checkpointing", "gradient_accumulation_steps"),
    *("lr_warmup_steps", "lr_scheduler", "network_dim", "network_alpha"),
    *("network_dropout", "mixed_precision", "full_fp16", "v2", "clip_skip", "max_token_length", "lowram"),
    *("noise_offset", "multires_noise_iterations", "multires_noise_discount", "adaptive_noise_scale"),
    *("zero_terminal_snr", "training_comment", "max_grad_norm", "caption_dropout_rate"),
    *("caption_dropout_every_n_epochs", "caption_tag_dropout_rate", "face_crop_aug_range", "prior_loss_weight"),
    *("min_snr_gamma", "scale_weight_norms", "ip_noise_gamma", "noise_offset_random_strength"),
    *("ip_noise_gamma_random_strength", "loss_type", "huber_schedule", "huber_scale", "huber_c", "fp8_base"),
    *("fp8_base_unet", "validation_seed", "validation_split", "max_validation_steps", "validate_every_n_epochs"),
    *("validate_every_n_steps", "resize_interpolation", "output_name"),
    # of single families
    *("model_type", "apply_t5_attn_mask", "weighting_scheme", "logit_mean", "logit_std", "mode_scale"),
    *("guidance_scale", "timestep_sampling", "sigmoid_scale", "model_prediction_type", "discrete_flow_shift"),
)
# Written even with no_metadata.
MINIMAL_KEYS = ("v2", "base_model_version", "network_module", "network_dim", "network_alpha", "network_args")
JSON = ("network_args", "datasets", "tag_frequency", "dataset_dirs", "reg_dataset_dirs", "bucket_info")
MAX_THUMBNAIL_BYTES = 16_000_000  # a header has at most 100 MB
EXTRAS = ("usage_hint", "merged_from", "trigger_phrase", "preprocessor", "is_negative_embedding")
PLAIN_TEXTS = ("author", "description", "license", "tags")


class MetadataBuilder:
    """The metadata of one run's files. Created at the start; base models are hashed in the background meanwhile."""

    def __init__(self, config: RunConfig, family: Family, dataset_stats: JsonMapping, optimizer: str = "") -> None:
        """`dataset_stats` is the result of the function of that name, `optimizer` that of `describe_optimizer`."""
        self._config, self._family = config, family
        self._started = time.time()
        self._session = random.SystemRandom().randint(0, 2**32)  # not the run's generator, whose draws must not change
        self._facts: JsonObject = {}
        self._hashes: Hashes | None = None
        if isinstance(config, AdapterRun):
            self._facts = {**_options(config), **dataset_stats, "optimizer": optimizer}
            bases = {"sd_model": config.model.pretrained_model_name_or_path, "vae": config.model.vae}
            if not config.network.no_metadata:
                self._hashes = Hashes({key: str(place) for key, place in bases.items() if place})

    def of_file(self, epoch: int, step: int, seed: int | None) -> dict[str, str]:
        """Return the metadata of a file saved now. The first call may wait for the hashes.

        `seed` is the run's seed: drawn if none is set, or from a resumed state.
        """
        spec = modelspec(self._config, self._family.architecture)
        if not isinstance(config := self._config, AdapterRun):
            return spec
        facts = {**self._facts, "session_id": self._session, "training_started_at": self._started}
        facts |= {
            "base_model_version": self._family.base_model_version,
            "network_module": config.network.module,
        }
        facts |= _network_args(config)
        if config.network.assistant_lora:  # applied while training, but not part of the file
            path, strength = split_strength(config.network.assistant_lora)
            facts["assistant_lora"] = f"{Path(path).name}:{strength:g}"
        if self._hashes is None:
            return _metadata_texts({key: facts[key] for key in MINIMAL_KEYS if key in facts}) | spec
        facts |= self._hashes.result()
        facts |= {"training_finished_at": time.time(), "steps": step, "epoch": epoch, "seed": seed}
        return _metadata_texts(facts) | spec


class Hashes:
    """Hashes of the base model's files, computed while the training starts: 24 GB take a minute."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """`files`: "sd_model" or "vae" -> path or id."""
        self._found: dict[str, str] = {}
        self._thread = threading.Thread(target=self._work, args=(dict(files),), name="hashes", daemon=True)
        self._thread.start()

    def result(self) -> dict[str, str]:
        self._thread.join()
        return self._found

    def _work(self, files: dict[str, str]) -> None:
        for key, name in files.items():
            path = Path(name)
            if path.exists():
                self._found[f"{key}_hash"] = short_hash(path)
                self._found[f"new_{key}_hash"] = long_hash(path)
                name = path.name
            self._found[f"{key}_name"] = name


def short_hash(path: Path) -> str:
    """Return the hash of 2022's web UI: 8 digits over 64 KiB at 1 MiB."""
    try:
        with open_regular(path) as f:
            f.seek(0x100000)
            return hashlib.sha256(f.read(0x10000)).hexdigest()[:8]
    except OSError:
        return "IsADirectory" if path.is_dir() else "NOFILE"


def long_hash(path: Path) -> str:
    """Return the SHA-256 of the whole file."""
    try:
        with open_regular(path) as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError:
        return "IsADirectory" if path.is_dir() else "NOFILE"


def modelspec(config: RunConfig, architecture: str) -> dict[str, str]:
    """Return the modelspec.* keys of a file saved now."""
    now, meta = datetime.now().replace(microsecond=0), config.metadata
    kind, suffix = config.file_kind
    width, height = config.data.size or (1024, 1024)  # the largest of several sizes
    out = {
        "sai_model_spec": "1.0.1",
        "architecture": architecture + suffix,
        "implementation": families.facts_of(config.family).implementation,
        "title": meta.metadata_title or config.save.output_name or f"{kind}@{now.timestamp():.0f}",
        "resolution": f"{width}x{height}",
        "date": now.isoformat(),
        "implementation_version": _program_version(),
        **{key: getattr(meta, f"metadata_{key}") for key in (*PLAIN_TEXTS, *EXTRAS)},
        "thumbnail": _thumbnail(meta.metadata_thumbnail),
    }
    if word := config.caption_change.words.partition(" ")[0]:  # the first vector's word, which prompts use
        out["trigger_phrase"] = meta.metadata_trigger_phrase or word
    if families.facts_of(config.family).has_prediction_type:
        out["prediction_type"] = "v" if config.model.v_parameterization else "epsilon"
    low, high = config.noise.min_timestep, config.noise.max_timestep
    if low is not None or high is not None:
        out["timestep_range"] = f"{low or 0},{1000 if high is None else high}"
    if config.model.clip_skip is not None:
        out["encoder_layer"] = str(config.model.clip_skip)
    return {f"modelspec.{key}": str(value) for key, value in out.items() if value is not None}


def _options(config: RunConfig) -> JsonObject:
    values = option_values(config)
    out = {key: values[key] for key in OPTIONS if key in values}
    rates = list(values["text_encoder_lr"])
    out["text_encoder_lr"] = rates if len(rates) > 1 else next(iter(rates), None)
    if out["lr_scheduler"] and config.optim.lr_scheduler_type:
        out["lr_scheduler"] = config.optim.lr_scheduler_type
    return out | {
        "cache_latents": config.cache.latents,
        "debiased_estimation": config.loss.debiased_estimation_loss,
        "sd_scripts_commit_hash": "(unknown)",
    }


def _network_args(config: AdapterRun) -> JsonObject:
    if not config.network.network_args:
        return {}
    pairs = (pair.partition("=") for pair in config.network.network_args)
    arguments = {key: Path(value).name if Path(value).is_file() else value for key, _, value in pairs}
    return {"network_args": {**arguments, "dropout": arguments.get("dropout", config.network.network_dropout)}}


def _thumbnail(value: str | None) -> str | None:
    """Return an image file as a data URL; a data URL is unchanged."""
    if not value or value.startswith(("data:", "http")):
        return value
    try:
        content = read_regular(value, MAX_THUMBNAIL_BYTES)
    except OSError:  # `thumbnail_notes` remarks on it
        return None
    kind = mimetypes.guess_type(value)[0] or "image/jpeg"
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def thumbnail_notes(value: str | None) -> Iterator[Problem]:
    """Yield why a result has no thumbnail: its file is missing, too large for a header, or no file."""
    if value and not value.startswith(("data:", "http")):
        try:
            check_file_size(value, MAX_THUMBNAIL_BYTES)
        except ConfigError as e:
            yield from (Problem("metadata_thumbnail", ": {why}", why=problem) for problem in e.problems)


def _metadata_texts(facts: JsonMapping) -> dict[str, str]:
    return {f"ss_{key}": json.dumps(v) if key in JSON else str(v) for key, v in facts.items()}


def _program_version() -> str:
    try:
        return f"kohya-trainer/{importlib.metadata.version('kohya-trainer')}"
    except importlib.metadata.PackageNotFoundError:
        return "kohya-trainer"
