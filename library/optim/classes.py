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
from library.config.problems import ConfigError, MessageLike, Problem, raise_if_any
from library.config.run_config import RunConfig
from library.config.values import did_you_mean, quoted
from library.imports import without_collecting, without_optional
from library.optim.names import BNB, FREE, SPECS, OptimizerSpec, optimizer_spec

# Optimizers with independent state per weight that step in its dtype, in addition to all of three packages.
ALONE = ("came", "adammini", "muon")


def chosen_optimizer(config: RunConfig) -> OptimizerSpec:
    return optimizer_spec(config.optim.optimizer)


def optimizer_arguments(config: RunConfig, arguments: JsonMapping | None = None) -> JsonObject:
    """Return the table's defaults, updated with `arguments` (default: optimizer_args). Raises ConfigError naming every
    unreadable argument.
    """
    if arguments is None:
        arguments = read_arguments(config.optim.optimizer_args, "optimizer_args")
    merged = {**chosen_optimizer(config).defaults, **arguments}
    if chosen_optimizer(config) is SPECS["adafactor"]:
        merged.setdefault("relative_step", True)  # as in sd-scripts
        if merged.get("warmup_init"):  # Adafactor raises for warmup_init without relative_step
            merged["relative_step"] = True
    return merged


def relative_step(config: RunConfig) -> bool:
    return chosen_optimizer(config) is SPECS["adafactor"] and bool(optimizer_arguments(config).get("relative_step"))


def is_schedule_free(config: RunConfig) -> bool:
    """Whether the optimizer keeps an average that must be swapped in for samples and saving."""
    spec = chosen_optimizer(config)
    if spec is SPECS["prodigyplusschedulefree"]:
        return bool(optimizer_arguments(config).get("use_schedulefree", True))
    return "ScheduleFree" in spec.name


def steps_alone(config: RunConfig) -> bool:
    """Return whether all optimizer state belongs to single weights, and steps keep the dtype of the parameters."""
    # Excluded are those that adapt the learning rate from all weights.
    spec = chosen_optimizer(config)
    if spec in [SPECS[name] for name in ALONE]:
        return True
    return spec.module in ("torch.optim", "lion_pytorch", "transformers.optimization", BNB) and spec.name != "LBFGS"


def steps_rows(config: RunConfig) -> bool:
    """Return whether the optimizer is elementwise, so that rows of a weight can be stepped separately."""
    # 8-bit optimizers scale states by blocks, which differ between a row and the whole weight. Those named below depend
    # on a weight's shape, on all weights, or on sparse gradients.
    spec = chosen_optimizer(config)
    not_elementwise = ("LBFGS", "Adafactor", "Muon", "SparseAdam")
    return spec.module in ("torch.optim", "lion_pytorch", FREE) and spec.name not in not_elementwise


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
    raise_if_any(wrong)
    return arguments


def missing_package(module: str) -> MessageLike:
    package = module.split(".")[0]
    return "" if packages.is_installed(package) else packages.not_installed(package)


def load_subclass(spec: OptimizerSpec, base: type) -> type:
    """Import a class. Raises ConfigError like `import_class`, and if the class does not derive from `base`."""
    loaded_class = import_class(spec)
    # The base class itself cannot step.
    if not isinstance(loaded_class, type) or not issubclass(loaded_class, base) or loaded_class is base:
        raise ConfigError(
            "{module}.{name} is not a subclass of {base}", module=spec.module, name=spec.name, base=base.__name__
        )
    return loaded_class


def import_class(spec: OptimizerSpec) -> type:
    """Import a class. Raises ConfigError if the module lacks it, or cannot be imported here."""
    # Every bundle loads the class, so skip the import where the module is loaded.
    if optimizer_class := getattr(sys.modules.get(spec.module), spec.name, None):
        return optimizer_class
    try:
        with _without_warnings(spec.module), without_collecting(), without_optional(spec.module):
            module = importlib.import_module(spec.module)
    except Exception as e:  # a package built for another machine may raise anything
        raise ConfigError("{name} cannot be loaded: {why}", name=spec.module, why=e) from e
    classes = {name.lower(): member for name, member in vars(module).items() if isinstance(member, type)}
    if (optimizer_class := getattr(module, spec.name, None) or classes.get(spec.name.lower())) is None:
        names = [member.__name__ for member in classes.values()]
        if spec.module == "torch.optim":  # where names without a module are looked up, so those of other packages count
            names += [optimizer.name for optimizer in SPECS.values()]
        raise ConfigError(
            "{module} has no {name}{hint}", module=spec.module, name=spec.name, hint=did_you_mean(spec.name, names)
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


def unknown_arguments(function: Any, names: Iterable[str], option: str, title: str) -> Iterator[Problem]:
    """Yield a problem for each argument name that a function does not take."""
    function = package_class(function)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    # Classes of pytorch_optimizer silently ignore unknown arguments.
    passes_on = not getattr(function, "__module__", "").startswith("pytorch_optimizer.")
    if passes_on and any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in names:
        if name not in parameters:
            yield Problem(
                option,
                ": {title} has no argument {name}{hint}",
                title=title,
                name=name,
                hint=did_you_mean(name, parameters),
            )


def package_class(cls: Any) -> Any:
    return cls.__mro__[1] if getattr(cls, "__module__", "") == "library.optim.sorted_groups" else cls
