"""What a training leaves on disk, and when: files during the run, states to resume from, the result at the end."""

from pathlib import Path
from typing import Any

from library.config.schema import ConfigError
from library.outputs import paths, verify
from library.outputs.dataset_stats import figures
from library.outputs.metadata import Metadata
from library.train import errors, optimizers, resume_state
from library.train.backups import Backups


class Checkpointer:
    """Saves what is due and removes what is outdated."""

    def __init__(self, run: Any, family: Any, method: Any, updates: Any, batches: Any, images: Any) -> None:
        config = self._config = run.config
        self._run, self._learner, self._updates, self._batches = run, method, updates, batches
        self._names, self._backups = paths.names(config), Backups(run)
        self._every_epochs = paths.every_n_epochs(config, run.clock.epochs)
        self._shapes: verify.Shapes = {}
        if run.main:
            total = config.data.train_batch_size * config.steps.gradient_accumulation_steps * run.ranks
            facts = figures(images, config, len(batches), run.clock.epochs, total)
            self._metadata = Metadata(config, family, facts, optimizers.describe(config))

    def resume(self) -> None:
        """Go on where an earlier run stopped, if that is asked for."""
        if folder := self._config.steps.resume:
            self._run.phase("resuming")
            resume_state.load(Path(folder), self._run, self._learner, self._updates, self._batches)
            self._run.say(f"Resumed {folder} after step {self._run.clock.step}.")

    def when_due(self) -> None:
        """After a step: the files and states of this step and of this epoch, and what somebody asked for."""
        clock, options = self._run.clock, self._config.save
        if self._run.granted("save"):
            self._asked()
        for what in clock.every(options.save_every_n_steps, self._every_epochs):
            if what == "step":
                self._keep(step=clock.step)
            elif clock.epoch < clock.epochs:  # the last epoch's file is the final one
                self._keep(epoch=clock.epoch)
        if self._run.granted("backup") and not clock.done:  # and unless a state has just been saved
            self._backup()

    def _asked(self) -> None:
        """A file of this step and a state to go on from; nothing is removed for them."""
        self._check()
        step = self._run.clock.step
        self._file(self._names.step(step))
        self._state(self._names.state(step=step))

    def final(self) -> Path:
        """The result. After a stop there is a state beside it, so that the run can be gone on with."""
        run, options = self._run, self._config.save
        self._check()
        if options.save_state or options.save_state_on_train_end or run.stopping:
            self._state(self._names.state())
        path = self._names.last
        self._file(path)
        if run.main:
            self._backups.discard()
        run.say(f"Saved {path}")
        return path

    def _keep(self, **when: int) -> None:
        self._check()
        if "step" in when:
            path, old = self._names.step(when["step"]), paths.outdated_step(self._config, when["step"])
            old_state = paths.outdated_step(self._config, when["step"], state=True)
        else:
            epoch, every = when["epoch"], self._every_epochs
            path, old = self._names.epoch(epoch), paths.outdated_epoch(self._config, epoch, every=every)
            old_state = paths.outdated_epoch(self._config, epoch, state=True, every=every)
        self._file(path)
        if self._config.save.save_state:
            self._state(self._names.state(**when))
        if self._run.main:
            for path in (old, old and self._names.average(old), old_state if self._config.save.save_state else None):
                self._run.uploads.wait_for(path)
                paths.remove(path)

    def _check(self) -> None:
        """Nothing is saved that is not sound: neither after a step that failed, nor weights that are no numbers."""
        self._run.settle()
        if why := errors.weights_problem(self._learner.parameters(), self._run):
            raise ConfigError(why)

    def _file(self, path: Path) -> None:
        run = self._run
        run.phase("saving")
        if run.main:
            with optimizers.averaged(self._updates.bare):
                self._write(path)
            if average := self._updates.average:
                with average.shown():
                    self._write(self._names.average(path))
        run.accelerator.wait_for_everyone()

    def _write(self, path: Path) -> None:
        run = self._run
        progress = run.clock.epoch, run.clock.step
        paths.result(path, self._learner, self._config, self._metadata.of_file(*progress), progress)
        checked = verify.check(path, self._expected, self._config)
        if not checked.get("ok", True):
            run.warn(f"{path.name} does not load as it should: {checked['text']}")
        run.saved(path, **checked)

    def _expected(self) -> verify.Shapes:
        self._shapes = self._shapes or verify.expected(self._learner)
        return self._shapes

    def _state(self, folder: Path) -> None:
        run = self._run
        run.phase("saving the state")
        if found := self._collected():
            found.write(folder)
            run.saved(folder)
            self._backups.discard()
        run.accelerator.wait_for_everyone()
        run.state_saved()

    def _backup(self) -> None:
        self._check()
        run = self._run
        run.phase("saving the state")
        if found := self._collected():
            self._backups.write(found)
        run.accelerator.wait_for_everyone()
        run.state_saved()

    def _collected(self) -> resume_state.State | None:
        return resume_state.collect(self._run, self._learner, self._updates, self._batches)
