"""Test whether an optimizer's package works here: import it, and step a small weight on the training's device.

    python -m library.optim.trial MODULE...

tries packages for who cannot load them, and prints a JSON object: by module what went wrong, '' if nothing did.
"""

import contextlib
import importlib
import io
import json
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from library import packages
from library.optim.classes import import_class
from library.optim.names import SPECS, OptimizerSpec

SIZE = (64, 128)  # large enough for 8-bit kernels, which leave small tensors to others


def package(module: str) -> str:
    """Why a package does not work, '' if it does; cached."""
    cls = next((spec for spec in SPECS.values() if spec.package == module), None)
    error = optimizer(cls) if cls else _loaded(module)
    packages.remember(module, error)
    return error


def optimizer(cls: OptimizerSpec) -> str:
    """Why no weight can be stepped by an optimizer, '' if it can."""
    try:
        with _quiet():
            weight = torch.nn.Parameter(torch.ones(SIZE, device=device()))
            made = import_class(cls)([{"params": [weight], "name": "trial"}], lr=1.0, **cls.always, **cls.defaults)
            if callable(switch := getattr(made, "train", None)):
                switch()
            weight.grad = torch.full_like(weight, 0.5)
            made.step()
            moved = float(weight.detach().sum())  # on a GPU, this is where a kernel that is missing is noticed
    except Exception as error:  # whatever a package raises: OSError for a library, RuntimeError for a device, ...
        return short_reason(error)
    return "" if moved == moved else "its first step ends in NaN"


def arguments(cls: OptimizerSpec, own: Mapping[str, Any]) -> str:
    """Why an optimizer does not take these values of its arguments, '' if it does."""
    rate = None if own.get("relative_step") else 1.0
    try:
        with _quiet():
            group = {"params": [torch.nn.Parameter(torch.ones(2, 2))], "name": "trial"}
            import_class(cls)([group], lr=rate, **{**cls.always, **own})
    except (ValueError, TypeError, AssertionError) as error:
        return short_reason(error)
    return ""


def memory(cls: OptimizerSpec, own: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that an optimizer keeps of a matrix and of a vector with these arguments, as name -> shape; {} where
    no step can be taken."""
    rate = None if own.get("relative_step") else 1e-3
    weights = {"matrix": torch.ones(SIZE, device=device()), "vector": torch.ones(SIZE[0], device=device())}
    learned = {name: torch.nn.Parameter(weight) for name, weight in weights.items()}
    try:
        with _quiet():
            made = import_class(cls)(
                [{"params": [*learned.values()], "name": "trial"}], lr=rate, **{**cls.always, **own}
            )
            if callable(switch := getattr(made, "train", None)):
                switch()
            for weight in learned.values():
                weight.grad = torch.full_like(weight, 0.5)
            made.step()
    except Exception:  # said elsewhere: this asks only what is kept
        return {}
    return {
        f"{name}.{key}": tuple(value.shape)
        for name, weight in learned.items()
        for key, value in made.state[weight].items()
        if isinstance(value, torch.Tensor)
    }


def device() -> str:
    """Where a training of this process steps."""
    if not torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true"):
        return "cpu"
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def short_reason(error: BaseException) -> str:
    """An error in one line; where we have put it in words, that of the package."""
    error = error.__cause__ or error
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()[:200].rstrip(':. ')}" if lines else type(error).__name__


def _loaded(module: str) -> str:
    try:
        with _quiet():
            importlib.import_module(module)
    except Exception as error:
        return short_reason(error)
    return ""


@contextlib.contextmanager
def _quiet() -> Any:
    """Suppress what packages print while they are imported."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


if __name__ == "__main__":
    print(json.dumps({module: package(module) for module in sys.argv[1:]}))
