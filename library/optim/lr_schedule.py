"""Learning rate schedules of transformers and diffusers, with the names and numbers of sd-scripts."""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from library.config import code_names
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Problem, counted, raise_if_any, together
from library.config.run_config import RunConfig
from library.config.sections import Optim
from library.config.sections.learning import own_warmup
from library.config.values import did_you_mean
from library.optim import trial
from library.optim.classes import (
    OptimizerSpec,
    chosen_optimizer,
    import_class,
    is_schedule_free,
    load_subclass,
    missing_package,
    optimizer_arguments,
    read_arguments,
    relative_step,
    unknown_arguments,
)

TRANSFORMERS, DIFFUSERS = "transformers.optimization", "diffusers.optimization"
PLAIN = "library.optim.plain_schedules"
PLAIN_SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts")
NO_SCHEDULER = "{chosen}: {why}; write module.Class, such as torch.optim.lr_scheduler.LinearLR, or leave it empty"
NOT_TAKEN = ": {title} does not take these values ({why})"
MAX_GROUPS = 64  # largest number of groups tried for a schedule with lists before the model is known
FUNCTIONS = {
    **{name: OptimizerSpec(PLAIN, name) for name in PLAIN_SCHEDULES},
    "polynomial": OptimizerSpec(TRANSFORMERS, "get_polynomial_decay_schedule_with_warmup"),
    "inverse_sqrt": OptimizerSpec(TRANSFORMERS, "get_inverse_sqrt_schedule"),
    "cosine_with_min_lr": OptimizerSpec(TRANSFORMERS, "get_cosine_with_min_lr_schedule_with_warmup"),
    "warmup_stable_decay": OptimizerSpec(TRANSFORMERS, "get_wsd_schedule"),
    "piecewise_constant": OptimizerSpec(DIFFUSERS, "get_piecewise_constant_schedule"),
    "adafactor": OptimizerSpec(TRANSFORMERS, "AdafactorSchedule"),
}


def make_schedule(optimizer: Optimizer, config: RunConfig, total_steps: int) -> LRScheduler:
    """Return the learning rate schedule over `total_steps` scheduler steps (optimizer steps times processes).

    Warm-up and decay given as shares refer to that total. Raises ConfigError with the problems of
    `find_schedule_problems` and `too_long`.
    """
    raise_if_any(find_schedule_problems(config))
    arguments = _written_arguments(config)
    raise_if_any(too_long(config, total_steps))
    if is_schedule_free(config):
        return LambdaLR(optimizer, lambda _: 1.0)
    try:
        return _build(optimizer, config, arguments, total_steps)
    except ConfigError:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        why = trial.short_reason(error)
        raise ConfigError(Problem("lr_scheduler_args", NOT_TAKEN, title=_title(config), why=why)) from error


def _build(optimizer: Optimizer, config: RunConfig, arguments: JsonObject, total_steps: int) -> LRScheduler:
    """Return a config's schedule for an optimizer. Raises its class' errors for impossible arguments."""
    if config.optim.lr_scheduler_type:
        return load_subclass(_custom(config), LRScheduler)(optimizer, **arguments)
    name, rate_text = _chosen_schedule(config)
    schedule = import_class(FUNCTIONS[name])
    if name == "adafactor":
        return schedule(optimizer, initial_lr=float(rate_text) if rate_text else config.optim.learning_rate)
    return schedule(optimizer, **{**_schedule_settings(name, config.optim, total_steps), **arguments})


def _written_arguments(config: RunConfig) -> JsonObject:
    return read_arguments(config.optim.lr_scheduler_args, "lr_scheduler_args")


def _title(config: RunConfig) -> str:
    return config.optim.lr_scheduler_type or config.optim.lr_scheduler


def find_schedule_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of the chosen schedule and its arguments."""
    try:
        arguments, is_read = _written_arguments(config), True
    except ConfigError as e:
        yield from e.problems
        pairs = (pair.split("=", 1) for pair in config.optim.lr_scheduler_args if "=" in pair)
        arguments, is_read = dict.fromkeys(name.strip() for name, _ in pairs), False  # names can still be checked
    if config.optim.lr_scheduler_type:
        yield from _custom_problems(config, arguments, is_read)
        return
    # sd-scripts writes Adafactor's initial rate behind a colon: adafactor:1e-4.
    name = config.optim.lr_scheduler.split(":")[0]
    if name not in FUNCTIONS:
        yield Problem(
            "lr_scheduler",
            "{name} is not known{hint}; known are {functions}",
            name=name,
            hint=did_you_mean(name, FUNCTIONS),
            functions=", ".join(FUNCTIONS),
        )
        return
    yield from _needs(name, config, arguments)
    if (arguments and name != "adafactor") or name == "polynomial":  # importing it takes long
        unknown = [*unknown_arguments(import_class(FUNCTIONS[name]), arguments, "lr_scheduler_args", name)]
        yield from unknown
        if is_read and not unknown and (why := _why_schedule_fails(config, arguments)):
            yield Problem("lr_scheduler_args" if arguments else "lr_scheduler", NOT_TAKEN, title=name, why=why)


def too_long(config: RunConfig, total: int) -> Iterator[Problem]:
    """Yield problems of schedules that do not fit `total` steps: phases of warmup_stable_decay that are longer, or a
    schedule that ends earlier, such as OneCycleLR with fewer steps.
    """
    optim = config.optim
    yield from _ends_early(config, total)
    if not _falls_at_the_end(config):
        return
    warm, decay = steps_of_share(optim.lr_warmup_steps, total), steps_of_share(optim.lr_decay_steps, total)
    if warm < total < warm + decay:  # a longer warm-up alone just ends early, which is only a remark
        yield Problem(
            "lr_decay_steps",
            "come to {decay}, and lr_warmup_steps to {warm}: more than all {total}, so that the learning rate would "
            "jump; lower one of them",
            also="lr_warmup_steps",
            decay=counted(decay, "step"),
            warm=warm,
            total=total,
        )


def _ends_early(config: RunConfig, total: int) -> Iterator[Problem]:
    chosen = _title(config)
    is_plain = not (config.optim.lr_scheduler_args or config.optim.lr_scheduler_type or chosen == "polynomial")
    if is_plain or [*find_schedule_problems(config)]:
        return
    if config.optim.lr_scheduler_type and not code_names.may_look(_custom(config).module):
        return
    arguments = _written_arguments(config)
    if why := _why_schedule_fails(config, arguments, total):
        blamed = "lr_scheduler_type" if config.optim.lr_scheduler_type else "lr_scheduler"
        yield Problem(
            "lr_scheduler_args" if arguments else blamed,
            ": {title} cannot be followed for the {steps} of this training ({why})",
            title=chosen,
            steps=counted(total, "step"),
            why=why,
        )


def for_groups(config: RunConfig, rates: Sequence[float]) -> Iterator[Problem]:
    """Yield problems of lists among lr_scheduler_args that do not have one value per parameter group."""
    if rates and has_lists(config) and (why := _why_schedule_fails(config, _written_arguments(config), rates=rates)):
        yield Problem("lr_scheduler_args", NOT_TAKEN, title=_title(config), why=why)


def has_lists(config: RunConfig) -> bool:
    """Return whether an argument of the schedule is a list, which may need one value per group."""
    try:
        arguments = _written_arguments(config)
    except ConfigError:
        return False
    return any(isinstance(argument, list | tuple) for argument in arguments.values())


def schedule_notes(config: RunConfig) -> Iterator[Problem]:
    """Yield what is allowed but rarely intended: a warm-up that an optimizer ignores, a decay that never begins."""
    if problem := own_warmup(config):
        yield problem
    if _falls_at_the_end(config) and not config.optim.lr_decay_steps:
        yield Problem(
            "lr_decay_steps",
            "is 0, so the learning rate of warmup_stable_decay never falls: set it to 10%, for example",
            also="lr_scheduler",
            fix={"lr_decay_steps": 0.1},
        )


def _falls_at_the_end(config: RunConfig) -> bool:
    """Return whether lr_decay_steps decides when the rate falls."""
    optim = config.optim
    argument_names = {pair.partition("=")[0].strip() for pair in optim.lr_scheduler_args}
    named = optim.lr_scheduler == "warmup_stable_decay" and not optim.lr_scheduler_type
    return named and not optim.without_schedule and not argument_names & {"num_decay_steps", "num_stable_steps"}


def _needs(name: str, config: RunConfig, arguments: JsonObject) -> Iterator[Problem]:
    optim = config.optim
    if name == "adafactor" and chosen_optimizer(config).name != "Adafactor":
        yield Problem(
            "lr_scheduler",
            "adafactor goes with optimizer_type Adafactor only, not {optimizer}",
            optimizer=optim.optimizer,
        )
    if name == "adafactor" and ":" in optim.lr_scheduler:
        try:
            float(optim.lr_scheduler.split(":")[1])
        except ValueError:
            yield Problem("lr_scheduler", "must be written adafactor:<rate>, got {given}", given=optim.lr_scheduler)
    has_minimum = optim.lr_scheduler_min_lr_ratio is not None or {"min_lr", "min_lr_rate"} & arguments.keys()
    if name == "cosine_with_min_lr" and not has_minimum:
        yield Problem(
            "lr_scheduler",
            "cosine_with_min_lr needs lr_scheduler_min_lr_ratio: 0.1 ends at a tenth of the rate",
            fix={"lr_scheduler_min_lr_ratio": 0.1},
        )
    if name == "piecewise_constant" and not _are_rules(arguments.get("step_rules")):
        yield Problem(
            "lr_scheduler",
            "piecewise_constant needs lr_scheduler_args, like step_rules='1:100,0.1' (0.1 from step 100)",
        )


def _are_rules(text: Any) -> bool:
    """Return whether text is a valid step_rules: factor:step pairs, then the factor after the last step."""
    *pairs, last = (part.split(":") for part in str(text).split(","))
    try:
        numbers = [(float(factor), int(step)) for factor, step in pairs]
        return bool(numbers) and len(last) == 1 and float(last[0]) >= 0
    except ValueError:
        return False


def _custom_problems(config: RunConfig, arguments: JsonObject, is_read: bool) -> Iterator[Problem]:
    spec = _custom(config)
    if missing := missing_package(spec.module):
        yield Problem("lr_scheduler_type", "{chosen} {absent}", chosen=config.optim.lr_scheduler_type, absent=missing)
        return
    if why := code_names.why_not_class(spec.module, spec.name, "lr_scheduler_type"):
        yield Problem("lr_scheduler_type", NO_SCHEDULER, chosen=config.optim.lr_scheduler_type, why=why)
    elif code_names.may_look(spec.module):  # importing any other one runs it, which a check must not
        yield from load_problems(config, arguments, is_read)


def load_problems(config: RunConfig, arguments: JsonObject | None = None, is_read: bool = True) -> Iterator[Problem]:
    """Yield problems of the class of lr_scheduler_type, which this imports. Unless `is_read`, only the arguments' names
    are checked, as their values are unreadable.
    """
    chosen, spec = config.optim.lr_scheduler_type, _custom(config)
    arguments = _written_arguments(config) if arguments is None else arguments
    try:
        subclass = load_subclass(spec, LRScheduler)
    except ConfigError as e:
        yield Problem("lr_scheduler_type", NO_SCHEDULER, chosen=chosen, why=e.said)
        return
    if problems := [
        *_unusable_schedule(subclass, arguments, spec.name),
        *unknown_arguments(subclass, arguments, "lr_scheduler_args", spec.name),
    ]:
        yield from problems
    elif is_read and (why := _why_schedule_fails(config, arguments)):
        yield Problem("lr_scheduler_args", NOT_TAKEN, title=spec.name, why=why)


def _unusable_schedule(schedule_class: type, arguments: JsonObject, title: str) -> Iterator[Problem]:
    """Yield problems of required arguments: those that text cannot express, or that are missing."""
    required = [*_required_arguments(schedule_class.__init__)]
    not_expressible = [
        parameter.name for parameter in required if re.search("Callable|LRScheduler", str(parameter.annotation))
    ]
    not_expressible += [parameter.name for parameter in _required_arguments(schedule_class.step)]
    if not_expressible:
        yield Problem(
            "lr_scheduler_type",
            ": {title} needs {names}, which cannot be written as a value; choose another schedule, such as "
            "torch.optim.lr_scheduler.LinearLR",
            title=title,
            names=together(not_expressible),
        )
    elif missing := [parameter.name for parameter in required if parameter.name not in arguments]:
        yield Problem(
            "lr_scheduler_args",
            ": {title} needs {names}; add {first}=VALUE",
            title=title,
            names=together(missing),
            first=missing[0],
        )


def _required_arguments(function: Callable[..., object]) -> Iterator[inspect.Parameter]:
    """Yield the arguments without defaults of a method, besides the optimizer."""
    try:
        parameters = [*inspect.signature(function).parameters.values()][1:]
    except (TypeError, ValueError):  # classes in C have no signature
        return
    for parameter in parameters:
        is_plain = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if parameter.default is parameter.empty and is_plain and parameter.name != "optimizer":
            yield parameter


def _why_schedule_fails(
    config: RunConfig, arguments: JsonObject, total: int | None = None, rates: Sequence[float] = ()
) -> str:
    """Return why a schedule fails within `total` steps of groups with these rates, "" if it works or is unused. Without
    a total, only its first step is tried.
    """
    if is_schedule_free(config) or (relative_step(config) and not config.optim.lr_scheduler_type):
        return ""
    rate = config.optim.learning_rate
    # The number of groups is unknown before the model is, so take the one that the longest list was written for.
    longest_list = max(
        (len(argument) for argument in arguments.values() if isinstance(argument, list | tuple)), default=1
    )
    groups = rates or [rate] * (longest_list if 0 < longest_list <= MAX_GROUPS else 1)
    chosen = chosen_optimizer(config)
    is_known = not missing_package(chosen.module) and code_names.may_look(chosen.module)
    try:
        optimizer_args = optimizer_arguments(config)
    except ConfigError:  # reported for optimizer_args
        optimizer_args = {}
    spec = chosen if is_known else OptimizerSpec("torch.optim", "AdamW")
    length = total or int(config.steps.max_train_steps)
    return trial.try_schedule(
        spec,
        optimizer_args if is_known else {},
        groups,
        lambda optimizer: _build(optimizer, config, arguments, length),
        total or 1,
    )


def _custom(config: RunConfig) -> OptimizerSpec:
    module, _, name = config.optim.lr_scheduler_type.rpartition(".")
    return OptimizerSpec(module or "torch.optim.lr_scheduler", name)


def _chosen_schedule(config: RunConfig) -> tuple[str, str]:
    """Return the schedule's name and the text after its colon. Adafactor with relative_step has its own."""
    name, _, rate_text = config.optim.lr_scheduler.partition(":")
    if relative_step(config):
        return "adafactor", rate_text if name == "adafactor" else ""
    return name, rate_text


def steps_of_share(value: int | float, total: int) -> int:
    return int(value * total) if isinstance(value, float) else value


def _schedule_settings(name: str, optim: Optim, total: int) -> JsonObject:
    warmup, decay = steps_of_share(optim.lr_warmup_steps, total), steps_of_share(optim.lr_decay_steps, total)
    # More warm-up steps than steps are allowed, as in sd-scripts and all schedules: the rate just stops on its way up.
    plain: JsonObject = {"num_warmup_steps": warmup}
    whole = {**plain, "num_training_steps": total}
    least = optim.lr_scheduler_min_lr_ratio
    settings: dict[str, Callable[[], JsonObject]] = {
        "constant": dict,
        "piecewise_constant": dict,
        "constant_with_warmup": lambda: plain,
        "inverse_sqrt": lambda: {**plain, "timescale": optim.lr_scheduler_timescale},
        "linear": lambda: whole,
        "cosine": lambda: whole,
        "cosine_with_restarts": lambda: {**whole, "num_cycles": optim.lr_scheduler_num_cycles},
        "polynomial": lambda: {**whole, "power": optim.lr_scheduler_power},
        # Half the cycles, as in sd-scripts: transformers counts the default, half a wave, as 0.5 here.
        "cosine_with_min_lr": lambda: {
            **whole,
            "num_cycles": optim.lr_scheduler_num_cycles / 2,
            **({} if least is None else {"min_lr_rate": least}),
        },
        "warmup_stable_decay": lambda: {
            **plain,
            "num_stable_steps": total - warmup - decay,
            "num_decay_steps": decay,
            "num_cycles": optim.lr_scheduler_num_cycles / 2,
            "min_lr_ratio": least or 0.0,
        },
    }
    return settings[name]()
