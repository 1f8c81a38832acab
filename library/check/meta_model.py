"""A training's networks built from their files' headers without weights, to find in seconds what would otherwise fail
when adapters are attached or a state is restored.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from library import families, methods
from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig
from library.config.schema import options_of
from library.config.sections import AdapterRun, ControlRun, EmbeddingRun
from library.families import network_args
from library.families.base import Family, ModelComponents
from library.families.shared import weights
from library.methods import snapshot
from library.optim import lr_schedule
from library.train.saving import resume_check
from library.train.saving.state_files import WEIGHTS


def find_model_file_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield mismatches of `network_weights`, `base_weights`, `network_args` and `resume` with the model.

    These must be valid by themselves.
    """
    if not _needs_model(config) or not has_model_files(config):
        return
    try:
        method = _attach_empty_method(config)
    except ConfigError as e:
        yield from e.problems
        return
    except (RuntimeError, NotImplementedError) as e:  # LyCORIS' kinds that read the weights
        if not isinstance(config, AdapterRun) or config.network.module.startswith("networks."):
            raise
        logging.getLogger(__name__).debug("%s could not be tried beforehand: %s", config.network.module, e)
        return
    yield from lr_schedule.for_groups(config, [group["lr"] for group in method.groups() if group["params"]])
    if _resumes(config):
        yield from _state_mismatches(Path(config.steps.resume or ""), method, config)


def _needs_model(config: RunConfig) -> bool:
    if lr_schedule.has_lists(config):
        return network_args.args_class(config) is not None if isinstance(config, AdapterRun) else True
    if isinstance(config, ControlRun):
        return bool(config.control.network_weights) or _resumes(config)
    if isinstance(config, EmbeddingRun):
        return bool(config.embedding.weights) or _resumes(config)
    if not isinstance(config, AdapterRun):
        return _resumes(config)
    if network_args.args_class(config) is None:
        return False  # other modules cannot be predicted
    network = config.network
    return bool(network.network_weights or network.base_weights or network.network_args) or _resumes(config)


def _resumes(config: RunConfig) -> bool:
    return bool(config.steps.resume and not config.steps.resume_from_huggingface)


def has_model_files(config: RunConfig) -> bool:
    """Return whether the model's files are on this machine."""
    files = [o.name for o in options_of(type(config)).values() if o.section == "model" and o.kind == "file"]
    paths = [getattr(config.model, name) for name in files]
    return all(Path(name).exists() for name in paths if name)


def empty_components(config: RunConfig, encoders: bool) -> tuple[Family, ModelComponents]:
    """Return the networks of a config's model without memory, optionally with its text encoders. Raises ConfigError."""
    family = families.family_for(config)
    with weights.shapes_only():
        components = family.load(torch.float32, deferring=True)
        if encoders:
            components.read_encoders()
    return family, components


def _attach_empty_method(config: RunConfig) -> methods.TrainingMethod:
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the training repeats these warnings
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that tensors on the meta device hold no data
            family, components = empty_components(config, methods.reads_encoders(config))
            return methods.attach_method(components, family, config)
    finally:
        logging.disable(level)


def _state_mismatches(folder: Path, method: methods.TrainingMethod, config: RunConfig) -> Iterator[Problem]:
    """Yield mismatches of a state: other networks, or another optimizer."""
    changes = resume_check.shaping_changes(folder, config)
    shapes = {name: tuple(tensor.shape) for name, tensor in method.snapshot().items()}
    if problem := snapshot.differing_tensors(shapes, weights.header(folder / WEIGHTS), changes):
        yield problem
        return
    with contextlib.suppress(ConfigError):  # damaged files are reported elsewhere
        saved, now = resume_check.saved_groups(folder), resume_check.group_sizes(method.groups())
        if problem := resume_check.other_groups(saved, now, changes):
            yield problem
