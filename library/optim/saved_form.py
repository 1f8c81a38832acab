"""Whether saved values have the form of those that they replace, so that an optimizer can continue with them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from library.config.json_types import JsonMapping

Sizes = Mapping[str, tuple[int, ...]]
MAX_NUMBER = 2**53  # of numbers: larger ones are no counts, and floats do not hold them


def is_plain_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def wrong_form(now: Any, saved: Any, place: str = "") -> str:
    """Return the place of the first saved value of another form than the one that it replaces, "" if there is none.

    Numbers are finite, lists as long, and dictionaries hold values of the same forms under the same names; a missing
    name stays as it is. None fits everything.
    """
    if now is None or saved is None:
        return ""
    if isinstance(now, Mapping):
        if not isinstance(saved, Mapping):
            return place or "a value"
        inner = (wrong_form(now[name], saved[name], f"{place}.{name}".lstrip(".")) for name in now if name in saved)
    elif isinstance(now, list | tuple):
        if not isinstance(saved, list | tuple) or len(saved) != len(now):
            return place or "a list"
        inner = (wrong_form(value, other, place) for value, other in zip(now, saved, strict=True))
    elif isinstance(now, bool | str):
        return "" if isinstance(saved, type(now)) else place or "a value"
    elif isinstance(now, int | float | Tensor):
        return "" if _is_finite(saved) or (is_plain_number(saved) and not _is_finite(now)) else place or "a value"
    else:
        return ""
    return next(filter(None, inner), "")


def _is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and bool(torch.isfinite(value).all())
    return is_plain_number(value) and abs(value) < MAX_NUMBER


def wrong_moment(
    stepped: Iterable[tuple[Tensor, Mapping[str, Any]]], kept: Mapping[str, tuple[int, ...]], sizes: Sizes
) -> str:
    """Return the name of a tensor that an optimizer lacks for a weight or that has another size, "" if there is none.

    `stepped` are weights with what the optimizer has taken over for each, `kept` what it keeps for weights of these
    `sizes`, as `library.optim.trial.optimizer_state_shapes` returns it.
    """
    by_name = {
        name: [kept[f"{kind}.{name}"] == size for kind, size in sizes.items() if f"{kind}.{name}" in kept]
        for name in dict.fromkeys(key.partition(".")[2] for key in kept)
    }
    for weight, state in stepped:
        for name, follows in by_name.items():
            value = state.get(name)
            if state and not isinstance(value, Tensor) and len(follows) == len(sizes):
                return name
            if isinstance(value, Tensor) and all(follows) and value.shape != weight.shape:
                return name
    return ""


def stepped_weights(optimizer: Any) -> Iterator[tuple[Tensor, JsonMapping]]:
    """Yield each weight with what the optimizer keeps for it."""
    for bundle in getattr(optimizer, "bundles", ()):
        states = bundle.optimizer.state
        yield from ((p, states.get(own, {})) for (_, p), own in zip(bundle.weights, bundle.master_params, strict=True))
    if not hasattr(optimizer, "bundles"):
        states = getattr(optimizer, "state", {})
        yield from ((p, states.get(p, {})) for group in optimizer.param_groups for p in group["params"])
