"""Load the classes that `optimizer_type` and `lr_scheduler_type` name, and read their arguments."""

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

# What belongs to one weight alone, and steps it in the type that it is given: besides these, all of three packages.
ALONE = ("came", "adammini", "muon")


def chosen_optimizer(config: RunConfig) -> OptimizerSpec:
    """The package and class of a config's optimizer."""
    return spec_named(config.optim.optimizer)


def optimizer_arguments(config: RunConfig, given: JsonMapping | None = None) -> JsonObject:
    """optimizer_args, or what was `given` instead, over the defaults of the table. Raises ConfigError naming every
    argument that cannot be read."""
    if given is None:
        given = read_arguments(config.optim.optimizer_args, "optimizer_args")
    own = {**chosen_optimizer(config).defaults, **given}
    if chosen_optimizer(config) is SPECS["adafactor"]:
        own.setdefault("relative_step", True)
        if own.get("warmup_init"):
            own["relative_step"] = True
    return own


def relative_step(config: RunConfig) -> bool:
    """Whether Adafactor finds the learning rate itself, which is its default."""
    return chosen_optimizer(config) is SPECS["adafactor"] and bool(optimizer_arguments(config).get("relative_step"))


def is_schedule_free(config: RunConfig) -> bool:
    """Whether the optimizer keeps an average that must be swapped in for samples and saving."""
    cls = chosen_optimizer(config)
    if cls is SPECS["prodigyplusschedulefree"]:
        return bool(optimizer_arguments(config).get("use_schedulefree", True))
    return "ScheduleFree" in cls.name


def steps_alone(config: RunConfig) -> bool:
    """Whether all of the optimizer's state belongs to single weights, and it steps in the dtype of its parameters.

    Not the 8-bit and paged ones of bitsandbytes, nor those that adapt the learning rate, which read all weights.
    """
    cls = chosen_optimizer(config)
    if cls in [SPECS[name] for name in ALONE]:
        return True
    return cls.module in ("torch.optim", "lion_pytorch", "transformers.optimization") and cls.name != "LBFGS"


def steps_rows(config: RunConfig) -> bool:
    """Whether the optimizer is elementwise, so that rows of a weight can be stepped separately.

    Not the 8-bit ones: the blocks by which they scale their states differ between a row and the whole weight.
    """
    cls = chosen_optimizer(config)
    others = ("LBFGS", "Adafactor", "Muon", "SparseAdam")
    return cls.module in ("torch.optim", "lion_pytorch", FREE) and cls.name not in others


# ---- classes and arguments by name


def read_arguments(pairs: Iterable[str], option: str) -> JsonObject:
    """["weight_decay=0.1", "betas=0.9,0.99"] -> Python values. Raises ConfigError naming all that cannot be read."""
    arguments, wrong = dict[str, Any](), list[Problem]()
    for pair in pairs:
        key, equal, text = pair.partition("=")
        try:
            if not equal or not key.strip().isidentifier():
                raise ValueError(pair)
            arguments[key.strip()] = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two for thousands of signs
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
    """What to install if the module's package is missing, "" if it is there."""
    package = module.split(".")[0]
    return "" if packages.is_installed(package) else packages.not_installed(package)


def load_subclass(cls: OptimizerSpec, base: type) -> type:
    """Import a class that derives from `base`. Raises ConfigError as `import_class` does, and for anything else."""
    made = import_class(cls)
    if not isinstance(made, type) or not issubclass(made, base) or made is base:  # which cannot take a step itself
        raise ConfigError(
            "{module}.{name} is no subclass of {base}", module=cls.module, name=cls.name, base=base.__name__
        )
    return made


def import_class(cls: OptimizerSpec) -> type:
    """Import a class. Raises ConfigError when the module has none of that name, or cannot be imported here."""
    if optimizer_class := getattr(sys.modules.get(cls.module), cls.name, None):  # each bundle loads it again
        return optimizer_class
    try:
        with _without_warnings(cls.module), without_collecting(), without_optional(cls.module):
            module = importlib.import_module(cls.module)
    except Exception as e:  # a package that does not fit this machine may raise anything
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
    """A sentence for each argument that a function does not take."""
    function = package_class(function)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    # Classes of pytorch_optimizer accept any argument and ignore unknown ones.
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
    """The package's class behind one of our subclasses (sorted_groups); any other class unchanged."""
    return cls.__mro__[1] if getattr(cls, "__module__", "") == "library.optim.sorted_groups" else cls
