"""The training, from a config to a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def train(config: Any, notes: Sequence[str] | None = None) -> Path | None:
    """Train what `config` describes and return the file that came of it. ConfigError lists everything to fix first.

    `notes` are what was said when the config was read, and go into the run's record; None asks for them again. With
    `debug_dataset` the data is shown, and nothing is trained.
    """
    from library.config import schema
    from library.train import console, hub, preflight, save
    from library.train.story import tell

    console.listen(config.log)
    if config.data.debug_dataset:
        return preflight.show(config)
    config = hub.fetched(config)
    save.tidy(config)
    remarks = preflight.check(config)
    return tell(config, remarks, schema.notes(config) if notes is None else notes)
