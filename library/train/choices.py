"""What `optimizer_type`, `lr_scheduler_type` and their arguments name: classes of other packages."""

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from library.config.schema import ConfigError
from library.config.values import meant, shown


@dataclass(frozen=True)
class Maker:
    """Where an optimizer comes from."""

    module: str
    name: str
    pip: str = ""
    always: dict[str, Any] = field(default_factory=dict)  # arguments the name stands for
    defaults: dict[str, Any] = field(default_factory=dict)  # arguments optimizer_args may change


BNB, FREE, DADAPT = "bitsandbytes", "schedulefree", "dadaptation"
NESTEROV = {"always": {"nesterov": True}, "defaults": {"momentum": 0.9}}
# Names are read without regard to case, as sd-scripts does.
MAKERS = {
    "adamw": Maker("torch.optim", "AdamW"),
    "sgdnesterov": Maker("torch.optim", "SGD", **NESTEROV),
    "adamw8bit": Maker("bitsandbytes.optim", "AdamW8bit", BNB),
    "pagedadamw": Maker("bitsandbytes.optim", "PagedAdamW", BNB),
    "pagedadamw8bit": Maker("bitsandbytes.optim", "PagedAdamW8bit", BNB),
    "pagedadamw32bit": Maker("bitsandbytes.optim", "PagedAdamW32bit", BNB),
    "lion8bit": Maker("bitsandbytes.optim", "Lion8bit", BNB),
    "pagedlion8bit": Maker("bitsandbytes.optim", "PagedLion8bit", BNB),
    "sgdnesterov8bit": Maker("bitsandbytes.optim", "SGD8bit", BNB, **NESTEROV),
    "lion": Maker("lion_pytorch", "Lion", "lion-pytorch"),
    "prodigy": Maker("prodigyopt", "Prodigy", "prodigyopt"),
    "adafactor": Maker("transformers.optimization", "Adafactor", "transformers"),
    "dadaptation": Maker("dadaptation.experimental", "DAdaptAdamPreprint", DADAPT),
    "dadaptadampreprint": Maker("dadaptation.experimental", "DAdaptAdamPreprint", DADAPT),
    "dadaptadagrad": Maker(DADAPT, "DAdaptAdaGrad", DADAPT),
    "dadaptadam": Maker(DADAPT, "DAdaptAdam", DADAPT),
    "dadaptadan": Maker(DADAPT, "DAdaptAdan", DADAPT),
    "dadaptadanip": Maker("dadaptation.experimental", "DAdaptAdanIP", DADAPT),
    "dadaptlion": Maker(DADAPT, "DAdaptLion", DADAPT),
    "dadaptsgd": Maker(DADAPT, "DAdaptSGD", DADAPT),
    "adamwschedulefree": Maker(FREE, "AdamWScheduleFree", FREE),
    "radamschedulefree": Maker(FREE, "RAdamScheduleFree", FREE),
    "sgdschedulefree": Maker(FREE, "SGDScheduleFree", FREE),
}


def maker(config: Any) -> Maker:
    """The line of the table, or torch.optim.<Name>, or module.Class."""
    name = config.optim.optimizer
    if known := MAKERS.get(name.lower()):
        return known
    module, _, cls = name.rpartition(".")
    return Maker(module or "torch.optim", cls, module.split(".")[0])


def arguments(config: Any) -> dict[str, Any]:
    """optimizer_args read, over the defaults of the table. Raises ConfigError naming all that cannot be read."""
    own = {**maker(config).defaults, **read_arguments(config.optim.optimizer_args, "optimizer_args")}
    if maker(config).name == "Adafactor":
        own.setdefault("relative_step", True)
        if own.get("warmup_init"):
            own["relative_step"] = True
    return own


def relative_step(config: Any) -> bool:
    """Whether Adafactor finds the learning rate itself, which is its default."""
    return maker(config).name == "Adafactor" and bool(arguments(config).get("relative_step"))


def is_schedule_free(config: Any) -> bool:
    """Whether the optimizer keeps an average that must be swapped in for samples and saving."""
    return maker(config).name.endswith("ScheduleFree")


def steps_alone(config: Any) -> bool:
    """Whether the optimizer remembers nothing but what belongs to one weight, and steps in the type that it is given.

    The 8-bit and paged ones of bitsandbytes have kernels of their own; those that find their rate look at all weights.
    """
    cls = maker(config)
    return cls.module in ("torch.optim", "lion_pytorch", "transformers.optimization") and cls.name != "LBFGS"


# ---- classes and arguments by name


def read_arguments(pairs: Iterable[str], option: str) -> dict[str, Any]:
    """["weight_decay=0.1", "betas=0.9,0.99"] -> Python values. Raises ConfigError naming all that cannot be read."""
    found, wrong = {}, []
    for pair in pairs:
        key, equal, text = pair.partition("=")
        try:
            if not equal or not key.strip().isidentifier():
                raise ValueError(pair)
            found[key.strip()] = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            wrong.append(
                f"{option}: {shown(pair)} must be written key=value with a number, True, False, None or a quoted text"
            )
    if wrong:
        raise ConfigError("\n".join(wrong))
    return found


def missing_package(module: str, pip: str) -> str:
    """What to install when the module's package is not there; else nothing."""
    package = module.split(".")[0]
    try:
        there = importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        there = False
    return "" if there else f"needs a package that is not installed: pip install {pip or package}"


def load(cls: Maker) -> type:
    """Import a class. Raises ConfigError when the module has none of that name, or cannot be imported here."""
    try:
        return getattr(importlib.import_module(cls.module), cls.name)
    except AttributeError:
        known = [n for n, v in vars(importlib.import_module(cls.module)).items() if isinstance(v, type)]
        raise ConfigError(f"{cls.module} has no {cls.name}{meant(cls.name, known)}") from None
    except ImportError as e:
        raise ConfigError(f"{cls.module} cannot be loaded: {e}") from e


def unknown_arguments(function: Any, own: Iterable[str], option: str, title: str) -> Iterator[str]:
    """A sentence for each argument that a function does not take."""
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    if any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return
    for name in own:
        if name not in known:
            yield f"{option}: {title} has no argument {name}{meant(name, known)}"
