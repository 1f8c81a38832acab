"""Optimizers by name: their classes, and the nearest alternative if a package does not work.

Imports no package, so that the page can use it. `library.optim.classes` imports the chosen one.
"""

from dataclasses import dataclass, field

from library import packages
from library.config.fixes import other_optimizer
from library.config.json_types import JsonObject
from library.config.problems import Message, MessageLike
from library.config.run_config import RunConfig


@dataclass(frozen=True)
class OptimizerSpec:
    """The location and properties of an optimizer."""

    module: str
    name: str
    needs: str = ""  # the package behind the module, if the module is not part of it
    always: JsonObject = field(default_factory=dict)  # fixed arguments implied by the name
    defaults: JsonObject = field(default_factory=dict)  # arguments that optimizer_args may override
    instead: tuple[str, ...] = ("AdamW",)  # alternatives if the package does not work, nearest first
    finds_rate: bool = False  # adapts the learning rate, so learning_rate is a factor, usually 1
    one_rate: bool = False  # whether that factor must be the same for all weights

    @property
    def package(self) -> str:
        return self.needs or self.module.split(".")[0]


BNB, FREE, DADAPT, EXPERIMENTAL = "bitsandbytes.optim", "schedulefree", "dadaptation", "dadaptation.experimental"
NESTEROV = {"always": {"nesterov": True}, "defaults": {"momentum": 0.9}}
FINDS = {"finds_rate": True, "instead": ("Prodigy", "ProdigyPlusScheduleFree", "DAdaptAdam", "AdamW")}
FINDS_ONE = {**FINDS, "one_rate": True}
# Names are case-insensitive, as in sd-scripts.
SPECS = {
    "adamw": OptimizerSpec("torch.optim", "AdamW"),
    "sgdnesterov": OptimizerSpec("torch.optim", "SGD", **NESTEROV),
    "adamw8bit": OptimizerSpec(BNB, "AdamW8bit"),
    "pagedadamw": OptimizerSpec(BNB, "PagedAdamW"),
    "pagedadamw8bit": OptimizerSpec(BNB, "PagedAdamW8bit"),
    "pagedadamw32bit": OptimizerSpec(BNB, "PagedAdamW32bit"),
    "lion8bit": OptimizerSpec(BNB, "Lion8bit", instead=("Lion", "AdamW")),
    "pagedlion8bit": OptimizerSpec(BNB, "PagedLion8bit", instead=("Lion", "AdamW")),
    "sgdnesterov8bit": OptimizerSpec(BNB, "SGD8bit", **NESTEROV, instead=("SGDNesterov",)),
    "lion": OptimizerSpec("lion_pytorch", "Lion"),
    "prodigy": OptimizerSpec("prodigyopt", "Prodigy", **FINDS_ONE),
    "prodigyplusschedulefree": OptimizerSpec("prodigyplus", "ProdigyPlusScheduleFree", **FINDS),
    "adafactor": OptimizerSpec("transformers.optimization", "Adafactor"),
    "dadaptation": OptimizerSpec(EXPERIMENTAL, "DAdaptAdamPreprint", **FINDS_ONE),
    "dadaptadampreprint": OptimizerSpec(EXPERIMENTAL, "DAdaptAdamPreprint", **FINDS_ONE),
    "dadaptadagrad": OptimizerSpec(DADAPT, "DAdaptAdaGrad", **FINDS_ONE),
    "dadaptadam": OptimizerSpec(DADAPT, "DAdaptAdam", **FINDS_ONE),
    "dadaptadan": OptimizerSpec(DADAPT, "DAdaptAdan", **FINDS),
    "dadaptadanip": OptimizerSpec(EXPERIMENTAL, "DAdaptAdanIP", **FINDS),
    "dadaptlion": OptimizerSpec(DADAPT, "DAdaptLion", **FINDS_ONE),
    "dadaptsgd": OptimizerSpec(DADAPT, "DAdaptSGD", **FINDS_ONE),
    "adamwschedulefree": OptimizerSpec(FREE, "AdamWScheduleFree"),
    "radamschedulefree": OptimizerSpec(FREE, "RAdamScheduleFree", instead=("RAdam",)),
    "sgdschedulefree": OptimizerSpec(FREE, "SGDScheduleFree", instead=("SGDNesterov",)),
    "came": OptimizerSpec("pytorch_optimizer", "CAME"),
    "adammini": OptimizerSpec("library.optim.sorted_groups", "AdamMini", "pytorch_optimizer"),
    # By default steps are as long as AdamW's, so that the same learning rates work.
    "muon": OptimizerSpec(
        "library.optim.sorted_groups", "Muon", "pytorch_optimizer", defaults={"use_adjusted_lr": True}
    ),
}


def optimizer_spec(name: str) -> OptimizerSpec:
    """Return the spec of an optimizer: a line of the table, torch.optim.<Name>, or module.Class."""
    module, _, cls = name.rpartition(".")
    spec = SPECS.get(cls.lower())
    if spec and (not module or spec.package == module.split(".")[0]):
        return spec
    return OptimizerSpec(module or "torch.optim", cls)


def package_problem(name: str) -> MessageLike:
    """Return why an optimizer's package cannot be used, without importing it; "" if it can."""
    return packages.obstacle(optimizer_spec(name).package) or ""


def working_optimizer(name: str) -> str:
    """Return the nearest optimizer whose package works."""
    spec = optimizer_spec(name)
    alternatives = (other for other in spec.instead if optimizer_spec(other).package != spec.package)
    return next((other for other in alternatives if not package_problem(other)), "AdamW")


def advice(config: RunConfig) -> tuple[Message, JsonObject]:
    """Return what to set if an optimizer's package does not work: in words, and as option values."""
    name = config.optim.optimizer
    other = working_optimizer(name)
    if not optimizer_spec(name).finds_rate or optimizer_spec(other).finds_rate:
        return Message("set optimizer_type = {other}", other=other), other_optimizer(config, other)
    rate = config.usual_rate
    advice = Message("set optimizer_type = {other} and learning_rate = {rate}", other=other, rate=rate)
    return advice, other_optimizer(config, other, float(rate))
