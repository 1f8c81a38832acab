"""Test whether an optimizer's package works here: import it, and step a small weight on the training's device.

    python -m library.optim.trial MODULE...

tries packages for callers that cannot load them, and prints a JSON object: the error by module, "" if it works.
"""

import contextlib
import importlib
import io
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from library import packages
from library.config.environment import cpu_requested
from library.optim.classes import import_class
from library.optim.names import SPECS, OptimizerSpec
from library.optim.streams import on_default_stream

SIZE = (64, 128)  # of the weight; bitsandbytes keeps states of fewer than 4096 elements in 32 bits
# Of weights with which an optimizer is tried; of one that is zero, some keep less.
WEIGHT_SIZES = {"matrix": SIZE, "vector": SIZE[:1], "zeros": SIZE}
OF_DEVICES = {"capturable", "fused", "foreach"}  # arguments that only some devices support
TRIED_STEPS = 3  # optimizer steps to try, as the first does not use its state
MAX_SCHEDULE_STEPS = 5000  # steps to try one by one, about 0.1 s
ALLOWED_UNDERSHOOT = 1e-9  # tolerated negative end of a rate that falls to zero, relative to its start


class PackageExitError(Exception):
    """A package would have ended the program. The text is the reason that it printed."""


def package(module: str) -> str:
    """Return why a package does not work, "" if it does; cached."""
    spec = next((spec for spec in SPECS.values() if spec.package == module), None)
    error = try_optimizer(spec) if spec else _try_import(module)
    packages.remember(module, error)
    return error


def try_optimizer(spec: OptimizerSpec) -> str:
    """Return why an optimizer cannot step any weight, "" if it can."""
    try:
        with _quiet(), on_default_stream():
            weight = torch.nn.Parameter(torch.ones(SIZE, device=trial_device()))
            optimizer = import_class(spec)(
                [{"params": [weight], "name": "trial"}], lr=1.0, **spec.always, **spec.defaults
            )
            if callable(switch := getattr(optimizer, "train", None)):
                switch()
            weight.grad = torch.full_like(weight, 0.5)
            optimizer.step()
            total = float(weight.detach().sum())  # on a GPU, a missing kernel raises here
    except Exception as error:  # packages raise anything: OSError for a library, RuntimeError for a device, ...
        return short_reason(error)
    return "its first step ends in NaN" if math.isnan(total) else ""


def try_arguments(spec: OptimizerSpec, arguments: Mapping[str, Any]) -> str:
    """Return why an optimizer rejects these arguments or cannot step with them, "" if it can."""
    try:
        with _quiet(), on_default_stream():
            # Muon takes matrices only; others are tried with a vector as well, such as a bias.
            sizes = [SIZE] if spec.module == "torch.optim" and spec.name == "Muon" else [SIZE, SIZE[:1]]
            # Open a GPU only if it matters, as it may be busy with another training.
            on_device = spec.package in packages.PACKAGE_NAMES or not OF_DEVICES.isdisjoint(arguments)
            device = trial_device() if on_device else "cpu"
            weights = [torch.nn.Parameter(torch.ones(size, device=device)) for size in sizes]
            optimizer = _construct_for_trial(spec, arguments, [{"params": weights, "name": "trial"}], 1e-3)
            for _ in range(TRIED_STEPS):
                for weight in weights:
                    weight.grad = torch.full_like(weight, 0.5)
                optimizer.step()
            is_finite = all(bool(weight.isfinite().all()) for weight in weights)
    except Exception as error:
        return short_reason(error)
    return "" if is_finite else "its first steps end in NaN"


def try_schedule(
    spec: OptimizerSpec,
    arguments: Mapping[str, Any],
    rates: Sequence[float],
    make: Callable[[torch.optim.Optimizer], LRScheduler],
    total: int,
) -> str:
    """Return why a schedule cannot be made for an optimizer or fails within `total` steps, "" if it works. Steps one
    weight per rate; of a long training only the first steps and the last.
    """
    weights = [torch.nn.Parameter(torch.ones(2, 2)) for _ in rates]
    groups = [{"params": [w], "lr": rate} for w, rate in zip(weights, rates, strict=True)]
    try:
        with _quiet():
            optimizer = _construct_for_trial(spec, arguments, groups, rates[0])
    except Exception:  # reported for the optimizer
        optimizer = torch.optim.SGD(groups, lr=rates[0], momentum=0.9)
    try:
        with _quiet():
            schedule = make(optimizer)
            for step in range(1, min(total, MAX_SCHEDULE_STEPS) + 1):
                schedule.step()
                for group in optimizer.param_groups:
                    if not -max(rates) * ALLOWED_UNDERSHOOT <= float(group["lr"]) < math.inf:
                        return f"its learning rate is {float(group['lr']):g} at step {step}"
            if total > MAX_SCHEDULE_STEPS:  # jump to the last step
                schedule.last_epoch = total - 1
                schedule.step()
    except Exception as error:  # as above
        return short_reason(error)
    return ""


def _construct_for_trial(
    spec: OptimizerSpec, arguments: Mapping[str, Any], groups: list[dict[str, Any]], rate: float
) -> Any:
    """Return an optimizer that is ready to step. Adafactor with relative_step sets its own rate and rejects another."""
    learning_rate = None if arguments.get("relative_step") else rate
    if learning_rate is None:
        groups = [{name: value for name, value in group.items() if name != "lr"} for group in groups]
    optimizer = import_class(spec)(groups, lr=learning_rate, **{**spec.always, **arguments})
    if callable(switch := getattr(optimizer, "train", None)):
        switch()
    return optimizer


def optimizer_state_shapes(spec: OptimizerSpec, arguments: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors that an optimizer keeps for each of WEIGHT_SIZES, as its name and theirs -> shape; {} if no
    step is possible.
    """
    parameters = {
        name: torch.nn.Parameter(torch.full(size, float(name != "zeros"), device=trial_device()))
        for name, size in WEIGHT_SIZES.items()
    }
    try:
        with _quiet(), on_default_stream():
            optimizer = _construct_for_trial(
                spec, arguments, [{"params": [*parameters.values()], "name": "trial"}], 1e-3
            )
            for weight in parameters.values():
                weight.grad = torch.full_like(weight, 0.5)
            optimizer.step()
    except Exception:  # reported elsewhere; here only the state matters
        return {}
    return {
        f"{name}.{key}": tuple(value.shape)
        for name, weight in parameters.items()
        for key, value in optimizer.state[weight].items()
        if isinstance(value, torch.Tensor)
    }


def trial_device() -> str:
    """Return the device on which a training of this process steps."""
    if cpu_requested() or not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def short_reason(error: BaseException) -> str:
    """Return an error in one line: the package's own, if ours was raised from it."""
    error = error.__cause__ or error
    if isinstance(error, PackageExitError):
        return str(error)
    text = error.args[0] if isinstance(error, KeyError) and error.args else error  # str() of a KeyError quotes its text
    lines = str(text).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()[:200].rstrip(':. ')}" if lines else type(error).__name__


def _try_import(module: str) -> str:
    try:
        with _quiet():
            importlib.import_module(module)
    except Exception as error:
        return short_reason(error)
    return ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what packages print while they are imported.

    Raises PackageExitError if one calls exit(), as Lion does if use_triton finds no Triton; its text is the last line
    that the package printed.
    """
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("ignore")
        try:
            yield
        except SystemExit as error:
            printed_lines = [*printed.getvalue().split("\n"), error.code if isinstance(error.code, str) else ""]
            lines = [line.strip() for line in printed_lines if line.strip()]
            raise PackageExitError(lines[-1][:200] if lines else "it ends the program without a reason") from None


if __name__ == "__main__":
    print(json.dumps({module: package(module) for module in sys.argv[1:]}))
