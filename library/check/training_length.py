"""Checks of the length of a training: no end, a start after the end, and events that never happen."""

import math
from collections.abc import Iterator
from pathlib import Path

from library import data
from library.config import ineffective, schema
from library.config.environment import process_count
from library.config.problems import Problem, counted, together
from library.config.run_config import RunConfig
from library.config.sections.length import MAX_STEPS
from library.data.length import Length, training_length
from library.optim import lr_schedule
from library.train.saving import resume_check
from library.train.step.clock import Clock


def expected_length(config: RunConfig, images: data.Check) -> Length | None:
    """Return the length of the training, if there are images to count."""
    image_set = images.images
    if not image_set or not image_set.items:
        return None
    return training_length(config.steps, data.summarise_images(image_set)["batches_per_epoch"])


def length_problems(config: RunConfig, images: data.Check) -> Iterator[Problem]:
    """Yield a training that never ends, or starts after its end."""
    length = expected_length(config, images)
    if not length or not images.images:
        return
    if length.total > MAX_STEPS:
        epochs, total = f"{config.steps.max_train_epochs:,}", f"{length.total:,}"
        yield Problem("max_train_epochs", ": {epochs} epochs are {total} steps; lower it", epochs=epochs, total=total)
    Clock.of(config, data.summarise_images(images.images)["batches_per_epoch"])
    yield from lr_schedule.too_long(config, length.total * process_count())
    ema_interval = config.optim.ema_every_n_steps
    if config.optim.ema_decay and ema_interval > length.total:
        yield Problem(
            "ema_every_n_steps",
            "= {every}: the training ends after {count}, before the first update, so the average would be the "
            "untrained model; set it to 1",
            every=ema_interval,
            count=counted(length.total, "step"),
            also="ema_decay",
            fix={"ema_every_n_steps": 1},
        )
    if config.steps.early_stop_patience and config.data.dataset_config and not images.images.validation:
        yield Problem(
            "early_stop_patience",
            "needs held-out images, and none are held out: set validation_split in the dataset_config",
            also="dataset_config validation_split",
            fix={"early_stop_patience": None},
        )
    if config.steps.resume and not config.steps.resume_from_huggingface and config.steps.max_train_epochs:
        yield from resume_check.problems(Path(config.steps.resume), config, length.total)


def length_notes(config: RunConfig, images: data.Check) -> Iterator[Problem]:
    """Yield events that the training ends before: saves, samples, validations, and the end of a warm-up if the length
    is in epochs."""
    length = expected_length(config, images)
    if not length:
        return
    warm = lr_schedule.steps_of_share(config.optim.lr_warmup_steps, length.total)
    yield from _late_saves(config, images)
    yield from _unused_held_out(config, images, length)
    values = schema.option_values(config)
    for end, unit in ((length.total, "step"), (length.epochs, "epoch")):
        for name in (f"{what}_every_n_{unit}s" for what in ("sample", "validate", "save")):
            if (values.get(name) or 0) > end:
                yield ineffective.remark(name, "the training ends after {count}", count=counted(end, unit))
    if config.steps.max_train_epochs:
        yield from config.compile.never_begun(length.total)
    first = config.compile.compile_compare_steps
    if config.compile.compile and 0 < length.total <= first and not config.steps.resume:
        yield Problem(
            "compile_compare_steps",
            "= {first}: nothing is compiled, because the training ends with step {steps}; lower it",
            first=first,
            steps=length.total,
        )
    if config.steps.max_train_epochs and warm >= length.total:
        yield Problem(
            "lr_warmup_steps",
            "{warm} is not less than the {steps} of this training, so the learning rate never reaches its value",
            warm=warm,
            steps=counted(length.total, "step"),
        )


def _count_validations(config: RunConfig, length: Length) -> tuple[int, int]:
    """Return the number of validations of the training, and the step of the first one."""
    values = schema.option_values(config)
    steps = values.get("validate_every_n_steps")
    at_epochs = (values.get("validate_every_n_epochs") or 1) * length.per_epoch
    if not steps:
        return length.total // at_epochs, at_epochs
    shared_steps = length.total // math.lcm(steps, at_epochs)  # steps where both intervals end count once
    return length.total // steps + length.total // at_epochs - shared_steps, min(steps, at_epochs)


def _unused_held_out(config: RunConfig, images: data.Check, length: Length) -> Iterator[Problem]:
    """Remark on held-out images that are never measured, and on a patience longer than the training."""
    if not images.images or not images.images.validation:
        return
    patience, options = config.steps.early_stop_patience, schema.options_of(type(config))
    number, first = _count_validations(config, length)
    if number and patience and patience >= number:
        yield ineffective.remark(
            "early_stop_patience", "this training has only {count}", count=counted(number, "validation")
        )
    if number:
        return
    share = "dataset_config" if config.data.dataset_config else "validation_split"
    has_interval = "validate_every_n_steps" in options
    template = (
        ": validation never runs, because the training ends after {steps} and the first validation is due after "
        "{first}; train longer"
    )
    if has_interval:
        template = (
            ": validation never runs, because the training ends after {steps} and the first validation is due "
            "after {first}; lower validate_every_n_steps, or train longer"
        )
    yield Problem(
        "early_stop_patience" if patience else share,
        template,
        steps=counted(length.total, "step"),
        first=f"{first:,}",
        also=f"{share} validate_every_n_steps validate_every_n_epochs max_train_steps max_train_epochs",
        fix={"validate_every_n_steps": max(1, length.total // 4)} if has_interval else {},
    )


def _late_saves(config: RunConfig, images: data.Check) -> Iterator[Problem]:
    """Remark on chosen steps of files beyond the end."""
    if not images.images:
        return
    batches = data.summarise_images(images.images, process_count())["batches_per_epoch"]
    end, chosen = Clock.of(config, batches).total, config.save.save_at_steps
    count = counted(end, "step")
    if late := [step for step in chosen if step > end]:
        yield Problem(
            "save_at_steps",
            ": {steps} will not be saved, as the training ends after {count}; leave them out, or train longer",
            steps=together(map(str, late)),
            count=count,
            fix={"save_at_steps": tuple(step for step in chosen if step <= end)},
        )
    if (config.save.save_from_step or 0) > end:
        yield ineffective.remark("save_from_step", "the training ends after {count}", count=count)
