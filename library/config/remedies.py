"""From a sentence about a problem to the values that would mend it, where they can be known.

The sentences are the ones that options, sections and the preflight check write. A remedy is offered, never applied: it
is what the "Fix" button beside a finding puts into the form.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from library.config.schema import ConfigError, build, missing, options, values

USUAL_REPEATS = 10  # of a folder whose name does not say them, as guides for sd-scripts have it
COMMON_ARGUMENTS = ("weight_decay", "betas", "eps")  # of optimizers, which mean the same in most of them
Remedy = Callable[[re.Match[str], Any], dict[str, Any]]


def remedy(problem: str, config: Any) -> dict[str, Any]:
    """The option values that mend a problem of this config, by name; none where only a person can know them."""
    for pattern, mends in REMEDIES:
        if found := re.search(pattern, problem):
            wanted = {name: value for name, value in mends(found, config).items() if name in options(type(config))}
            return wanted if wanted and _helps(problem, config, wanted) else {}
    return {}


def _helps(problem: str, config: Any, wanted: Mapping[str, Any]) -> bool:
    """Whether the rules of the options no longer complain of the same once the values are as wanted."""
    try:
        mended = build(type(config), {**values(config), **wanted}, notes=[])
    except ConfigError as error:  # other problems may well stay
        return problem not in str(error).splitlines()
    return problem not in missing(mended)


def _off(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, False)


def _default(config: Any, name: str) -> dict[str, Any]:
    """An option switched off: a yes-or-no option becomes no, any other its default."""
    known = options(type(config))
    return {name: known[name].default} if name in known else {}


def _free_name(config: Any) -> dict[str, Any]:
    """An output name like this one that no file has yet."""
    name = config.save.output_name or config.script
    folder, number = Path(config.save.output_dir or "."), 2
    stem = re.sub(r"-\d+$", "", name)
    while any(folder.glob(f"{stem}-{number}[.-]*")) or any((folder / "runs").glob(f"{stem}-{number}-*")):
        number += 1
    return {"output_name": f"{stem}-{number}"}


def _optimizer(config: Any, name: str, rate: str | None) -> dict[str, Any]:
    """Another optimizer, with the arguments that mean the same to it; a `rate` replaces all learning rates."""
    optim = config.optim
    kept = tuple(pair for pair in optim.optimizer_args if pair.partition("=")[0].strip() in COMMON_ARGUMENTS)
    found: dict[str, Any] = {"optimizer_type": name}
    found |= {"optimizer_args": kept} if kept != optim.optimizer_args else {}
    found |= {old: False for old in ("use_8bit_adam", "use_lion_optimizer") if getattr(optim, old)}
    if rate:
        found["learning_rate"] = float(rate)
        found |= _default(config, "unet_lr") if getattr(optim, "unet_lr", None) else {}
        found |= _default(config, "text_encoder_lr") if getattr(optim, "text_encoder_lr", None) else {}
    return found


REMEDIES: tuple[tuple[str, Remedy], ...] = (
    (r"^resolution is not set", lambda m, c: {"resolution": "1024"}),
    (r"^output_name: .*(would be overwritten|writes these files)", lambda m, c: _free_name(c)),
    (r"^pretrained_model_name_or_path: .* is a web address; write (?P<id>\S+) instead",
     lambda m, c: {"pretrained_model_name_or_path": m["id"]}),
    (r"^(?P<one>train_data_dir|reg_data_dir)\b.*give (?:the folder above it|that folder|the folder that holds them): "
     r"(?P<folder>.+)$", lambda m, c: {m["one"]: m["folder"]}),
    (r"set dataset_repeats to see them more often", lambda m, c: {"dataset_repeats": USUAL_REPEATS}),
    (r"network_args bypass_mode|add bypass_mode=True to network_args",
     lambda m, c: {"network_args": (*c.network.network_args, "bypass_mode=True")}),
    (r"^cache_text_encoder_outputs needs network_train_unet_only", lambda m, c: {"network_train_unet_only": True}),
    (r"^(?P<one>\w+) cannot be used with (?P<other>cache_\w+): switch one of them off",
     lambda m, c: _default(c, m["one"])),
    (r"^(?P<one>\w+) cannot be used with (?P<other>\w+): switch one of them off", lambda m, c: _default(c, m["other"])),
    (r"^(?P<one>\w+) works without buckets only", lambda m, c: _off("enable_bucket")),
    (r"^min_bucket_reso .*not be above max_bucket_reso|^max_bucket_reso(?! has)", lambda m, c: _bucket_limits(c)),
    (r"resolution must not be (?:below|above)", lambda m, c: _bucket_limits(c)),
    (r"^bucket_reso_steps must be a multiple of (?P<grid>\d+)", lambda m, c: {"bucket_reso_steps": 64}),
    (r"^(?P<one>full_fp16|full_bf16) needs mixed_precision = (?P<type>\w+)",
     lambda m, c: {"mixed_precision": m["type"]}),
    (r"needs mixed_precision = bf16", lambda m, c: {"mixed_precision": "bf16"}),
    (r"^fp8_compute needs a base model in 8 bits", lambda m, c: {"fp8_base": True}),
    (r"^int8_base and .* exclude each other", lambda m, c: _off("int8_base")),
    (r"set mixed_precision = bf16|^mixed_precision: fp16 needs a GPU", lambda m, c: {"mixed_precision": "bf16"}),
    (r"set optimizer_type = Adafactor", lambda m, c: {"optimizer_type": "Adafactor"}),
    (r"^optimizer_type \S+ has one learning rate for all", lambda m, c: {**_default(c, "unet_lr"),
     **_default(c, "text_encoder_lr"), "learning_rate": c.optim.unet_lr or c.optim.learning_rate}),
    (r"^optimizer_type .*\bset optimizer_type = (?P<other>\w+)(?: and learning_rate = (?P<rate>[\d.e-]+))?",
     lambda m, c: _optimizer(c, m["other"], m["rate"])),
    (r"^max_grad_norm hinders", lambda m, c: {"max_grad_norm": 0.0}),
    (r"set gradient_accumulation_steps = 1", lambda m, c: {"gradient_accumulation_steps": 1}),
    (r"^lr_warmup_steps does not go with", lambda m, c: {"lr_scheduler": "constant_with_warmup"}
     if not c.optim.lr_scheduler_type else {"lr_warmup_steps": 0}),
    (r"^lr_scheduler cosine_with_min_lr needs lr_scheduler_min_lr_ratio",
     lambda m, c: {"lr_scheduler_min_lr_ratio": 0.1}),
    (r"^compile_mode .*: use (?P<mode>default|max-autotune-no-cudagraphs)", lambda m, c: {"compile_mode": m["mode"]}),
    (r"^compile_mode: .*(use default|or use default)", lambda m, c: {"compile_mode": "default"}),
    (r"^compile_activation_budget", lambda m, c: _default(c, "compile_activation_budget")),
    (r"^compile_backend: PyTorch has no backend", lambda m, c: {"compile_backend": "inductor"}),
    (r"^compile: ", lambda m, c: {"compile_fallback": True}),
    (r"^(?P<one>\w+) and (?P<other>\w+) (?:exclude each other|want opposite things|leave nothing to train)",
     lambda m, c: _default(c, m["other"])),
    (r"^huber_schedule = snr is not possible", lambda m, c: {"huber_schedule": "constant"}),
    (r"^model_type", lambda m, c: _default(c, "model_type")),
    (r"^network_module .*(?:write \S+ or leave it empty|is not offered)", lambda m, c: {"network_module": None}),
    (r"^sample_prompts: sample images are asked for, but",
     lambda m, c: {"sample_every_n_steps": None, "sample_every_n_epochs": None, "sample_at_first": False}),
    (r"^log_with = .*needs logging_dir", lambda m, c: {"log_with": None}),
    (r"^adaptive_noise_scale needs noise_offset", lambda m, c: _default(c, "adaptive_noise_scale")),
    (r"^(?P<one>\w+) needs v_parameterization", lambda m, c: _default(c, m["one"])),
    (r"^(?P<one>v_pred_like_loss) cannot be used with", lambda m, c: _default(c, m["one"])),
    (r"^save_state_to_huggingface needs|^async_upload needs", lambda m, c: _off("save_state_to_huggingface")),
    (r"^ema_decay cannot be used with", lambda m, c: {"ema_decay": 0}),
    (r"^(?P<one>\w+) does not work yet", lambda m, c: _default(c, m["one"])),
    (r"^(?P<one>\w+) \S* ?is small for \w+, which adapts its own", lambda m, c: {m["one"]: 1.0}),
    (r"set caption_extension = \"(?P<ending>\.\w+)\"", lambda m, c: {"caption_extension": m["ending"]}),
    (r"caption files? of several lines.*set enable_wildcard", lambda m, c: {"enable_wildcard": True}),
    (r"^(?P<one>\w+) has no effect", lambda m, c: _default(c, m["one"])),
    (r"gone, only latents are left; set cache_latents_to_disk", lambda m, c: {"cache_latents_to_disk": True}),
    (r"^learning_rate is 0, .*: (?P<rate>\S+) is usual", lambda m, c: {"learning_rate": float(m["rate"])}),
    (r"^(?P<one>\w+) must be (?:one of|a (?:whole )?number\b).*\(did you mean (?P<meant>[^?]+)\?\)",
     lambda m, c: {m["one"]: m["meant"]}),
    (r"^(?P<one>\w+) must be at least (?P<least>[-\d.e]+)(?: and at most [-\d.e]+)?, got -",
     lambda m, c: {m["one"]: m["least"]}),
    (r"^(?P<one>\w+) needs .*; the default is (?P<default>.+)$", lambda m, c: _default(c, m["one"])),
)  # fmt: skip


def _bucket_limits(config: Any) -> dict[str, Any]:
    """Limits of buckets around the resolution, by multiples of 64."""
    size = config.data.size or (1024, 1024)
    least, most = min(config.data.min_bucket_reso, min(size)), max(config.data.max_bucket_reso, max(size))
    return {"min_bucket_reso": least // 64 * 64 or 64, "max_bucket_reso": -(-most // 64) * 64}
