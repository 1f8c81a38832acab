"""Saving: files and states during the run, and the final file."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from library.config.problems import ConfigError, Message, MessageLike
from library.data.images import ImageSet
from library.files import free_space, size_text
from library.optim import averaging, optimizers
from library.outputs import paths, verify
from library.outputs.dataset_stats import dataset_stats
from library.outputs.metadata import MetadataBuilder
from library.train import errors
from library.train.journal import Journal
from library.train.saving import resume_state
from library.train.saving.full_disk import Writing
from library.train.saving.state_files import State
from library.train.step.lost_seconds import SAVING_STATES
from library.train.training import Training

By = Callable[[Path, Callable[[Path], None]], bool | None]  # a method of `Writing`


class Checkpointer:
    """Saves files and states when due, and removes outdated ones."""

    def __init__(self, training: Training, images: ImageSet) -> None:
        config, clock, world = training.config, training.clock, training.world
        self._training, self._config, self._journal = training, config, training.journal
        self._names, self._backups = paths.output_names(config), Backups(paths.output_names(config), training.journal)
        self._chosen = frozenset(config.save.save_at_steps)
        self._every_epochs = paths.every_n_epochs(config, clock.epochs)
        self._writing = Writing(training.journal)
        self._shapes: verify.Shapes = {}
        self._saved_at = 0  # step of the last state
        self._finished = False  # whether the final file is saved
        if world.main:
            total = config.data.train_batch_size * config.steps.gradient_accumulation_steps * world.ranks
            stats = dataset_stats(images, config, len(training.batches), clock.epochs, total)
            stats["max_train_steps"] = clock.total  # computed from max_train_epochs where that is set
            self._metadata = MetadataBuilder(config, training.family, stats, optimizers.describe_optimizer(config))

    def when_due(self) -> None:
        """Save the files and states that are due after this step or epoch, or were requested."""
        clock, requests = self._training.clock, self._journal.requests
        if requests.granted("save"):  # file and state of this step; older ones are kept
            self._check()
            self._save_file(self._names.step(clock.step))
            self._save_state(self._names.state(step=clock.step))
        for what in self._due():
            if what == "step":
                self._keep(step=clock.step)
            elif clock.epoch < clock.epochs:  # the last epoch's file is the final one
                self._keep(epoch=clock.epoch)
        if requests.granted("backup") and not clock.done:  # skipped if a state has just been saved
            self._check()
            self._save_state(None)
        if clock.done:
            self._final()
        self._journal.upload_saved()

    def _due(self) -> list[str]:
        """Return which of "step" and "epoch" files are due: at chosen steps, and at intervals after
        `save_from_step`.
        """
        clock, options = self._training.clock, self._config.save
        due: list[str] = []
        if clock.step >= (options.save_from_step or 0):
            due += clock.every(options.save_every_n_steps, self._every_epochs)
        if clock.step in self._chosen and "step" not in due:
            due.insert(0, "step")
        return due

    def rescue(self, error: ConfigError) -> NoReturn:
        """Save a state of all steps so far, then raise the error that has ended the training between two steps."""
        if self._training.clock.step and self._training.clock.step != self._saved_at:
            self._check()
            self._save_state(None)
        self._journal.upload_saved()
        if state := self._journal.newest.get("state"):
            raise ConfigError("{problem}; resume from {state}", problem=error, state=state) from error
        raise error

    def end(self) -> Path:
        """Save the final file unless it is saved already, and return its path.

        After a stop, also save a state to resume from.
        """
        if not self._finished:
            self._final()
        if self._journal.requests.stopping and self._saved_at != self._training.clock.step:
            self._check()
            self._save_state(self._names.state(), self._writing.last_state)
        self._journal.upload_saved()
        self._journal.process_watch.leave()
        self._writing.check()
        if self._training.world.main:
            self._backups.discard()
        self._journal.say(f"Saved {self._names.last}")
        return self._names.last

    def _final(self) -> None:
        """Save the final file and, if it is enabled, the final state."""
        options = self._config.save
        self._check()
        if options.save_state or options.save_state_on_train_end or self._journal.requests.stopping:
            self._save_state(self._names.state(), self._writing.last_state)
        self._save_file(self._names.last, self._writing.result)
        self._finished, self._journal.completed = True, self._training.clock.done

    def _keep(self, **when: int) -> None:
        """Save the file of a step or an epoch, with save_state also its state, and delete outdated ones."""
        self._check()
        config = self._config
        if "step" in when:
            path, old = self._names.step(when["step"]), paths.outdated_step(config, when["step"])
            old_state = paths.outdated_step(config, when["step"], state=True)
        else:
            epoch, every_epochs = when["epoch"], self._every_epochs
            path, old = self._names.epoch(epoch), paths.outdated_epoch(config, epoch, period=every_epochs)
            old_state = paths.outdated_epoch(config, epoch, state=True, period=every_epochs)
        outdated: list[Path | None] = []  # of which the newer one is saved
        if self._save_file(path):
            outdated += [old, old and self._names.average(old)]
        if config.save.save_state and self._save_state(self._names.state(**when)):
            outdated.append(old_state)
        for path in outdated if self._training.world.main else ():
            self._journal.uploads.wait_for(path)
            paths.remove_outdated(path)

    def _check(self) -> None:
        """Raise before saving if a loss or the weights are not finite."""
        training = self._training
        training.step_log.settle()
        parameters = training.method.parameters()
        why = errors.weights_problem(parameters, training.clock.step, self._journal.newest)
        if problems := [*filter(None, training.world.gather(why))]:  # each process has checked its own shards
            raise ConfigError(problems[0])

    def _save_file(self, path: Path, by: By | None = None) -> bool:
        """Save the file and its average by a method of `Writing`; return whether both exist."""
        updates, by = self._training.updates, by or self._writing.during
        self._journal.phase(Message("saving"))
        with averaging.averaged(updates.raw_optimizer):
            saved = self._write_on_main(lambda: by(path, self._write))
        period = self._config.optim.ema_every_n_steps
        if self._config.optim.ema_decay and self._training.clock.step < period:
            self._journal.warn(Message(NOT_AVERAGED, file=self._names.average(path).name, every=period))
        elif self._config.optim.ema_decay:
            with updates.average.applied() if updates.average else contextlib.nullcontext():
                saved &= self._write_on_main(lambda: by(self._names.average(path), self._write))
        self._training.world.wait_for_everyone()
        return saved

    def _write_on_main(self, write: Callable[[], bool | None]) -> bool:
        """Let the first process write, and return False if `write` does; with a sharded model the others send their
        shards.
        """
        main, shards = self._training.world.main, self._training.method.shards
        if main:
            with shards.collecting() if shards else self._journal.process_watch.not_needed():
                return write() is not False
        elif shards:
            shards.serve()
        return True

    def _write(self, path: Path) -> None:
        clock, method = self._training.clock, self._training.method
        progress = clock.epoch, clock.step
        metadata = self._metadata.of_file(*progress, self._training.generators.seed)
        paths.write_result(path, method, self._config, metadata, progress)

        def expected() -> verify.Shapes:
            self._shapes = self._shapes or verify.expected(method)
            return self._shapes

        verification = verify.verify_saved_file(path, expected, self._config)
        if not verification.get("ok", True):
            self._journal.warn(
                Message("{file} does not load as it should: {why}", file=path.name, why=verification["text"])
            )
        self._journal.saved(path, clock.step, **verification)

    def _save_state(self, folder: Path | None, by: By | None = None) -> bool:
        """Save a state to resume from, by a method of `Writing`; without a folder, as the backup that replaces the
        previous one. Return whether it exists.
        """
        self._journal.phase(Message("saving the state"))
        with self._training.step_log.meter.lost.during(SAVING_STATES):
            saved = self._collect_and_write(folder, by or self._writing.during)
        self._journal.requests.state_saved()
        return saved

    def _collect_and_write(self, folder: Path | None, by: By) -> bool:
        step = self._saved_at = self._training.clock.step
        state = resume_state.collect_state(self._training)

        def write(folder: Path) -> None:
            assert state is not None
            self._journal.saving(folder, step)
            state.write(folder)
            self._journal.saved(folder, step)
            self._backups.discard()

        def write_or_back_up() -> bool | None:
            assert state is not None
            return by(folder, write) if folder else self._backups.write(state, step)

        saved = self._write_on_main(write_or_back_up)
        self._training.world.wait_for_everyone()
        return saved


NOT_AVERAGED = "{file} is not saved: the average begins with its first update, after step {every} (ema_every_n_steps)"
NOT_SAVED = (
    "save_state_every_n_minutes: the state after step {step} was not saved, {left} ({why}); the training continues and "
    "tries again"
)


class Backups:
    """States saved every n minutes, to resume from after a crash or a power failure.

    Only the newest is kept. A failure causes one warning and does not end the training.
    """

    def __init__(self, names: paths.Names, journal: Journal) -> None:
        self._names, self._journal = names, journal
        self._warned = False

    def write(self, state: State, step: int) -> None:
        """Save a state, then delete the previous one."""
        folder = self._names.backup(step)
        try:
            if short := self._short(folder, state):
                raise ConfigError(short)
            self._journal.saving(folder, step)
            state.write(folder)
        except (ConfigError, OSError) as error:
            if not self._warned:
                self._warned = True
                backups = self._names.backups()
                newest = Message("there is none yet")
                if backups:
                    newest = Message("the newest is {state}", state=backups[-1].name)
                why = error.said if isinstance(error, ConfigError) else error
                self._journal.warn(Message(NOT_SAVED, step=step, left=newest, why=why))
            return
        self._warned = False
        self._journal.saved(folder, step, backup=True)
        self.discard(keep=folder)

    def discard(self, keep: Path | None = None) -> None:
        """Delete all backups but `keep`: a newer state exists, or the training is finished."""
        for path in self._names.backups():
            if path != keep:
                paths.remove_outdated(path)

    def _short(self, folder: Path, state: State) -> MessageLike:
        """Return why disk space is short, "" if it suffices: another state and the final file must still fit."""
        free = free_space(folder)
        # `discard` deletes them once a newer state is complete.
        freed = sum(f.stat().st_size for old in self._names.backups() for f in old.iterdir())
        later = state.size + state.size_of_weights
        if free >= state.size and free - state.size + freed >= later:
            return ""
        needed = max(state.size, state.size + later - freed)
        return Message(
            "{needed} needed in {folder}, also for what is saved later, {free} free",
            needed=size_text(needed),
            folder=folder.parent,
            free=size_text(free),
        )
