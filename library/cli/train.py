"""Run a training from its config to its file: report every problem first, then run the loop."""

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
    """Train what `config` describes and return the resulting file. ConfigError lists everything to fix first.

    `notes` are remarks from reading the config, which go into the run's record; None computes them again. `began` is
    the start of the process in seconds since 1970. With `debug_dataset` the data is printed, and nothing is trained.
    """
    logging_setup.listen(config.log)
    if config.data.debug_dataset:
        return preflight.print_dataset(config)
    config = hub.fetched(config)
    paths.tidy(config)
    remarks = preflight.check_before_training(config)
    preflight.load_named_code(config)
    with output_lock.hold_output_name(config):
        return run_training(config, remarks, building.config_notes(config) if notes is None else notes, began)
