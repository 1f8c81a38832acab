"""What a training has chosen by measuring time. Its states keep it, so that a resumed run computes the same."""

from dataclasses import dataclass

from library.config.json_types import JsonMapping, JsonObject


@dataclass(slots=True)
class Choices:
    """Nothing is chosen yet where a value is None."""

    tuned: JsonObject | None = None  # the options that compile_autotune has found to be the fastest
    compiled_from: int | None = None  # the first step with blocks that were compiled beside the run
    stays_eager: int | None = None  # steps of a training beside which compiling did not pay or failed

    @classmethod
    def read(cls, facts: JsonMapping) -> "Choices":
        """Those of a state; none of one that was saved before there were any."""
        known = facts.get("choices") or {}
        return cls(**{name: known.get(name) for name in cls.__slots__})
