"""Optimizer and learning rates."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from library.config.fixes import exclusive, other_optimizer
from library.config.problems import Problem, together
from library.config.reading import parse_count, steps_or_share
from library.config.run_config import RunConfig
from library.config.schema import opt

OptimizerName = Literal[
    "AdamW",
    "AdamW8bit",
    "PagedAdamW",
    "PagedAdamW8bit",
    "PagedAdamW32bit",
    "Lion",
    "Lion8bit",
    "PagedLion8bit",
    "SGDNesterov",
    "SGDNesterov8bit",
    "Adafactor",
    "CAME",
    "AdamMini",
    "Muon",
    "Prodigy",
    "ProdigyPlusScheduleFree",
    "DAdaptation",
    "DAdaptAdamPreprint",
    "DAdaptAdaGrad",
    "DAdaptAdam",
    "DAdaptAdan",
    "DAdaptAdanIP",
    "DAdaptLion",
    "DAdaptSGD",
    "AdamWScheduleFree",
    "RAdamScheduleFree",
    "SGDScheduleFree",
]
SchedulerName = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
    "piecewise_constant",
    "adafactor",
]
WARMS_UP = ("adamwschedulefree", "sgdschedulefree")  # schedule-free optimizers with an argument warmup_steps
# Options that step weights within the backward pass, as soon as their gradients are complete.
EARLY = ("fused_backward_pass", "fused_optimizer_groups", "blockwise_fused_optimizers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Optim:
    """Learning rates and the optimizer."""

    learning_rate: float = opt(
        2e-6,
        "1e-4 to 5e-4 for LoRA, 1e-5 for a full model, 1 for Prodigy. Lower it if images distort.",
        min=0.0,
        usual=None,  # differs by kind of training
    )
    optimizer_type: OptimizerName | str = opt(
        "",
        "AdamW8bit saves memory, Prodigy sets its rate. Or module.Class. Empty: AdamW.",
        label="Optimizer",
        kind="code",
    )
    optimizer_args: tuple[str, ...] = opt(
        (), "Arguments of the optimizer, as key=value (weight_decay=0.1 betas=0.9,0.99).", label="Optimizer arguments"
    )
    lr_scheduler: SchedulerName | str = opt(
        "constant", "How the learning rate changes. cosine suits most; constant is simplest.", label="Scheduler"
    )
    lr_warmup_steps: int | float = opt(
        0,
        "Steps in which the learning rate rises from 0: a number, or a share such as 5%.",
        label="Warm-up",
        parse=steps_or_share,
        min=0,
    )
    lr_scheduler_num_cycles: int = opt(
        1, "The cycles of cosine_with_restarts and others. 1: no restart.", label="Scheduler cycles", min=1
    )
    max_grad_norm: float = opt(1.0, "Clip gradients to this norm. 0: off.", label="Gradient clipping", min=0.0)
    lr_decay_steps: int | float = opt(
        0,
        "Last steps, in which warmup_stable_decay falls: a number, or a share such as 10%.",
        label="Decay",
        parse=steps_or_share,
        min=0,
        advanced=True,
    )
    lr_scheduler_power: float = opt(1.0, "The exponent of polynomial.", label="Scheduler power", advanced=True)
    lr_scheduler_timescale: int | None = opt(
        None, "The time scale of inverse_sqrt, in steps.", label="Scheduler time scale", min=1, advanced=True
    )
    lr_scheduler_min_lr_ratio: float | None = opt(
        None,
        "Where cosine_with_min_lr and warmup_stable_decay end, as a share of the learning rate.",
        label="Final rate",
        min=0.0,
        max=1.0,
        advanced=True,
    )
    lr_scheduler_type: str = opt(
        "",
        "A scheduler of your own, as module.Class. It replaces the scheduler above.",
        label="Custom scheduler",
        kind="code",
        advanced=True,
    )
    lr_scheduler_args: tuple[str, ...] = opt(
        (), "Arguments of the scheduler, as key=value.", label="Scheduler arguments", advanced=True
    )
    use_8bit_adam: bool = opt(False, "Old name for optimizer_type = AdamW8bit.", label="8-bit Adam", advanced=True)
    use_lion_optimizer: bool = opt(False, "Old name for optimizer_type = Lion.", label="Lion", advanced=True)
    fused_backward_pass: bool = opt(
        False, "Update each weight in the backward pass: saves memory. Adafactor only.", advanced=True
    )

    ema_decay: float = opt(
        0.0,
        "Save a moving average (EMA) of the weights as well, as <name>-ema. 0.999 is usual.",
        label="EMA decay",
        min=0.0,
        max=0.99999,
        advanced=True,
    )
    ema_every_n_steps: int = opt(
        1, "Update the average every N steps.", label="EMA update every N steps", min=1, advanced=True
    )
    ema_device: Literal["gpu", "cpu"] = opt(
        "gpu",
        "Where the average is kept (4 bytes per weight). cpu saves GPU memory, costs time.",
        label="EMA kept on",
        advanced=True,
    )

    @property
    def stepped_early(self) -> str:
        return ""  # adapters have few gradients to save

    @property
    def optimizer(self) -> str:
        old = "AdamW8bit" if self.use_8bit_adam else "Lion" if self.use_lion_optimizer else "AdamW"
        return self.optimizer_type or old

    @property
    def without_schedule(self) -> str:
        """Why the optimizer follows no schedule: "schedule-free", "relative" (Adafactor with relative_step), or "".

        Its warm-up, if any, is an argument of its own.
        """
        name = self.optimizer.rpartition(".")[2].casefold()
        args = {key.strip(): text.strip() for key, _, text in (pair.partition("=") for pair in self.optimizer_args)}
        if name == "adafactor":
            warms_up = args.get("warmup_init") in ("True", "1")
            return "relative" if warms_up or args.get("relative_step", "True") not in ("False", "0", "None") else ""
        averages = args.get("use_schedulefree", "True") not in ("False", "0", "None")
        return "schedule-free" if "schedulefree" in name and averages else ""

    @property
    def block_lrs(self) -> tuple[float, ...]:
        return ()  # rates of parts of the denoiser, in the order of the family's `rate_names`

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Require one optimizer, and reject invalid combinations."""
        chosen = {"use_8bit_adam": self.use_8bit_adam, "use_lion_optimizer": self.use_lion_optimizer}
        chosen["optimizer_type"] = bool(self.optimizer_type)
        if sum(chosen.values()) > 1:
            names = [name for name, on in chosen.items() if on]
            yield Problem(
                names[0],
                "and {others} both choose an optimizer: keep optimizer_type only",
                others=together(names[1:]),
                also=names,
            )
        if self.optimizer.rpartition(".")[2].lower() == "automagic":
            yield Problem(
                "optimizer_type",
                "Automagic is part of ai-toolkit and not available as a package: set optimizer_type = "
                "ProdigyPlusScheduleFree and learning_rate = 1, which also finds its rate",
                fix=other_optimizer(run, "ProdigyPlusScheduleFree", rate=1.0),
            )
        schedule = self.lr_scheduler_type or self.lr_scheduler
        if self.lr_warmup_steps and (self.lr_scheduler_type or schedule.split(":")[0] in ("constant", "adafactor")):
            other = {"lr_warmup_steps": 0} if self.lr_scheduler_type else {"lr_scheduler": "constant_with_warmup"}
            yield own_warmup(run) or Problem(
                "lr_warmup_steps",
                "cannot be used with lr_scheduler = {schedule}, which has no warm-up: set it to 0, or use "
                "constant_with_warmup",
                also="lr_scheduler lr_scheduler_type",
                fix=other,
                schedule=schedule,
            )
        if not self.fused_backward_pass:
            return
        if self.optimizer.lower() != "adafactor":
            yield Problem(
                "fused_backward_pass",
                "works with Adafactor only: set optimizer_type = Adafactor",
                also="optimizer_type",
                fix={"optimizer_type": "Adafactor"},
            )
        if run.steps.gradient_accumulation_steps > 1:
            yield _no_accumulation("fused_backward_pass")


def own_warmup(run: RunConfig) -> Problem | None:
    """Return the problem of lr_warmup_steps with an optimizer that follows no schedule; None for others.

    Its fix keeps the warm-up as the optimizer's own argument, if it has one.
    """
    optim, kind = run.optim, run.optim.without_schedule
    if not optim.lr_warmup_steps or not kind:
        return None
    steps = optim.lr_warmup_steps
    if isinstance(steps, float):  # a share of the length, which is known unless it is set in epochs
        steps = 0 if run.steps.max_train_epochs else int(steps * run.steps.max_train_steps)
    argument = "warmup_init=True" if kind == "relative" else f"warmup_steps={steps}"
    needs_no_warmup = kind != "relative" and optim.optimizer.rpartition(".")[2].casefold() not in WARMS_UP
    is_given = any(pair.partition("=")[0].strip() == argument.partition("=")[0] for pair in optim.optimizer_args)
    if needs_no_warmup:
        return Problem(
            "lr_warmup_steps",
            "has no effect with {optimizer}, which needs no warm-up: set it to 0",
            also="optimizer_type",
            optimizer=optim.optimizer,
            fix={"lr_warmup_steps": 0},
        )
    template = "has no effect with {optimizer}, which warms up by itself: set optimizer_args = {argument} and this to 0"
    if kind != "relative" and not steps:
        return Problem(
            "lr_warmup_steps",
            template,
            also="optimizer_type optimizer_args",
            optimizer=optim.optimizer,
            argument="warmup_steps=N",
        )
    arguments = [pair for pair in optim.optimizer_args if not pair.replace(" ", "").startswith("warmup_init=")]
    keeps_args = is_given and kind != "relative"
    fix = {"lr_warmup_steps": 0} | ({} if keeps_args else {"optimizer_args": (*arguments, argument)})
    return Problem(
        "lr_warmup_steps",
        template,
        also="optimizer_type optimizer_args",
        optimizer=optim.optimizer,
        argument=argument,
        fix=fix,
    )


def _no_accumulation(name: str) -> Problem:
    also, fix = "gradient_accumulation_steps", {"gradient_accumulation_steps": 1}
    return Problem(name, "cannot accumulate: set gradient_accumulation_steps = 1", also=also, fix=fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class FullOptim(Optim):
    """Like `Optim`, with options that save memory in full trainings."""

    fused_optimizer_groups: int | None = opt(
        None,
        "Update the weights in this many groups during the backward pass. Saves memory.",
        parse=parse_count,
        advanced=True,
    )

    @property
    def stepped_early(self) -> str:
        return next((name for name in EARLY if getattr(self, name, None)), "")

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Allow one way of stepping early, and only with whole, unscaled gradients."""
        yield from Optim.check(self, run)
        chosen = [name for name in EARLY if getattr(self, name, None)]
        if len(chosen) > 1:
            yield exclusive(run, *chosen)
        for name in chosen:
            if run.steps.gradient_accumulation_steps > 1 and name != "fused_backward_pass":
                yield _no_accumulation(name)
            if run.precision.mixed_precision == "fp16":
                yield Problem(
                    name,
                    "cannot be used with fp16, whose gradients are scaled: set mixed_precision = bf16",
                    also="mixed_precision",
                    fix={"mixed_precision": "bf16"},
                )
        if self.fused_optimizer_groups and run.memory.blocks_to_swap:
            yield Problem(
                "fused_optimizer_groups",
                "cannot be used with blocks_to_swap: use fused_backward_pass with Adafactor",
                also="blocks_to_swap",
            )
