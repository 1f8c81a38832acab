"""What a training has chosen by measuring time. Its states keep it, so that a resumed run computes the same."""

from dataclasses import dataclass

from library.config.json_types import JsonMapping, JsonObject

# All that compile_autotune tries. A state may come from anyone, and shall change nothing else.
TUNABLE = (
    "compile",
    "compile_mode",
    "compile_dynamic",
    "attention_kernel",
    "blocks_to_swap",
    "gradient_checkpointing",
    "cpu_offload_checkpointing",
    "checkpoint_keep_attention",
)


@dataclass(slots=True)
class Choices:
    """Nothing is chosen yet where a value is None."""

    tuned: JsonObject | None = None  # the options that compile_autotune has found to be the fastest
    compiled_from: int | None = None  # the first step with blocks that were compiled beside the run
    stays_eager: int | None = None  # steps of a training beside which compiling did not pay or failed

    @classmethod
    def read(cls, facts: JsonMapping) -> "Choices":
        """Those of a state; none of one that was saved before there were any, nor what cannot be a choice."""
        known = facts.get("choices")
        if not isinstance(known, dict):
            return cls()
        tuned = known.get("tuned")
        steps = {name: known.get(name) for name in ("compiled_from", "stays_eager")}
        return cls(
            tuned=tuned if isinstance(tuned, dict) and set(tuned) <= set(TUNABLE) else None,
            **{name: step if isinstance(step, int) and step > 0 else None for name, step in steps.items()},
        )
