"""Candidate settings to compare. They are options of a training only, so that a training can use the best.

`ALL` are those of `kohya bench`, each complete; the functions yield changes that reduce the memory or time of a
training, for probes, `compile_autotune` and the advice of a check. Do not import torch: the page offers these too.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from library import families
from library.config import schema
from library.config.building import replace_options
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike, Problem, option_name, together
from library.config.run_config import RunConfig
from library.config.sections import ModulatedMemory
from library.config.values import did_you_mean

Overrides = dict[str, Any]  # options that differ from the config of the training

# Every candidate starts from these: no compiling, no checkpointing.
BASELINE_CHANGES: JsonMapping = {
    "compile": False,
    "compile_scope": "blocks",
    "compile_autotune": False,
    "compile_mode": "default",
    "compile_dynamic": "auto",
    "compile_activation_budget": 1.0,
    "cuda_graphs": "false",
    "compile_from_step": None,
    "gradient_checkpointing": False,
    "checkpoint_keep_attention": False,
    "cpu_offload_checkpointing": False,
}
COMPILE_CHANGES = {"compile": True}
CKPT = {"gradient_checkpointing": True}


@dataclass(frozen=True)
class Candidate:
    """Settings to measure: a name, a description, and the options."""

    name: str
    about: str
    options: JsonMapping = field(default_factory=dict)
    needs: str = ""  # "cuda" if it needs a GPU
    usual: bool = True  # measured by default

    def chosen(self) -> JsonObject:
        return {**BASELINE_CHANGES, **self.options} if self.name != OWN_SETTINGS else dict(self.options)


OWN_SETTINGS = "yours"  # a run's own settings, from its TOML

ALL = (
    Candidate("eager", "eager, without gradient checkpointing"),
    Candidate("checkpointing", "eager, gradient checkpointing: the usual setting", CKPT),
    Candidate("compiled", "blocks compiled in place", COMPILE_CHANGES),
    Candidate("compiled+checkpointing", "compiled, gradient checkpointing", {**COMPILE_CHANGES, **CKPT}),
    Candidate(
        "compiled+attention",
        "compiled, gradient checkpointing that keeps attention outputs",
        {**COMPILE_CHANGES, **CKPT, "checkpoint_keep_attention": True},
    ),
    Candidate(
        "compiled+budget",
        "compiled, half of the activations kept",
        {**COMPILE_CHANGES, "compile_activation_budget": 0.5},
    ),
    Candidate(
        "compiled+fp8-base",
        "compiled, gradient checkpointing, frozen base in fp8",
        {**COMPILE_CHANGES, **CKPT, "fp8_base": True},
        "cuda",
    ),
    Candidate(
        "compiled+swap",
        "compiled, gradient checkpointing, 20 blocks swapped to CPU memory",
        {**COMPILE_CHANGES, **CKPT, "blocks_to_swap": 20},
        "cuda",
        usual=False,
    ),
    Candidate(
        "compiled+dynamic", "compiled once for all sizes", {**COMPILE_CHANGES, "compile_dynamic": "true"}, usual=False
    ),
    Candidate(
        "compiled-model", "the whole model compiled as one", {**COMPILE_CHANGES, "compile_scope": "model"}, usual=False
    ),
    Candidate(
        "cuda-graphs",
        "compiled, replayed as CUDA graphs (reduce-overhead)",
        {**COMPILE_CHANGES, "compile_mode": "reduce-overhead", "cuda_graphs": "auto"},
        "cuda",
        usual=False,
    ),
    Candidate("recorded", "eager, replayed as CUDA graphs", {"cuda_graphs": "true"}, "cuda", usual=False),
    Candidate(
        "recorded+checkpointing",
        "eager, gradient checkpointing, replayed as CUDA graphs",
        {**CKPT, "cuda_graphs": "true"},
        "cuda",
        usual=False,
    ),
    Candidate(
        "max-autotune",
        "compiled, kernels autotuned (max-autotune)",
        {**COMPILE_CHANGES, "compile_mode": "max-autotune-no-cudagraphs"},
        "cuda",
        usual=False,
    ),
    Candidate("int8", "compiled, frozen base in int8", {**COMPILE_CHANGES, "int8_base": True}, "cuda", usual=False),
    Candidate(
        "int8-products",
        "compiled, int8 matrix products",
        {**COMPILE_CHANGES, "int8_base": True, "int8_compute": True},
        "cuda",
        usual=False,
    ),
    Candidate(
        "fp8",
        "compiled, fp8 matrix products",
        {**COMPILE_CHANGES, "fp8_base": True, "fp8_compute": True},
        "cuda",
        usual=False,
    ),
)
NAMED = {candidate.name: candidate for candidate in ALL}
ALL_NAMES = "all"  # stands for every name

RECORDED = "recorded"
EAGER_IMAGES = {"sample_compile": "false", "compile": False}
COMPILED_IMAGES = {"sample_compile": "true", "compile": False}
# Ways to generate images, the baseline first -> their options. Each attention kernel of a machine adds another way.
IMAGE_WAYS: Mapping[str, JsonMapping] = {
    "eager": {**EAGER_IMAGES, "cuda_graphs": "false"},
    RECORDED: {**EAGER_IMAGES, "cuda_graphs": "true"},
    "compiled": {**COMPILED_IMAGES, "cuda_graphs": "false"},
    f"compiled+{RECORDED}": {**COMPILED_IMAGES, "cuda_graphs": "true"},
    "compiled+cached": {**COMPILED_IMAGES, "cuda_graphs": "false", "sample_cache": "auto"},
}


def choose_candidates(names: Iterable[str], of_run: bool, device: str, option_names: Iterable[str]) -> list[Candidate]:
    """Return the candidates to measure, the baseline first. `of_run`: whether a run's settings are compared as well.

    Without names these are the usual ones; `all` means every one that this device can run and whose options are among
    `option_names`. Raises ConfigError for an unknown name.
    """
    requested = [name for part in names for name in part.split(",") if name]
    fitting = [c for c in ALL if (not c.needs or c.needs == device) and set(c.options) <= set(option_names)]
    yours = [Candidate(OWN_SETTINGS, "the run's own settings")] if of_run else []
    if not requested:
        return [*yours, *(c for c in fitting if c.usual)]
    if requested == [ALL_NAMES]:
        return [*yours, *fitting]
    possible = {c.name: c for c in (*yours, *fitting)}
    if unknown := [name for name in dict.fromkeys(requested) if name not in possible]:
        elsewhere = {candidate.name for candidate in ALL if candidate.needs not in ("", device)}
        raise ConfigError(*(unknown_name(name, possible, elsewhere, "is not a known variant") for name in unknown))
    return [possible[name] for name in dict.fromkeys(requested)]


def unknown_name(name: str, possible: Collection[str], on_gpu: Container[str], otherwise: str) -> Problem:
    """Return the problem of a name that is not `possible`: it needs a GPU, or is unknown."""
    return Problem(
        "",
        "--candidate {name} {why}{hint}; choose from {possible}, all",
        name=name,
        why=Message("needs a GPU") if name in on_gpu else Message(otherwise),
        hint=did_you_mean(name, possible),
        possible=", ".join(possible),
    )


# ---- changes of one training

# The options that compile_autotune varies. A state from elsewhere must not change any other.
TUNED_OPTIONS = (
    "compile",
    "compile_mode",
    "compile_dynamic",
    "attention_kernel",
    "blocks_to_swap",
    "gradient_checkpointing",
    "cpu_offload_checkpointing",
    "checkpoint_keep_attention",
)


def saving_memory(config: RunConfig) -> Iterator[Overrides]:
    """Yield changes that save memory and fit the other options, the cheapest first; last those that round more or
    change the optimizer.
    """
    yield from (changes for changes in _saving_memory(config) if _is_possible(config, changes))


def _is_possible(config: RunConfig, changes: Overrides) -> bool:
    try:
        replace_options(config, **changes)
    except ConfigError:
        return False
    return True


def _saving_memory(config: RunConfig) -> Iterator[Overrides]:
    if config.precision.fp8_transposed_weights:
        yield {"fp8_transposed_weights": False}
    if config.compile.keeps_by_budget and config.compile.compile_activation_budget:
        yield {"compile_activation_budget": 0.0}
    elif not config.memory.checkpointing:
        yield dict(CKPT)
    if config.adapters and not config.precision.fp8_denoiser and config.precision.mixed_precision != "no":
        yield {"fp8_base": True}
    if config.data.train_batch_size > 1:
        yield {"train_batch_size": max(1, config.data.train_batch_size // 2)}
    memory = config.memory
    if isinstance(memory, ModulatedMemory) and not memory.offload_modulation and memory.can_offload_modulation(config):
        yield {"offload_modulation": True}
    max_swapped = families.facts_of(config.family).most_blocks_swapped
    # Offloading to CPU memory excludes keeping a share on the GPU.
    without_share = {"compile_activation_budget": 1.0} if config.compile.keeps_by_budget else {}
    if (config.memory.blocks_to_swap or 0) < max_swapped:
        yield {"blocks_to_swap": min((config.memory.blocks_to_swap or 0) + 8, max_swapped), **without_share}
    if not config.memory.cpu_offload_checkpointing:
        yield {"cpu_offload_checkpointing": True, **without_share}
    if not config.cache.text:
        yield {"cache_text_encoder_outputs": True}
    if not config.adapters:
        lighter = {"optimizer_type": "Adafactor", "fused_backward_pass": True}
        is_in_half = config.precision.full_bf16 or families.facts_of(config.family).trained_in_compute_dtype
        yield lighter if is_in_half else {"full_bf16": True}


def advise_changes(changes: Overrides, config: RunConfig) -> MessageLike:
    """Return changes of a config as advice: "use fp8_base", "lower train_batch_size"."""

    def advise_change(name: str, value: Any) -> Message:
        # A share of 1 is the default, which no advice to save memory sets by itself.
        if value is False or (name == "compile_activation_budget" and value == 1):
            return Message("leave {name} out", name=option_name(name))
        if isinstance(value, bool | str):
            option_text = option_name(name)
            option_text = (
                option_text if isinstance(value, bool) else Message("{option} {value}", option=option_text, value=value)
            )
            return Message("use {name}", name=option_text)
        current = schema.option_values(config).get(name)
        template = "set {name}" if not current else "lower {name}" if value < current else "raise {name}"
        return Message(template, name=option_name(name))

    return together(advise_change(name, value) for name, value in changes.items())


def format_changes(changes: JsonMapping) -> str:
    return ", ".join(f"{name} = {str(value).lower()}" for name, value in changes.items())


def other_modes(tuned: bool, recorded: bool) -> list[Overrides]:
    names = ["max-autotune"] * tuned + ["cuda-graphs"] * recorded
    return [{"compile_mode": NAMED[name].options["compile_mode"]} for name in names]


def swapping_less(config: RunConfig) -> list[Overrides]:
    number = config.memory.blocks_to_swap or 0
    return [{"blocks_to_swap": fewer} for fewer in dict.fromkeys((0, number // 2)) if fewer != number]


def checkpointing_less(config: RunConfig) -> list[Overrides]:
    """Return changes that recompute fewer activations, first none; swapped blocks recompute all."""
    memory = config.memory
    if not memory.recomputes_all(config):
        return []
    keep = {**CKPT, "cpu_offload_checkpointing": False, "checkpoint_keep_attention": True}
    free = {name: False for name in keep}
    return [*([] if memory.blocks_to_swap else [free]), *([] if memory.checkpoint_keep_attention else [keep])]


def keeping_all(config: RunConfig) -> list[Overrides]:
    """Return the change that recomputes nothing where compiled blocks keep a share."""
    every = {"gradient_checkpointing": False, "checkpoint_keep_attention": False, "compile_activation_budget": 1.0}
    return [every] if config.compile.keeps_by_budget else []
