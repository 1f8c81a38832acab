"""Choices that a training has made by timing; saved in its states, so that a resumed run computes the same."""

from dataclasses import dataclass

from library.config.json_types import JsonMapping, JsonObject

# The options that compile_autotune varies. A state of unknown origin must not change any other.
from library.measuring.candidates import TUNED_OPTIONS


@dataclass(slots=True)
class Choices:
    """The choices so far; None if not made yet."""

    tuned: JsonObject | None = None  # the fastest options found by compile_autotune
    compiled_from: int | None = None  # the first step with blocks that were compiled beside the run
    stays_eager: int | None = None  # total steps of the training beside which compiling did not pay or failed

    @classmethod
    def read(cls, facts: JsonMapping) -> "Choices":
        """Return the choices of a state; None for those that are missing (older versions) or invalid."""
        choices = facts.get("choices")
        if not isinstance(choices, dict):
            return cls()
        tuned = choices.get("tuned")
        steps = {name: choices.get(name) for name in ("compiled_from", "stays_eager")}
        return cls(
            tuned=tuned if isinstance(tuned, dict) and set(tuned) <= set(TUNED_OPTIONS) else None,
            **{name: step if isinstance(step, int) and step > 0 else None for name, step in steps.items()},
        )
