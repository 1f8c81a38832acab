"""The end of a training whose held-out loss no longer falls (`early_stop_patience`)."""

import math

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import Message, counted
from library.config.run_config import RunConfig
from library.distributed.world import World
from library.train.journal import Journal
from library.train.step.clock import Clock

IN_STATE = "early_stop"  # the key of a state's facts
ENDED = (
    "The training ends after step {step} (early_stop_patience): the held-out loss has not improved in {validations}. "
    "Its best was {loss} at step {best}."
)


class EarlyStop:
    """Counts the validations since the lowest held-out loss."""

    def __init__(self, config: RunConfig) -> None:
        self.patience = config.steps.early_stop_patience
        self._best_loss, self._best_step = math.inf, 0
        self._waited = 0  # validations since the best one
        self._last_step = 0  # step of the last counted validation

    @property
    def due(self) -> bool:
        return self.patience is not None and self._waited >= self.patience

    def lacks(self, step: int) -> bool:
        # Its state was saved before the validation.
        return self.patience is not None and self._last_step < step

    def count(self, step: int, loss: float) -> None:
        """Record the held-out loss after a step."""
        self._last_step = step
        # No tolerance: validations use the same images and noise, so any lower loss is an improvement.
        if loss < self._best_loss:
            self._best_loss, self._best_step, self._waited = loss, step, 0
        else:
            self._waited += 1

    def restore(self, facts: JsonMapping) -> None:
        """Continue counting from the facts of a saved state."""
        counts = facts.get(IN_STATE)
        if counts:
            best = counts["best_loss"]
            self._best_loss = math.inf if best is None else best
            self._best_step, self._waited = counts["best_step"], counts["waited"]
            self._last_step = counts["last_step"]

    def state(self) -> JsonObject:
        """Return the facts for a saved state; empty without a patience."""
        if self.patience is None:
            return {}
        return {IN_STATE: {**self._best, "waited": self._waited, "last_step": self._last_step}}

    @property
    def _best(self) -> JsonObject:
        loss = None if math.isinf(self._best_loss) else self._best_loss  # JSON has no infinity
        return {"best_loss": loss, "best_step": self._best_step}

    def end_when_due(self, clock: Clock, world: World, journal: Journal) -> None:
        """End the training in all processes if the patience of the first one is over, and record why."""
        # All processes follow the first one, so that none waits for a step of the others.
        if not world.gather(self.due)[0]:
            return
        clock.end_early()
        facts = {"step": clock.step, **self._best}
        planned = {"patience": self.patience, "planned_steps": clock.total}
        journal.note(total_steps=clock.step, early_stop={**facts, **planned})
        sentence = Message(
            ENDED,
            step=clock.step,
            validations=counted(self._waited, "validation"),
            loss=f"{self._best_loss:.4f}",
            best=self._best_step,
        )
        journal.event("early_stop", **facts, text=sentence)
        journal.say(str(sentence))
