"""A training from its config to its file: what is wrong is said first, all of it, then the loop runs."""

from collections.abc import Sequence
from pathlib import Path

from library.check import preflight
from library.config import building
from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.outputs import hub, paths
from library.train import logging_setup
from library.train.loop import run_training
from library.train.saving import output_lock


def train(config: RunConfig, notes: Sequence[Problem] | None = None, began: float = 0) -> Path | None:
    """Train what `config` describes and return the file that came of it. ConfigError lists everything to fix first.

    `notes` are what was said when the config was read, and go into the run's record; None asks for them again.
    `began` is when the process did, in seconds since 1970. With `debug_dataset` the data is shown, and nothing is
    trained.
    """
    logging_setup.listen(config.log)
    if config.data.debug_dataset:
        return preflight.show(config)
    config = hub.fetched(config)
    paths.tidy(config)
    remarks = preflight.check(config)
    preflight.load_named_code(config)
    with output_lock.held(config):
        return run_training(config, remarks, building.notes(config) if notes is None else notes, began)
