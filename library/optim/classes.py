"""Load the classes named by `optimizer_type` and `lr_scheduler_type`, and parse their arguments."""

import ast
import contextlib
import importlib
import inspect
import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from library import packages
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, MessageLike, Problem
from library.config.run_config import RunConfig
from library.config.values import did_you_mean, quoted
from library.imports import without_collecting, without_optional
from library.optim.names import FREE, SPECS, OptimizerSpec
from library.optim.names import optimizer_spec as spec_named

# Optimizers with independent state per weight that step in its dtype, in addition to all of three packages.
ALONE = ("came", "adammini", "muon")


def chosen_optimizer(config: RunConfig) -> OptimizerSpec:
    return spec_named(config.optim.optimizer)


def optimizer_arguments(config: RunConfig, given: JsonMapping | None = None) -> JsonObject:
    """Return optimizer_args, or `given` instead, over the defaults of the table. Raises ConfigError naming every
    unreadable argument.
    """
    if given is None:
        given = read_arguments(config.optim.optimizer_args, "optimizer_args")
    own = {**chosen_optimizer(config).defaults, **given}
    if chosen_optimizer(config) is SPECS["adafactor"]:
        own.setdefault("relative_step", True)
        if own.get("warmup_init"):
            own["relative_step"] = True
    return own


def relative_step(config: RunConfig) -> bool:
    return chosen_optimizer(config) is SPECS["adafactor"] and bool(optimizer_arguments(config).get("relative_step"))


def is_schedule_free(config: RunConfig) -> bool:
    """Whether the optimizer keeps an average that must be swapped in for samples and saving."""
    cls = chosen_optimizer(config)
    if cls is SPECS["prodigyplusschedulefree"]:
        return bool(optimizer_arguments(config).get("use_schedulefree", True))
    return "ScheduleFree" in cls.name


def steps_alone(config: RunConfig) -> bool:
    """Return whether all optimizer state belongs to single weights, and steps keep the dtype of the parameters."""
    # Excluded are bitsandbytes' 8-bit and paged optimizers, and those that adapt the learning rate from all weights.
    cls = chosen_optimizer(config)
    if cls in [SPECS[name] for name in ALONE]:
        return True
    return cls.module in ("torch.optim", "lion_pytorch", "transformers.optimization") and cls.name != "LBFGS"


def steps_rows(config: RunConfig) -> bool:
    """Return whether the optimizer is elementwise, so that rows of a weight can be stepped separately."""
    # 8-bit optimizers scale states by blocks, which differ between a row and the whole weight.
    cls = chosen_optimizer(config)
    others = ("LBFGS", "Adafactor", "Muon", "SparseAdam")
    return cls.module in ("torch.optim", "lion_pytorch", FREE) and cls.name not in others


# ---- classes and arguments by name


def read_arguments(pairs: Iterable[str], option: str) -> JsonObject:
    """Parse ["weight_decay=0.1", "betas=0.9,0.99"] into Python values. Raises ConfigError naming all that are
    unreadable.
    """
    arguments, wrong = dict[str, Any](), list[Problem]()
    for pair in pairs:
        key, equal, text = pair.partition("=")
        try:
            if not equal or not key.strip().isidentifier():
                raise ValueError(pair)
            arguments[key.strip()] = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two for thousands of characters
            wrong.append(
                Problem(
                    option,
                    ": {pair} must be written key=value with a number, True, False, None or a quoted text",
                    pair=quoted(pair),
                )
            )
    if wrong:
        raise ConfigError(*wrong)
    return arguments


def missing_package(module: str) -> MessageLike:
    """Return what to install if the module's package is missing, "" if it is there."""
    package = module.split(".")[0]
    return "" if packages.is_installed(package) else packages.not_installed(package)


def load_subclass(cls: OptimizerSpec, base: type) -> type:
    """Import a class that derives from `base`. Raises ConfigError like `import_class`, and for anything else."""
    made = import_class(cls)
    if not isinstance(made, type) or not issubclass(made, base) or made is base:  # the base itself cannot step
        raise ConfigError(
            "{module}.{name} is no subclass of {base}", module=cls.module, name=cls.name, base=base.__name__
        )
    return made


def import_class(cls: OptimizerSpec) -> type:
    """Import a class. Raises ConfigError if the module lacks it, or cannot be imported here."""
    if optimizer_class := getattr(
        sys.modules.get(cls.module), cls.name, None
    ):  # reuse it, as every bundle loads the class
        return optimizer_class
    try:
        with _without_warnings(cls.module), without_collecting(), without_optional(cls.module):
            module = importlib.import_module(cls.module)
    except Exception as e:  # a package built for another machine may raise anything
        raise ConfigError("{module} cannot be loaded: {why}", module=cls.module, why=e) from e
    known = {name.lower(): made for name, made in vars(module).items() if isinstance(made, type)}
    if (optimizer_class := getattr(module, cls.name, None) or known.get(cls.name.lower())) is None:
        names = [made.__name__ for made in known.values()]
        raise ConfigError(
            "{module} has no {name}{hint}", module=cls.module, name=cls.name, hint=did_you_mean(cls.name, names)
        )
    return optimizer_class


@contextlib.contextmanager
def _without_warnings(module: str) -> Iterator[None]:
    """Suppress warnings of packages while they are imported, such as about missing kernels for inference."""
    log = logging.getLogger(module.split(".")[0])
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def unknown_arguments(function: Any, own: Iterable[str], option: str, title: str) -> Iterator[Problem]:
    """Return a sentence for each argument that a function does not take."""
    function = package_class(function)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    # Classes of pytorch_optimizer silently ignore unknown arguments.
    passes_on = not getattr(function, "__module__", "").startswith("pytorch_optimizer.")
    if passes_on and any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in own:
        if name not in parameters:
            yield Problem(
                option,
                ": {title} has no argument {name}{hint}",
                title=title,
                name=name,
                hint=did_you_mean(name, parameters),
            )


def package_class(cls: Any) -> Any:
    """Return the package's class behind one of our subclasses (sorted_groups); any other class unchanged."""
    return cls.__mro__[1] if getattr(cls, "__module__", "") == "library.optim.sorted_groups" else cls
