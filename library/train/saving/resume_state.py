"""The state folder of a training: everything that resuming needs to continue bit for bit."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from library.config.json_types import JsonMapping
from library.config.problems import ConfigError, Message, MessageLike, Problem, counted, join_messages, raise_if_any
from library.config.run_config import RunConfig
from library.data.held_out import IN_STATE
from library.optim import resuming, trial
from library.optim.classes import chosen_optimizer, optimizer_arguments
from library.optim.saved_form import stepped_weights, wrong_form, wrong_moment
from library.train.choices import Choices
from library.train.saving.deciding_options import (
    ARITHMETIC,
    compare_settings,
    computed_by,
    deciding_options,
    inexact_differences,
    is_rescheduled,
)
from library.train.saving.resume_check import find_nothing_left
from library.train.saving.state_contents import fitting, state_refusal
from library.train.saving.state_files import (
    AVERAGE,
    CHECKED,
    OPTIMIZER,
    SCALER,
    SCHEDULER,
    VERSION,
    WEIGHTS,
    State,
    damage,
    randomness,
    read_progress,
    read_tensors,
    read_values,
)
from library.train.step import rng

if TYPE_CHECKING:
    from library.train.training import Training

NOT_EXACTLY = "resume: the training continues, but not bit-exactly: {differences}"
ALPHAS = "alphas"  # of adapters, where network_weights has set them: a resume does not need that file again
OTHER_OPTIMIZER = Problem(
    "resume",
    ": the state is of a run with another optimizer, or with other learning rates for other parts; "
    "resume with its own config",
)


def collect_state(training: "Training") -> State | None:
    """Return the current state in the main process, None in the others. Collective: every process must call it."""
    world, updates, clock = training.world, training.updates, training.clock
    sources = world.gather(rng.get_rng_state(world.device))
    optimizer, average = updates.state_dict(), updates.average.state_dict() if updates.average else {}
    if not world.main:
        return None
    tensors = {WEIGHTS: training.method.snapshot()}
    values = {OPTIMIZER: optimizer, SCHEDULER: updates.schedule.state_dict()}
    values |= {randomness(rank): source for rank, source in enumerate(sources)}
    if updates.average:
        tensors[AVERAGE] = average
    if world.scaler:
        values[SCALER] = world.scaler.state_dict()
    facts = {"version": VERSION, "arithmetic": ARITHMETIC, **clock.state(), "seed": training.generators.seed}
    facts |= {"losses": training.step_log.meter.state(), "batches": training.batches.state_dict()}
    facts |= {"settings": deciding_options(training.config, clock.total), "choices": asdict(training.choices)}
    facts |= {"computed_by": computed_by(world.device), "groups": updates.groups}
    facts |= training.early_stop.state()
    facts |= {ALPHAS: alphas} if (alphas := training.method.alphas()) else {}
    if (marks := training.batches.images.held_out) is not None:
        facts |= {IN_STATE: list(marks)}
    return State(tensors, values, facts)


def resume_training(folder: Path, training: "Training") -> None:
    """Restore the state from a folder that `State.write` wrote. Raises ConfigError where it does not fit this run."""
    training.journal.phase(Message("resuming"))
    config, world, updates, clock = training.config, training.world, training.updates, training.clock
    raise_if_any(damage(folder))
    facts = read_progress(folder)
    if not config.steps.moved and (why := find_nothing_left(folder, facts, clock.total, config)):
        raise ConfigError(why)
    with fitting(folder / WEIGHTS):
        training.method.restore(read_tensors(folder / WEIGHTS))
        training.method.take_alphas(facts.get(ALPHAS, {}))
    _take_over_optimizer(folder, facts, training)
    if updates.average and (folder / AVERAGE).is_file():
        with fitting(folder / AVERAGE):
            updates.average.load_state_dict(read_tensors(folder / AVERAGE))
    elif updates.average:
        updates.average.start()
        training.journal.warn(Message("resume: the state has no averaged weights; the average starts again"))
    if world.scaler:
        with fitting(folder / SCALER):
            world.scaler.load_state_dict(
                _of_same_form(folder / SCALER, world.scaler.state_dict(), read_values(folder / SCALER, world.device))
            )
    _warn_of_differences(facts, training, training.batches.load_state_dict(facts["batches"]))
    training.generators.seed = facts["seed"]
    _move_clock(facts, training)
    # Last, so that nothing above draws from the restored generators.
    if (folder / randomness(world.rank)).is_file():
        with fitting(folder / randomness(world.rank)):
            rng.set_rng_state(read_values(folder / randomness(world.rank), "cpu"), world.device)
    training.journal.say(f"Resumed {folder} after step {clock.step}.")


def _take_over_optimizer(folder: Path, facts: JsonMapping, training: "Training") -> None:
    """Load optimizer and schedule; rates and arguments that the config has changed apply."""
    config, options, updates = training.config, facts.get("settings", {}), training.updates
    in_shards = training.method.shards is not None  # then each process reads its own rows only
    stored = read_values(folder / OPTIMIZER, "cpu" if in_shards else training.world.device, mapped=in_shards)
    rescheduled = is_rescheduled(options, deciding_options(config, training.clock.total))
    now = {"last_epoch": 0} if rescheduled else updates.schedule.state_dict()
    schedule = _of_same_form(folder / SCHEDULER, now, read_values(folder / SCHEDULER, "cpu"))
    saved = resuming.Saved(stored, schedule, facts.get("groups"), options, rescheduled)
    try:
        if wrong := resuming.wrong_group(updates.raw_optimizer, stored):
            raise state_refusal(folder / OPTIMIZER, wrong)
        updates.resume(saved, config)
    except ConfigError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError) as e:
        raise ConfigError(OTHER_OPTIMIZER) from e  # other groups, or other memory
    spec = chosen_optimizer(config)
    # The state that other packages keep for a weight may depend on its size, so it is never refused for its form.
    if in_shards or spec.module != "torch.optim":
        return
    kept = trial.optimizer_state_shapes(spec, optimizer_arguments(config))
    if wrong := wrong_moment(stepped_weights(updates.raw_optimizer), kept, trial.WEIGHT_SIZES):
        raise state_refusal(folder / OPTIMIZER, wrong)


def _of_same_form(path: Path, now: JsonMapping, saved: Any) -> Any:
    """Return saved values if their form is that of the values they replace; raise ConfigError otherwise."""
    if place := wrong_form(now, saved):
        raise state_refusal(path, place)
    return saved


def _move_clock(facts: JsonMapping, training: "Training") -> None:
    """Set clock and data to where the state was saved, or to where the config says that this training begins."""
    clock, batches, accumulation = training.clock, training.batches, training.config.steps.gradient_accumulation_steps
    if training.config.steps.moved:
        batches.go_to(clock.epoch, clock.in_epoch * accumulation)
        return
    clock.step, clock.epoch = facts["current_step"], facts["current_epoch"]
    # With other data or another accumulation, the epoch may already be over at this place.
    steps = math.ceil(batches.index / accumulation)
    clock.in_epoch = min(steps, clock.per_epoch) if batches.epoch == clock.epoch else clock.per_epoch
    training.step_log.meter.load(facts["losses"][: clock.per_epoch])
    training.early_stop.restore(facts)


def _warn_of_differences(facts: JsonMapping, training: "Training", data: MessageLike) -> None:
    """Warn of every difference that keeps this run from continuing bit for bit, besides `changes`."""
    config = training.config
    now = deciding_options(config, training.clock.total)
    differences = list(inexact_differences(facts.get("settings", {}), now))
    differences += [data] * bool(data)
    differences += _captions_as_written(facts, training)
    folder, ranks = Path(config.steps.resume or ""), training.world.ranks
    if any(not (folder / randomness(rank)).is_file() for rank in range(ranks)):
        differences.append(Message("the state is of fewer processes, so some have no random state"))
    differences += compare_settings(facts.get("computed_by", {}), computed_by(training.world.device))
    if differences:
        training.journal.warn(Message(NOT_EXACTLY, differences=join_messages(differences, "; ")))


def _captions_as_written(facts: JsonMapping, training: "Training") -> list[Message]:
    """Return the difference of a state of 0.3.0 or before, which cached captions without the additions of options."""
    if CHECKED in facts or not training.config.cache.text:
        return []
    changed = [image for image in training.batches.images.items if image.encoded_caption != image.caption]
    template = "now encoded with prefix, suffix, wildcards and trigger phrase, and before as written: {count}"
    return [Message(template, count=counted(len(changed), "caption"))] if changed else []


def resumed_choices(config: RunConfig) -> Choices:
    # Raises ConfigError for a folder that is no state.
    return Choices.read(read_progress(Path(config.steps.resume))) if config.steps.resume else Choices()
