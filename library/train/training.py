"""Values that validation, samples, saving and resuming share."""

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


# Why: docs/decisions/2026-11-22-values-instead-of-a-run-object.md
@dataclass(frozen=True, slots=True)
class Training:
    """A training that is ready to take steps. Fields are never replaced; clock, weights and generators change in
    place."""

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
        """The config that is trained with."""
        return self.compute_loss.config

    @property
    def family(self) -> Family:
        """The model's family."""
        return self.compute_loss.family

    @property
    def components(self) -> ModelComponents:
        """The model's networks."""
        return self.compute_loss.components

    @property
    def method(self) -> TrainingMethod:
        """The training method, which holds the trained parameters."""
        return self.compute_loss.method

    @property
    def generators(self) -> StepGenerators:
        """The generators of noise and timesteps."""
        return self.compute_loss.generators
