"""The speedup by compiling, measured on whole steps of one run."""

from dataclasses import dataclass, field

from library.config.json_types import JsonObject


# Without eager steps of the same run there is nothing to compare with, so no speedup is claimed.
# Why: docs/decisions/2026-11-20-speedup-is-measured.md
@dataclass
class Speedup:
    """Compares eager steps at the start of a run with the compiled steps after them.

    Without eager steps (`compile_compare_steps`) nothing is reported. Steps that compile, and steps after a pause, are
    not counted.
    """

    eager_steps_left: int = 0  # before compiling begins
    eager: list[float] = field(default_factory=list)  # seconds of each eager step
    compiled: int = 0  # number of timed compiled steps
    gained: float = 0.0  # seconds that these saved in total
    break_even_step: int | None = None  # first step at which compiling has paid for itself

    @property
    def eager_step(self) -> float:
        """Mean seconds of an eager step."""
        return sum(self.eager) / len(self.eager) if self.eager else 0.0

    @property
    def compiled_step(self) -> float:
        """Mean seconds of a compiled step."""
        return self.eager_step - self.gained / self.compiled if self.compiled else 0.0

    def note_step(self, step: int, seconds: float | None, spent: float) -> None:
        """Record a finished step, `seconds` None if it compiled; compiling has taken `spent` seconds so far."""
        if self.eager_steps_left:
            self.eager += [] if seconds is None else [seconds]
            self.eager_steps_left -= 1
        elif self.eager and seconds is not None:
            self.compiled += 1
            self.gained += self.eager_step - seconds
        if self.gained <= spent:
            self.break_even_step = None
        elif self.break_even_step is None:
            self.break_even_step = step

    def facts(self, spent: float) -> JsonObject:
        """Return the measurements for the run's record; empty if nothing was measured."""
        if not self.compiled:
            return {}
        return {
            "eager_s_it": round(self.eager_step, 4),
            "compiled_s_it": round(self.compiled_step, 4),
            "saved_seconds": round(self.gained - spent, 2),
            "paid_step": self.break_even_step,
        }

    def sentence(self, spent: float) -> str:
        """Return the measurements as a sentence."""
        if not self.compiled:
            return ""
        saved = self.gained - spent
        paces = f"{self.compiled_step:.3g} s a step instead of {self.eager_step:.3g} s, "
        paces += f"timed over {self.compiled} and {len(self.eager)} steps"
        if self.break_even_step is None:
            return f"Compiling has cost {-saved:.1f} s more than it saved so far ({paces})."
        return (
            f"Compiling saved {saved:.1f} s in total ({paces}); its time was recovered at step {self.break_even_step}."
        )
