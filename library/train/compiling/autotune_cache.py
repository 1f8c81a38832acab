"""Results of compile_autotune, stored for the next start of a training with the same fingerprint."""

import contextlib
from typing import TYPE_CHECKING

from library.config.json_types import JsonObject
from library.measuring import stored_results
from library.train.compiling.fingerprint import training_facts

if TYPE_CHECKING:
    from library.train.compiling.autotune import Tuner

SHARES = 20  # resolution of image-size frequencies: twentieths of all batches
VERSION = 4


def fingerprint_training(tuner: "Tuner") -> str:
    """Identify a training by everything that the speed of its steps depends on."""
    kinds = tuner.batches.kinds()  # frequencies are rounded below, so that one image more changes nothing
    facts = {
        "version": VERSION,
        "sizes": sorted([*kind, round(SHARES * number / kinds.total())] for kind, number in kinds.items()),
    }
    return stored_results.digest(training_facts(tuner.config, tuner.world, tuner.compute_loss) | facts)


def read_results(name: str, passes: int) -> list[JsonObject]:
    """Return stored results; empty if there are none, they are damaged, or were measured for a much shorter
    training.
    """
    stored = stored_results.read_result(name)
    with contextlib.suppress(KeyError, TypeError):
        # A short training skips candidates that would pay in a longer one.
        enough = stored["complete"] or passes <= stored["passes"]
        if stored["version"] == VERSION and enough and all(isinstance(r["changes"], dict) for r in stored["results"]):
            return stored["results"]
    return []


def store_results(name: str, results: list[JsonObject], passes: int, complete: bool) -> None:
    """Store the results. If the folder is not writable, the next start measures again."""
    facts = {"version": VERSION, "passes": passes, "complete": complete, "results": results}
    stored_results.store_result(name, facts)
