"""Fixes shared by several rules: option values that resolve a problem."""

from collections.abc import Iterable
from typing import Any

from library.config.json_types import JsonObject
from library.config.problems import Problem, option_name, together
from library.config.run_config import RunConfig
from library.config.schema import defaults

COMMON_ARGUMENTS = ("weight_decay", "betas", "eps")  # arguments with the same meaning in most optimizers


def exclusive(config: RunConfig, first: str, *conflicting: str) -> Problem:
    """Return the problem of an option that excludes others; its fix switches those off."""
    return Problem(
        first,
        "and {others} exclude each other: choose one",
        others=together(map(option_name, conflicting)),
        also=conflicting,
        fix=defaults(config, *conflicting),
    )


def compute_in_bf16(run: RunConfig) -> JsonObject:
    full = {"full_fp16": False, "full_bf16": True} if run.precision.full_fp16 else {}
    return {"mixed_precision": "bf16", **full}


def bucket_limits(sizes: Iterable[tuple[int, int]], buckets: Any) -> JsonObject:
    """Return a fix that moves bucket limits around all sizes of a resolution, to multiples of 64."""
    sides = [side for size in sizes for side in size]
    shortest, longest = min(buckets.min_bucket_reso, *sides), max(buckets.max_bucket_reso, *sides)
    limits = {"min_bucket_reso": shortest // 64 * 64 or 64, "max_bucket_reso": -(-longest // 64) * 64}
    return {name: limit for name, limit in limits.items() if limit != getattr(buckets, name)}


def carried_arguments(arguments: Iterable[str]) -> tuple[str, ...]:
    return tuple(pair for pair in arguments if pair.partition("=")[0].strip() in COMMON_ARGUMENTS)


def other_optimizer(run: RunConfig, name: str, rate: float | None = None) -> JsonObject:
    """Return a fix with another optimizer and the arguments that it shares; `rate` applies to everything trained."""
    optim = run.optim
    shared_arguments = carried_arguments(optim.optimizer_args)
    fix: JsonObject = {"optimizer_type": name}
    fix |= {"optimizer_args": shared_arguments} if shared_arguments != optim.optimizer_args else {}
    fix |= {old: False for old in ("use_8bit_adam", "use_lion_optimizer") if getattr(optim, old)}
    if rate:
        part_rates = [name for name in ("unet_lr", "text_encoder_lr") if getattr(optim, name, None)]
        fix |= {"learning_rate": rate, **defaults(run, *part_rates)}
    return fix
