"""The settings of samples that prompts leave open, and the LoRA with which few steps are enough. Loads no torch."""

from collections.abc import Iterator
from pathlib import Path

from library import families, packages
from library.config.hub_names import FILE, about_absent, is_file_id
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.config.sections import Sampling
from library.config.strengths import strength_problems
from library.config.values import split_strength
from library.families.facts import FewStepLora

DEFAULT_SAMPLER = Sampling().sample_sampler


def prompt_defaults(config: RunConfig, model: JsonMapping) -> JsonObject:
    """Return what prompts leave open, by field: the `model`'s own values, those of a well-known LoRA for few steps over
    them, and the options over both.
    """
    sample, lora = config.sample, known_lora(config)
    of_lora: JsonObject = dict(lora.prompt) if lora else {}
    options = {
        "sample_steps": sample.sample_steps,
        "scale": sample.sample_scale,
        "guidance_scale": sample.sample_guidance_scale,
        "flow_shift": sample.sample_shift,
        "sample_sigmas": sample.sample_sigmas or None,
        "sample_sampler": None if lora and sample.sample_sampler == DEFAULT_SAMPLER else sample.sample_sampler,
    }
    chosen = {name: value for name, value in options.items() if value is not None}
    if {"sample_steps", "flow_shift"} & chosen.keys():
        of_lora.pop("sample_sigmas", None)
    defaults: JsonObject = {"sample_sampler": sample.sample_sampler, **model, **of_lora, **chosen}
    if sigmas := defaults.get("sample_sigmas"):
        defaults["sample_steps"] = len(sigmas)
    return defaults


def known_lora(config: RunConfig) -> FewStepLora | None:
    """Return the first of the LoRAs for samples that is well known; None if none is."""
    paths = [split_strength(text)[0] for text in config.sample.sample_lora]
    loras = families.facts_of(config.family).few_step_loras
    return next((lora for path in paths for lora in loras if lora.is_named(path)), None)


def sample_lora(config: RunConfig) -> dict[Path, float]:
    return {Path(path): strength for path, strength in map(split_strength, config.sample.sample_lora)}


def setting_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of a sample_lora that is nowhere, and of a sample_attention whose package is missing."""
    yield from _lora_problems(config)
    kernel = config.sample.sample_attention
    if why := packages.missing_kernel_package("sample_attention", kernel):
        yield why


def _lora_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problem of each file of sample_lora that is neither on this computer nor on the Hugging Face Hub."""
    for text in config.sample.sample_lora:
        path, _ = split_strength(text)
        if Path(path).is_file() or is_file_id(path):
            continue
        if any(strength_problems("sample_lora", text)):
            continue  # named with the option's other rules
        if Path(path).is_dir():
            yield Problem("sample_lora", ": {path} is a folder: name a file in it", path=path)
        else:
            yield about_absent("sample_lora", path, FILE)
