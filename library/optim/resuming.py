"""Continue with a saved optimizer under a changed config: its rates and arguments apply, the moments stay."""

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig
from library.optim import averaging, trial
from library.optim.classes import chosen_optimizer, optimizer_arguments, read_arguments
from library.optim.saved_form import wrong_form

Groups = list[dict[str, Any]]
# These affect how a step is computed, not its result, so this process' own values apply.
KERNEL_SETTINGS = ("fused", "foreach", "capturable", "differentiable")
RATES, WEIGHTS = ("lr", "initial_lr"), ("params", "name")
ESTIMATE = ("d", "d0", "d_prev", "d_max")  # the step size estimated by Prodigy and D-Adaptation, and its start


@dataclass(frozen=True, slots=True)
class Saved:
    """A state's facts about its optimizer."""

    optimizer: JsonObject  # its state_dict
    schedule: JsonObject
    groups: JsonMapping | None  # `describe_groups` of that optimizer; None in states of older versions
    settings: JsonMapping  # the options that it was saved with, as far as they are known
    rescheduled: bool  # whether the config has another schedule or number of steps


def describe_groups(optimizer: Any) -> JsonObject:
    """Return the settings of all groups as JSON values, without duplicates. Call it before the first step, while they
    equal the config's.
    """
    kinds: list[str] = []
    numbers = []
    for group in _all_groups(optimizer):
        text = json.dumps(
            _json_value({name: value for name, value in group.items() if name not in WEIGHTS}), sort_keys=True
        )
        if text not in kinds:
            kinds.append(text)
        numbers.append(kinds.index(text))
    return {"kinds": [json.loads(text) for text in kinds], "groups": numbers}


def take_over(
    optimizer: Any, schedule: LRScheduler, saved: Saved, config: RunConfig, load: Callable[[JsonObject], object]
) -> None:
    """Load a saved optimizer and its schedule into new ones of `config`; `load` loads the optimizer's state.

    Unchanged settings are restored exactly. Changed settings come from the config in every group, and a changed rate or
    schedule applies from the next step; the optimizer's state (moments, step counts, an estimate such as Prodigy's d)
    stays. Raises the errors of `load` for a state that does not fit.
    """
    _use_own_kernels(saved.optimizer, optimizer)
    moved = saved.rescheduled or _has_other_rates(optimizer, saved)
    if moved:  # before loading puts the saved rates into the groups
        _advance(schedule, int(saved.schedule.get("last_epoch", 0)), config)
    configured = [dict(group) for group in _all_groups(optimizer)]
    load(saved.optimizer)
    if not moved:
        schedule.load_state_dict(saved.schedule)
    changed = changed_arguments(saved.settings, config)
    initial_groups = _read_described(saved.groups, len(configured))
    updates = []
    for group, new, initial in zip(_all_groups(optimizer), configured, initial_groups, strict=True):
        names = {*_changed_names(group, new, initial, changed), *(name for name in RATES if moved and name in new)}
        updates.append({name: new[name] for name in names})
    if not any(updates):
        return
    averaging.eval_mode(optimizer)  # a schedule-free optimizer derives the averaged weights from its betas
    for group, update in zip(_all_groups(optimizer), updates, strict=True):
        group.update(update)
    averaging.train_mode(optimizer)


def changed_arguments(settings: JsonMapping, config: RunConfig) -> set[str]:
    """Return the names in optimizer_args whose values differ from a state's."""
    before, now = _saved_arguments(settings, config), optimizer_arguments(config)
    if before is None:
        return set()
    return {name for name in before.keys() | now.keys() if before.get(name, ...) != now.get(name, ...)}


def only_for_starts(settings: JsonMapping, config: RunConfig) -> list[str]:
    return sorted(changed_arguments(settings, config) & {*ESTIMATE})


def needs_other_memory(settings: JsonMapping, config: RunConfig) -> bool:
    """Return whether the optimizer keeps other tensors per weight with the config's arguments than with the state's.
    Steps a small weight with both.
    """
    before = _saved_arguments(settings, config)
    if before is None or not changed_arguments(settings, config):
        return False
    saved_shapes = trial.optimizer_state_shapes(chosen_optimizer(config), before)
    needed_shapes = trial.optimizer_state_shapes(chosen_optimizer(config), optimizer_arguments(config))
    return not needed_shapes.items() <= saved_shapes.items() if saved_shapes and needed_shapes else False


def _saved_arguments(settings: JsonMapping, config: RunConfig) -> JsonObject | None:
    """Return the arguments of a state, None if it lacks them."""
    try:
        arguments = read_arguments(settings["optimizer_args"] or (), "optimizer_args")
    except (KeyError, ConfigError):
        return None
    return optimizer_arguments(config, arguments)


def wrong_group(optimizer: Any, state: JsonMapping) -> str:
    """Return a setting of a group of a saved optimizer that is of another form than this one's, "" if there is none."""
    if wrong := wrong_form({"steps": 0}, state):  # counted by an optimizer of several parts
        return wrong
    for current, stored in zip(_all_groups(optimizer), _stored_groups(state), strict=False):
        if "lr" not in stored:
            return "lr"
        now = {name: value for name, value in current.items() if name not in WEIGHTS}
        if wrong := wrong_form(now, stored):
            return wrong
    return ""


def _all_groups(optimizer: Any) -> Groups:
    bundles = getattr(optimizer, "bundles", ())
    return [*optimizer.param_groups, *(group for bundle in bundles for group in bundle.optimizer.param_groups)]


def _stored_groups(state: JsonMapping) -> Groups:
    first, bundles = state.get("groups", state.get("param_groups", ())), state.get("bundles", ())
    return [*first, *(group for bundle in bundles for group in bundle["param_groups"])]


def _read_described(described: JsonMapping | None, count: int) -> list[JsonObject | None]:
    """Return the settings by group from the result of `describe_groups`; None for each group if it is missing or has
    other groups.
    """
    if not described or len(described["groups"]) != count:
        return [None] * count
    return [described["kinds"][number] for number in described["groups"]]


def _use_own_kernels(state: JsonMapping, optimizer: Any) -> None:
    # The placement of the state's tensors depends on these settings.
    for stored, current in zip(_stored_groups(state), _all_groups(optimizer), strict=False):
        stored.update({name: current[name] for name in KERNEL_SETTINGS if name in stored and name in current})


def _has_other_rates(optimizer: Any, saved: Saved) -> bool:
    pairs = zip(optimizer.param_groups, _stored_groups(saved.optimizer), strict=False)
    return any(current.get("initial_lr") != stored.get("initial_lr") for current, stored in pairs)


def _advance(schedule: LRScheduler, steps: int, config: RunConfig) -> None:
    """Move a new schedule to where it would be after `steps` steps, and the groups' rates with it."""
    if steps < 1:
        return
    with warnings.catch_warnings():  # the optimizer has not stepped yet
        warnings.simplefilter("ignore")
        if isinstance(schedule, LambdaLR):  # computes the rate of any step directly
            schedule.last_epoch = steps - 1
            schedule.step()  # increments last_epoch, and sets the groups' rates
            return
        try:
            for _ in range(steps):
                schedule.step()
        except ValueError as error:  # such as OneCycleLR after its end
            raise ConfigError(
                Problem(
                    "lr_scheduler_type",
                    ": {name} cannot continue after step {step} ({why}); choose another schedule, or raise its "
                    "number of steps",
                    name=config.optim.lr_scheduler_type,
                    step=steps,
                    why=error,
                )
            ) from error


def _changed_names(
    group: JsonMapping, new: JsonMapping, initial: JsonMapping | None, changed: set[str]
) -> Iterator[str]:
    """Yield the names of settings of a loaded group that the config has changed, but not of those that training itself
    has changed since `initial`, the group's settings before its first step.
    """
    for name, value in new.items():
        if name in (*RATES, *WEIGHTS, *KERNEL_SETTINGS, *ESTIMATE) or isinstance(value, Tensor):
            continue
        if name not in group:  # a setting of another schedule or a newer package
            yield name
        elif initial is None:
            if name in changed:
                yield name
        elif name in initial and _json_value(value) != initial[name] and _json_value(group[name]) == initial[name]:
            yield name


def _json_value(value: Any) -> Any:
    return json.loads(json.dumps(value, default=lambda leaf: None if isinstance(leaf, Tensor) else str(leaf)))
