"""Work beside the training: samples, validation, reports. A failure is a warning, and the training continues."""

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
    """Return the reason of a failure as text for a warning, and free the memory that the error holds.

    Raises the error if the training cannot continue: it is stopped, another process is gone, or the others still need
    this process' shard of the model.
    """
    between_passes = isinstance(error, ConfigError | OSError)
    if training.method.shards is not None and training.world.ranks > 1 and not between_passes:
        raise error
    return reason_before(error, training.config, training.journal)


def reason_before(error: Exception, config: RunConfig, journal: Journal) -> MessageLike:
    """Return the same as `reason`, for work before the first step, which no process shares."""
    explained = errors.explain_error(error, config, journal.doing, {})
    if isinstance(error, WorkCancelled) or isinstance(explained, errors.ProcessGone):
        raise error
    return describe_failure(error, config, journal.doing)


def describe_failure(error: Exception, config: RunConfig, doing: Message) -> MessageLike:
    """Return an error as text for a warning, and free the memory that it holds."""
    log.debug("work beside the training failed", exc_info=error)
    explained = errors.explain_error(error, config, doing, {})
    sentence = explained.said if isinstance(explained, ConfigError) else error_sentence(error)
    free_traceback(error)
    return sentence


def free_traceback(error: BaseException) -> None:
    """Free the tensors that the frames of an error's traceback keep alive."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def attempt(work: Callable[[], None], template: str, training: Training) -> None:
    """Do this work; if it fails, warn with `template`, in which {why} is the reason."""
    try:
        work()
    except Exception as error:
        training.journal.warn(Message(template, why=reason(error, training)))
