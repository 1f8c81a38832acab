"""The values shared by validation, samples, saving and resuming."""

from dataclasses import dataclass
from typing import Any

from library.data.loading import Batches
from library.distributed.world import World
from library.families.base import Family, ModelComponents
from library.methods import TrainingMethod
from library.train.choices import Choices
from library.train.evaluation.early_stop import EarlyStop
from library.train.journal import Journal
from library.train.step.clock import Clock
from library.train.step.loss import LossFunction
from library.train.step.rng import StepGenerators
from library.train.step.updates import Updates
from library.train.step_log import StepLog


# Separate values instead of one run object, so that a test can take a step without a journal.
# Why: docs/decisions/2026-11-22-values-instead-of-a-run-object.md
@dataclass(frozen=True, slots=True)
class Training:
    """A training that is ready to take steps. Its fields are never replaced; clock, weights and generators change in
    place.
    """

    world: World
    journal: Journal
    clock: Clock
    batches: Batches
    compute_loss: LossFunction
    updates: Updates
    step_log: StepLog
    choices: Choices
    early_stop: EarlyStop

    @property
    def config(self) -> Any:
        return self.compute_loss.config

    @property
    def family(self) -> Family:
        return self.compute_loss.family

    @property
    def components(self) -> ModelComponents:
        return self.compute_loss.components

    @property
    def method(self) -> TrainingMethod:
        return self.compute_loss.method

    @property
    def generators(self) -> StepGenerators:
        return self.compute_loss.generators
