"""Which of inductor's kernels keep a whole row in registers.

A kernel that reduces a row, such as a norm or the rounding to 8 bits, reads the row again to apply the result, unless
it keeps the row in registers. Inductor does that only up to 1,024 values, and up to 64 if it is unsure about the order
in memory, as in norms of a head's channels; otherwise it writes interim results.
"""

from typing import Any

LONGEST_ROW = 4096  # values; of 10,240 it was slower: too few rows fit into a multiprocessor


# Why: docs/decisions/2026-11-29-rows-in-registers.md
def make_row_choices() -> Any:
    """Return inductor's heuristics, except for rows that are kept in registers."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint

    class RowChoices(InductorChoices):
        def uuid(self) -> str:
            """Return a key that separates graphs compiled with other heuristics."""
            return f"rows of {LONGEST_ROW}"

        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            if InductorChoices.should_use_persistent_reduction(features, cooperative_reduction):
                return True
            across_rows = features.get_reduction_hint() in (ReductionHint.OUTER, ReductionHint.OUTER_TINY)
            length = features.reduction_numel  # an expression where sizes vary
            return not cooperative_reduction and not across_rows and bool(length.is_number and length <= LONGEST_ROW)

    return RowChoices()
