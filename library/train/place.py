"""Where a training stands between two steps, so that it can go back there when the step that follows is dropped."""

from typing import Any

from library.train import rng


class Place:
    """The clock, the place in the data and the random numbers; weights do not change within a step."""

    def __init__(self, run: Any, batches: Any) -> None:
        self._clock, self._batches = run.clock.state(), batches
        self._data, self._chance = batches.state_dict(), rng.get_rng_state(run.device)

    def go_back(self, run: Any) -> bool:
        """Be there again. The gradients of the dropped step go."""
        run.forget_gradients()
        run.clock.step, run.clock.epoch = self._clock["current_step"], self._clock["current_epoch"]
        run.clock.in_epoch = self._clock["step_in_epoch"]
        self._batches.load_state_dict(self._data)
        rng.set_rng_state(self._chance, run.device)
        return True


def place(run: Any, batches: Any) -> Place | None:
    """Where it stands, if the step that follows can be dropped: between its batches, and by one process alone."""
    return Place(run, batches) if run.config.steps.gradient_accumulation_steps > 1 and run.ranks == 1 else None
