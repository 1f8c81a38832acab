"""States that are saved now and then, by time: what is left of a training that a crash or a power cut ends."""

from pathlib import Path
from typing import Any

from library.config.schema import ConfigError
from library.files import free_space
from library.outputs import paths
from library.train import resume_state


class Backups:
    """Keeps the newest such state of a training. What cannot be saved is said once, and ends no training."""

    def __init__(self, run: Any) -> None:
        self._run, self._names = run, paths.names(run.config)
        self._told = False

    def write(self, found: resume_state.State) -> None:
        """Save a state; the one before goes when this one is whole."""
        folder = self._names.backup(self._run.clock.step)
        try:
            if short := self._short(folder, found):
                raise ConfigError(short)
            found.write(folder)
        except (ConfigError, OSError) as error:
            self._failed(error)
            return
        self._told = False
        self._run.saved(folder, backup=True)
        self.discard(keep=folder)

    def discard(self, keep: Path | None = None) -> None:
        """Delete the others, or all: something newer to resume from is there, or nothing is left to do."""
        for path in self._names.backups():
            if path != keep:
                paths.remove(path)

    def _short(self, folder: Path, found: resume_state.State) -> str:
        """Why there is no room. What comes later must not find the disk full: another state, and the result."""
        free = free_space(folder)
        held = sum(f.stat().st_size for old in self._names.backups() for f in old.iterdir())
        later = found.size + found.size_of_weights
        if free >= found.size and free - found.size + held >= later:
            return ""
        needed = max(found.size, found.size + later - held)
        return (
            f"{needed / 1e9:.1f} GB needed in {folder.parent}, also for what is saved later, {free / 1e9:.1f} GB free"
        )

    def _failed(self, error: Exception) -> None:
        if self._told:
            return
        self._told = True
        known = self._names.backups()
        left = f"the newest is {known[-1].name}" if known else "there is none yet"
        self._run.warn(
            f"save_state_every_n_minutes: the state after step {self._run.clock.step} was not saved, {left} ({error}); "
            "the training goes on and tries again"
        )
