"""A training's networks as the headers of their files describe them, without the numbers: what would only be found when
adapters are put into the loaded model, or a state is put back, is found in seconds."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from library import families, methods
from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig
from library.config.schema import options
from library.config.sections import AdapterRun, ControlRun, EmbeddingRun
from library.families import network_args
from library.families.base import Family, ModelComponents
from library.families.shared import weights
from library.methods import snapshot
from library.optim import lr_schedule
from library.train.saving import resume_check
from library.train.saving.state_files import WEIGHTS


def problems(config: RunConfig) -> Iterator[Problem]:
    """What of `network_weights`, `base_weights`, `network_args` and `resume` does not fit the model that is named.

    Asked when nothing is wrong with these in themselves.
    """
    if not _in_question(config) or not is_here(config):
        return
    try:
        method = _method(config)
    except ConfigError as e:
        yield from e.problems
        return
    except (RuntimeError, NotImplementedError) as e:  # LyCORIS, of a kind that looks at the weights
        if not isinstance(config, AdapterRun) or config.network.module.startswith("networks."):
            raise
        logging.getLogger(__name__).debug("%s could not be tried beforehand: %s", config.network.module, e)
        return
    yield from lr_schedule.for_groups(config, [group["lr"] for group in method.groups() if group["params"]])
    if _resumes(config):
        yield from _misfits(Path(config.steps.resume or ""), method, config)


def _in_question(config: RunConfig) -> bool:
    if lr_schedule.has_lists(config):
        return network_args.args_class(config) is not None if isinstance(config, AdapterRun) else True
    if isinstance(config, ControlRun):
        return bool(config.control.network_weights) or _resumes(config)
    if isinstance(config, EmbeddingRun):
        return bool(config.embedding.weights) or _resumes(config)
    if not isinstance(config, AdapterRun):
        return _resumes(config)
    if network_args.args_class(config) is None:
        return False  # what another module does is only known when it does it
    network = config.network
    return bool(network.network_weights or network.base_weights or network.network_args) or _resumes(config)


def _resumes(config: RunConfig) -> bool:
    return bool(config.steps.resume and not config.steps.resume_from_huggingface)


def is_here(config: RunConfig) -> bool:
    """Whether the model's files are on this machine."""
    files = [o.name for o in options(type(config)).values() if o.section == "model" and o.kind == "file"]
    given = [getattr(config.model, name) for name in files]
    return all(Path(name).exists() for name in given if name)


def empty_components(config: RunConfig, encoders: bool) -> tuple[Family, ModelComponents]:
    """The networks of a config's model without memory, with or without its text encoders. Raises ConfigError."""
    family = families.family_for(config)
    with weights.shapes_only():
        components = family.load(torch.float32, deferring=True)
        if encoders:
            components.read_encoders()
    return family, components


def _method(config: RunConfig) -> methods.TrainingMethod:
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # all that is told here will be told when it is done
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that numbers are not kept
            family, components = empty_components(config, methods.reads_encoders(config))
            return methods.attach(components, family, config)
    finally:
        logging.disable(level)


def _misfits(folder: Path, method: methods.TrainingMethod, config: RunConfig) -> Iterator[Problem]:
    """A state of other networks, or of another optimizer over the same."""
    changes = resume_check.shaping_changes(folder, config)
    here = {name: tuple(tensor.shape) for name, tensor in method.snapshot().items()}
    if problem := snapshot.differing(here, weights.header(folder / WEIGHTS), changes):
        yield problem
        return
    with contextlib.suppress(ConfigError):  # a damaged file is not looked into here
        saved, now = resume_check.saved_groups(folder), resume_check.group_sizes(method.groups())
        if problem := resume_check.other_groups(saved, now, changes):
            yield problem
