"""Check that a state's contents have the form that this trainer saves, which a checksum cannot."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from library.config.environment import lacks_memory
from library.config.json_types import JsonMapping
from library.config.problems import ConfigError, Problem
from library.optim.saved_form import MAX_NUMBER, is_plain_number

UNFIT = (
    ": {path} cannot be resumed, as it holds {what} in another form than this trainer saves; "
    "choose another -state folder"
)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_NUMBER


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**64


def _is_setting(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(item is None or isinstance(item, bool | int | float | str) for item in values)


def _are_arguments(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _dictionary(
    of: Mapping[str, Callable[[Any], bool]], other: Callable[[Any], bool] = lambda value: True
) -> Callable[[Any], bool]:
    """Return a test for a dictionary whose values of these names pass their tests, and all others pass `other`."""
    return lambda value: isinstance(value, dict) and all(of.get(name, other)(item) for name, item in value.items())


def _are_groups(value: Any) -> bool:
    """Return whether it is a result of `library.optim.resuming.describe_groups`."""
    if value is None:
        return True
    kinds, groups = (value.get(name) if isinstance(value, dict) else None for name in ("kinds", "groups"))
    if not isinstance(kinds, list) or not isinstance(groups, list):
        return False
    return all(isinstance(kind, dict) for kind in kinds) and all(_is_count(at) and at < len(kinds) for at in groups)


# The facts of train_state.json that a resume reads -> whether a value is one of them.
FACTS: Mapping[str, Callable[[Any], bool]] = {
    "current_step": _is_count,
    "current_epoch": _is_count,
    "seed": _is_seed,
    "losses": lambda value: isinstance(value, list) and all(map(is_plain_number, value)),
    "batches": _dictionary({"epoch": _is_count, "index": _is_count, "seed": _is_seed}),
    "settings": _dictionary({"optimizer_args": _are_arguments, "network_args": _are_arguments}, _is_setting),
    "computed_by": _dictionary({}, _is_setting),
    "groups": _are_groups,
    "alphas": _dictionary({}, lambda value: is_plain_number(value) and math.isfinite(value)),
    "early_stop": _dictionary(
        {
            "best_loss": lambda value: value is None or is_plain_number(value),
            **dict.fromkeys(("best_step", "waited", "last_step"), _is_count),
        }
    ),
}
# Facts that every version of this trainer has written, and entries of others that a resume needs.
NEEDED = {"current_step", "current_epoch", "seed", "losses", "batches"}
NEEDED_INSIDE = {"batches": ("epoch", "index", "seed"), "early_stop": ("best_loss", "best_step", "waited", "last_step")}


def wrong_facts(facts: JsonMapping) -> list[str]:
    """Return the names of the facts that are missing or of another form than this trainer writes."""
    wrong = [name for name in FACTS if name in facts and not FACTS[name](facts[name])]
    wrong += sorted(NEEDED - facts.keys())
    present = {name: facts[name] for name in NEEDED_INSIDE if name in facts and name not in wrong}
    return wrong + [name for name, value in present.items() if not {*NEEDED_INSIDE[name]} <= value.keys()]


def state_refusal(path: Path, what: str) -> ConfigError:
    return ConfigError(Problem("resume", UNFIT, path=path, what=what))


@contextlib.contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Turn any error of restoring a state file's contents into one ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError) as e:
        if lacks_memory(e):
            raise
        raise state_refusal(path, "a value") from e
