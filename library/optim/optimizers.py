"""The optimizer, by the package that owns it, and its schedule."""

import functools
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from library import packages
from library.config import code_names
from library.config.fixes import other_optimizer
from library.config.problems import ConfigError, MessageLike, Problem, option_name, raise_if_any, together
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.methods import TrainingMethod
from library.optim import fused_step, names, trial
from library.optim.classes import (
    OptimizerSpec,
    chosen_optimizer,
    import_class,
    is_schedule_free,
    load_subclass,
    missing_package,
    optimizer_arguments,
    package_class,
    relative_step,
    steps_alone,
    steps_rows,
    unknown_arguments,
)
from library.optim.flat_adamw import FlatAdamW
from library.optim.lr_schedule import find_schedule_problems, load_problems, schedule_notes, steps_of_share
from library.optim.streams import step_on_default_stream

log = logging.getLogger(__name__)

HIGH_FOR_ADAPTERS, HIGH_FOR_MODELS, HIGH_FOR_ANY = 2e-2, 2e-3, 100.0  # higher learning rates can only be mistakes
USUAL_RATES = (
    "AdamW",
    "AdamW8bit",
    "PagedAdamW",
    "PagedAdamW8bit",
    "PagedAdamW32bit",
    "Lion",
    "Lion8bit",
    "PagedLion8bit",
    "CAME",
    "AdamMini",
    "Muon",
)


def make_optimizer(method: TrainingMethod, config: RunConfig, seed: int = 0) -> Any:
    """Return the optimizer of all trained parameters, one group per learning rate. Call it after they are placed.

    AdamW is fused on CUDA, unless optimizer_args disable that. Weights in half precision, and those stepped within the
    backward pass, are stepped in bundles, with rounding seeded by `seed`. Raises ConfigError with the problems of
    `find_optimizer_problems`.
    """
    raise_if_any(find_optimizer_problems(config))
    groups = method.groups()
    if problems := _find_rates_problem(config, {group["name"]: group["lr"] for group in groups}):
        raise ConfigError(problems)
    if relative_step(config):  # Adafactor sets its own rate and rejects another
        groups = [{key: value for key, value in group.items() if key != "lr"} for group in groups]
    rates = ", ".join(f"{group['name']} {group.get('lr', 'by the optimizer')}" for group in groups)
    log.info("Optimizer %s, learning rates: %s", describe_optimizer(config), rates)
    if split_into_bundles := choose_bundling(method, groups, config):
        construct = functools.partial(_construct_optimizer, config)
        return fused_step.PartitionedOptimizer(groups, split_into_bundles, construct, seed)
    return _construct_optimizer(config, groups, gathered=bool(method.factor_caches))


def choose_bundling(method: TrainingMethod, groups: list[dict[str, Any]], config: RunConfig) -> Any:
    """Return how weights are split into bundles that are stepped in turn; None: all at once."""
    early = config.optim.stepped_early
    if early == "fused_backward_pass":
        return fused_step.one_by_one
    if early == "fused_optimizer_groups":
        total = sum(len(group["params"]) for group in groups)
        return fused_step.bundles_by_count(getattr(config.optim, early), total)
    if early == "blockwise_fused_optimizers":
        modules = method.denoiser.modules() if method.denoiser else ()
        return fused_step.bundles_by_block(m for m in modules if type(m).__name__ in method.block_classes)
    # Some families load trained weights in half precision without full_bf16, as sd-scripts does.
    half = any(p.dtype in fused_step.HALF for group in groups for p in group["params"])
    return fused_step.bundles_by_size if half and steps_alone(config) else None


def _construct_optimizer(config: RunConfig, groups: list[dict[str, Any]], gathered: bool = False) -> Any:
    """Construct the optimizer. `gathered`: many of its weights share one buffer."""
    spec, arguments = chosen_optimizer(config), optimizer_arguments(config)
    always = dict(spec.always)
    # Swapped weights are on the host now and may be stepped there; fused kernels support both.
    with_cuda = any(p.is_cuda for group in groups for p in group["params"])
    is_torch_adamw = (spec.module, spec.name) == ("torch.optim", "AdamW")
    if is_torch_adamw and with_cuda and not {"fused", "foreach"} & arguments.keys():
        always["fused"] = True
    rate = None if relative_step(config) else config.optim.learning_rate
    try:
        loaded_class: Any = FlatAdamW if gathered and "fused" in always else load_subclass(spec, Optimizer)
        optimizer = loaded_class(groups, lr=rate, **always, **arguments)
    except (ValueError, TypeError) as error:  # such as torch.optim.Muon, which accepts only matrices
        raise ConfigError(
            Problem(
                "optimizer_type",
                "{optimizer} does not take these weights or arguments: {why}",
                optimizer=config.optim.optimizer,
                why=error,
            )
        ) from error
    if with_cuda and spec.module.startswith("bitsandbytes"):
        step_on_default_stream(optimizer)
    return optimizer


def find_optimizer_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of the choice of optimizer and its arguments."""
    spec, arguments = chosen_optimizer(config), {}
    try:
        arguments = optimizer_arguments(config)
    except ConfigError as e:
        yield from e.problems
    is_refused = spec.name.lower() == "automagic"  # the option's own rules reject it
    if not is_refused and (unusable := _unusable_package(spec)):
        advice, fix = names.advice(config)
        yield Problem(
            "optimizer_type",
            "{optimizer} {unusable}; or {advice}",
            optimizer=config.optim.optimizer,
            unusable=unusable,
            advice=advice,
            fix=fix,
        )
    elif not is_refused:
        yield from _signature_problems(spec, arguments, config.optim.optimizer)
    if config.optim.ema_decay and is_schedule_free(config):
        yield Problem(
            "ema_decay",
            "cannot be used with {name}, which averages by itself: set ema_decay = 0",
            name=spec.name,
            fix={"ema_decay": 0},
        )
    if (early := config.optim.stepped_early) and is_schedule_free(config):
        yield Problem(
            early,
            "cannot be used with {name}: use AdamW or Adafactor, or leave {early} out",
            name=spec.name,
            early=option_name(early),
        )
    if config.distributed.fsdp and not config.adapters and not steps_rows(config):
        yield Problem(
            "optimizer_type",
            ": {name} needs whole weights, and with fsdp each GPU has only rows of them: use AdamW, or leave fsdp out",
            name=spec.name,
            also="fsdp",
            fix=other_optimizer(config, "AdamW"),
        )
    if isinstance(config, AdapterRun):
        rates = {"unet_lr": config.optim.unet_lr, "text_encoder_lr": next(iter(config.optim.text_encoder_lr), None)}
        if problem := _find_rates_problem(config, rates):
            yield problem
    yield from find_schedule_problems(config)


def _find_rates_problem(config: RunConfig, rates: Mapping[str, float | None]) -> Problem | None:
    """Return the problem if rates differ, but the optimizer supports only one and would raise at its first step."""
    if not chosen_optimizer(config).one_rate or len({rate for rate in rates.values() if rate}) < 2:
        return None
    message = together([f"{name} {rate}" for name, rate in rates.items()])
    fix = {
        "unet_lr": None,
        "text_encoder_lr": (),
        "learning_rate": getattr(config.optim, "unet_lr", None) or config.optim.learning_rate,
    }
    return Problem(
        "optimizer_type",
        "{optimizer} has one learning rate for all that learns, not {given}: "
        "set learning_rate alone, or set optimizer_type = ProdigyPlusScheduleFree",
        optimizer=config.optim.optimizer,
        given=message,
        fix=fix,
    )


def zero_rate_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem if every learning rate is 0."""
    if chosen_optimizer(config) is names.SPECS["adafactor"]:  # may set its own rate
        return
    rates = _rates_of_adapters(config) if isinstance(config, AdapterRun) else _rates_of_models(config)
    if rates and not any(rates.values()):
        usual = config.usual_rate
        template, fix = "is 0, so nothing would be trained: {usual} is usual", {"learning_rate": float(usual)}
        option = next(iter(rates))
        yield Problem(option, template, usual=usual, fix=fix if option == "learning_rate" else {})


def _rates_of_adapters(config: AdapterRun) -> dict[str, float]:
    """Return options and values of the learning rates of all parts with adapters; {} if patterns set them."""
    optim, network, encoder_rates = config.optim, config.network, tuple(config.optim.text_encoder_lr)
    if any("_reg_lrs" in pair for pair in network.network_args):
        return {}
    option_rates = [] if network.network_train_text_encoder_only else [("unet_lr", optim.unet_lr)]
    if not network.network_train_unet_only:
        t5 = any(re.fullmatch(r"\s*train_t5xxl\s*=\s*(true|1|yes|on)\s*", a, re.I) for a in network.network_args)
        option_rates += [("text_encoder_lr", rate) for rate in (encoder_rates[: 2 if t5 else 1] or (None,))]
    rates: dict[str, float] = {}
    for name, rate in option_rates:
        name, rate = ("learning_rate", optim.learning_rate) if rate is None else (name, rate)
        rates[name] = max(rate, rates.get(name, 0.0))
    return rates


def _rates_of_models(config: RunConfig) -> dict[str, float]:
    optim = config.optim
    rates = {"learning_rate": optim.learning_rate}
    if optim.learning_rate and optim.block_lrs:
        rates = {"block_lr": max(optim.block_lrs)}
    if config.trains_whole_encoders:
        encoder_rates = {name: getattr(optim, name) for name in config.encoder_rates.values()}
        rates |= {name: rate for name, rate in encoder_rates.items() if rate is not None}
        if None in encoder_rates.values():
            rates["learning_rate"] = optim.learning_rate
    return rates


def optimizer_notes(config: RunConfig, trained_in_compute_dtype: bool = False) -> Iterator[Problem]:
    """Yield options that are probably unintended, or have no effect. `trained_in_compute_dtype`: a fine-tune loads the
    weights in the dtype of mixed_precision.
    """
    name = chosen_optimizer(config).name
    if chosen_optimizer(config).finds_rate and config.optim.learning_rate <= 0.1:
        yield Problem(
            "learning_rate",
            "{rate} is small for {name}, which adapts its own: use about 1.0",
            rate=config.optim.learning_rate,
            name=name,
            fix={"learning_rate": 1.0},
        )
    if name == "ProdigyPlusScheduleFree" and config.optim.max_grad_norm:
        yield Problem(
            "max_grad_norm",
            "hinders {name}, which limits its steps by itself: set max_grad_norm = 0",
            name=name,
            fix={"max_grad_norm": 0.0},
        )
    highest_usual = HIGH_FOR_ADAPTERS if config.adapters else HIGH_FOR_MODELS
    rates = _rates_of_adapters(config) if isinstance(config, AdapterRun) else _rates_of_models(config)
    for option, rate in (rates or {"learning_rate": config.optim.learning_rate}).items():
        if rate > (highest_usual if name in USUAL_RATES else HIGH_FOR_ANY):
            yield Problem(
                option,
                "{rate} is very high for {name} and may end in NaN; {usual} is usual",
                rate=rate,
                name=name,
                usual=config.usual_rate,
            )
    if is_schedule_free(config) and config.optim.lr_scheduler != "constant":
        yield Problem("lr_scheduler", "has no effect: {name} needs no schedule", name=name)
    yield from schedule_notes(config)
    steps = config.steps
    warm = steps_of_share(config.optim.lr_warmup_steps, steps.max_train_steps)
    if not steps.max_train_epochs and warm >= steps.max_train_steps and not config.optim.without_schedule:
        yield Problem(
            "lr_warmup_steps",
            "{warm} is not below max_train_steps: the learning rate never reaches its value",
            warm=warm,
        )
    yield from _find_lost_updates(config, trained_in_compute_dtype)
    if not config.optim.ema_decay:
        for option in ("ema_every_n_steps", "ema_device"):
            if getattr(config.optim, option) not in (1, "gpu"):
                yield Problem(option, "has no effect: ema_decay is 0, so no average is kept")
    if relative_step(config):
        yield Problem(
            "",
            topic="training",
            template="learning rates and lr_scheduler have no effect: Adafactor sets its own (relative_step=True)",
        )


def _find_lost_updates(config: RunConfig, trained_in_compute_dtype: bool) -> Iterator[Problem]:
    """Report weights in half precision of an optimizer that cannot step them in bundles."""
    name, precision = chosen_optimizer(config).name, config.precision
    half = "full_bf16" if precision.full_bf16 else "full_fp16" if precision.full_fp16 else ""
    if not (half or config.adapters or precision.mixed_precision == "no") and trained_in_compute_dtype:
        half = "mixed_precision"
    by_chance = name == "ProdigyPlusScheduleFree" and precision.full_bf16  # it has its own stochastic rounding
    if half and not steps_alone(config) and not by_chance:
        yield Problem(
            half,
            ": {name} rounds to the nearest number, which loses small updates; AdamW and Adafactor do not",
            name=name,
        )


def named_code_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of classes of unlisted packages, which are imported before anything else."""
    unlisted = code_names.unlisted(config)
    if "optimizer_type" in unlisted:
        yield from _load_problems(chosen_optimizer(config), optimizer_arguments(config), config.optim.optimizer)
    if "lr_scheduler_type" in unlisted:
        yield from load_problems(config)


def describe_optimizer(config: RunConfig) -> str:
    """The optimizer as metadata names it: module.Class(k=v,...)."""
    spec, arguments = chosen_optimizer(config), optimizer_arguments(config)
    optimizer_class = package_class(import_class(spec))
    text = ",".join(f"{key}={value}" for key, value in arguments.items())
    return f"{optimizer_class.__module__}.{optimizer_class.__name__}" + (f"({text})" if text else "")


def _unusable_package(spec: OptimizerSpec) -> MessageLike:
    """Return why an optimizer's package cannot be used, and how to install it; "" if a trial step works."""
    if missing := missing_package(spec.package):
        return missing
    if spec not in names.SPECS.values() or spec.package not in packages.PACKAGE_NAMES:
        return ""
    packages.remember(spec.package, error := trial.try_optimizer(spec))
    return packages.package_error(spec.package, error) if error else ""


def _signature_problems(spec: OptimizerSpec, arguments: dict[str, Any], title: str) -> Iterator[Problem]:
    if why := code_names.why_not_class(spec.module, spec.name, "optimizer_type"):
        yield Problem("optimizer_type", "{title}: {why}; AdamW is an optimizer", title=title, why=why)
    elif code_names.may_look(spec.module):  # importing any other one runs it, which a check must not
        yield from _load_problems(spec, arguments, title)


def _load_problems(spec: OptimizerSpec, arguments: dict[str, Any], title: str) -> Iterator[Problem]:
    try:
        unknown = list(unknown_arguments(load_subclass(spec, Optimizer), arguments, "optimizer_args", title))
    except ConfigError as e:
        template = "{title}: {why}; AdamW is an optimizer"
        yield Problem("optimizer_type", template, title=title, why=e.said)
        return
    unknown += [
        Problem("optimizer_args", ": {title} sets {name} itself; leave it out", title=title, name=name)
        for name in sorted(spec.always.keys() & arguments.keys())
    ]
    yield from unknown
    # Optimizers of the table without changed arguments were already tried with their package.
    if (
        not unknown
        and (arguments or spec not in names.SPECS.values())
        and (error := trial.try_arguments(spec, arguments))
    ):
        template = ": {title} does not take these values ({why})" if arguments else ": {title} cannot be used ({why})"
        yield Problem("optimizer_args" if arguments else "optimizer_type", template, title=title, why=error)
