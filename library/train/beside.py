"""Work beside the training: samples, validation, reports. What fails there is a warning, and the training goes on."""

import gc
import logging
from collections.abc import Callable

import torch

from library.config.problems import ConfigError, Message, MessageLike
from library.config.run_config import RunConfig
from library.runs.record import error_sentence
from library.train import errors
from library.train.journal import Journal
from library.train.stop_requests import WorkCancelled
from library.train.training import Training

log = logging.getLogger(__name__)


# Why: docs/decisions/2026-11-27-nothing-beside-a-training-ends-it.md
def reason(error: Exception, training: Training) -> MessageLike:
    """Why work beside the training failed, as a sentence for a warning; frees the memory that the error holds.

    Raises the error where the training cannot go on after it: it was asked to end, another process of it is gone, or
    the others still compute with parts of the model that this one has.
    """
    between_passes = isinstance(error, ConfigError | OSError)
    if training.method.shards is not None and training.world.ranks > 1 and not between_passes:
        raise error
    return reason_before(error, training.config, training.journal)


def reason_before(error: Exception, config: RunConfig, journal: Journal) -> MessageLike:
    """As `reason`, for work before the first step, in which each process computes by itself."""
    explained = errors.explain_error(error, config, journal.doing, {})
    if isinstance(error, WorkCancelled) or isinstance(explained, errors.ProcessGone):
        raise error
    return describe_failure(error, config, journal.doing)


def describe_failure(error: Exception, config: RunConfig, doing: Message) -> MessageLike:
    """An error as a sentence for a warning; frees the memory that the error holds."""
    log.debug("work beside the training failed", exc_info=error)
    explained = errors.explain_error(error, config, doing, {})
    said = explained.said if isinstance(explained, ConfigError) else error_sentence(error)
    free_traceback(error)
    return said


def free_traceback(error: BaseException) -> None:
    """Free what an error keeps alive: the tensors of the frames that it came through."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def attempt(work: Callable[[], None], failed: str, training: Training) -> None:
    """Do this work; where it fails, warn with the template `failed`, whose {why} is the reason."""
    try:
        work()
    except Exception as error:
        training.journal.warn(Message(failed, why=reason(error, training)))
