"""Options for training adapters of a frozen model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from library.config.fixes import exclusive
from library.config.problems import Problem, counted, option_name
from library.config.reading import LARGEST_RANK
from library.config.run_config import RunConfig
from library.config.schema import opt, section_options
from library.config.sections.inputs import Data
from library.config.sections.learning import Optim
from library.config.sections.length import Steps
from library.config.sections.machine import Precision
from library.config.strengths import strength_notes, strength_problems

IN_8_BITS = ("fp8_compute", "int8_compute", "auto_compute")  # kinds of products of a base model in 8 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The adapters that are trained."""

    network_module: Literal["networks.lora", "lycoris.kohya"] | str | None = opt(
        None, "The type of adapter. Empty: LoRA.", label="Network module", kind="code"
    )
    network_dim: int | None = opt(
        None,
        "16 or 32 suits most. Higher learns more detail, in a larger file. Empty: 4.",
        label="Rank",
        min=1,
        ceiling=LARGEST_RANK,
    )
    network_alpha: float = opt(
        1.0,
        "The adapter's strength is alpha / rank: usually the rank or half of it. 0: the rank.",
        label="Alpha",
        min=0.0,
    )
    network_dropout: float | None = opt(
        None, "The share of the adapter dropped in each step. 0.1 helps against overfitting.", min=0.0, max=1.0
    )
    network_train_unet_only: bool = opt(
        False,
        "Train the image model only, not the text encoders. Usually on.",
        label="Image model only",
    )
    network_train_text_encoder_only: bool = opt(
        False, "Train adapters in the text encoders only.", label="Text encoders only", advanced=True
    )
    network_args: tuple[str, ...] = opt(
        (), "Further arguments of the adapter, as key=value (conv_dim=8 conv_alpha=4).", label="Network arguments"
    )
    network_weights: str | None = opt(None, "An adapter file to continue from.", label="Continue from", kind="file")
    dim_from_weights: bool = opt(
        False, "Use the ranks that are stored in the network weights file.", label="Rank from file", advanced=True
    )
    scale_weight_norms: float | None = opt(
        None,
        "Limit the norm of each adapter to this value, against overfitting. 1 is usual.",
        label="Maximum weight norm",
        min=0.0,
    )
    base_weights: tuple[str, ...] = opt(
        (),
        "Adapters that are merged into the model first; owner/name/FILE is on Hugging Face.",
        label="Base weights",
        kind="files",
        advanced=True,
    )
    base_weights_multiplier: tuple[float, ...] = opt(
        (), "The strength of each of the base weights.", label="Base weights multipliers", advanced=True
    )
    assistant_lora: str | None = opt(
        None,
        "A LoRA that distilled models need in training; off in samples. Add a strength: FILE:0.8.",
        label="Assistant LoRA",
        kind="file",
        weighted=True,
        advanced=True,
    )
    preserve_weight: float = opt(
        0.0,
        "Keep the model's predictions for another prompt. 1 is usual. Takes 2.4 times as long.",
        label="Preservation weight",
        min=0.0,
    )
    preserve_prompt: str | None = opt(
        None,
        "The class, such as person, in place of the trigger phrase. Empty: an empty prompt.",
        label="Preserved prompt",
    )
    training_comment: str | None = opt(None, "A comment that is written into the file.", label="Comment")
    no_metadata: bool = opt(False, "Save no training settings in the metadata of the file.", advanced=True)

    @property
    def encoders_learn(self) -> bool:
        return not self.network_train_unet_only

    @property
    def usual(self) -> str:
        return section_options(type(self))["network_module"].choices[0]  # what an empty one stands for

    @property
    def module(self) -> str:
        return self.network_module or self.usual

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Check which adapters are trained and how they are initialized."""
        if self.network_train_unet_only and self.network_train_text_encoder_only:
            yield Problem(
                "network_train_unet_only",
                "and {other} leave nothing to train: choose one",
                other=option_name("network_train_text_encoder_only"),
                also="network_train_text_encoder_only",
                fix={"network_train_text_encoder_only": False},
            )
        if self.dim_from_weights and not self.network_weights:
            yield Problem(
                "dim_from_weights", "needs network_weights, the file to take the ranks from", also="network_weights"
            )
        if self.network_dropout == 1:
            yield Problem("network_dropout", "must be below 1: at 1 nothing would be trained")
        if len(self.base_weights_multiplier) > len(self.base_weights):
            yield Problem(
                "base_weights_multiplier",
                "has {values} for {files} base_weights: give at most one for each file",
                values=counted(len(self.base_weights_multiplier), "value"),
                files=len(self.base_weights),
                also="base_weights",
            )
        yield from strength_problems("assistant_lora", self.assistant_lora)

    def notes(self, run: RunConfig) -> Iterator[Problem]:
        """Remark on an assistant of strength 0."""
        yield from strength_notes("assistant_lora", self.assistant_lora)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterData(Data):
    """The images, with the weight that regularisation has for adapters."""

    prior_loss_weight: float = opt(
        1.0, "The weight of regularisation images in the loss. 1 is usual; lower means less influence.", min=0.0
    )

    @property
    def regularisation_weight(self) -> float:
        return self.prior_loss_weight


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOptim(Optim):
    """Like `Optim`, with rates for the parts that carry adapters."""

    unet_lr: float | None = opt(
        None,
        "A learning rate of its own for the image model. Empty: the learning rate.",
        min=0.0,
        label="Image model learning rate",
    )
    text_encoder_lr: tuple[float, ...] = opt(
        (),
        "For the text encoders: one value, or one each. Half is usual. Empty: the learning rate.",
        min=0.0,
        label="Text encoder learning rates",
    )

    def notes(self, run: RunConfig) -> Iterator[Problem]:
        """Warn of options for full trainings only."""
        if self.fused_backward_pass:
            yield Problem(
                "fused_backward_pass",
                "has no effect here: adapters have few gradients to save",
                fix={"fused_backward_pass": False},
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSteps(Steps):
    """Like `Steps`, for trainings that can start at a later epoch or step."""

    initial_epoch: int | None = opt(
        None, "Start at this epoch, counted from 1.", label="First epoch", min=1, advanced=True
    )
    initial_step: int | None = opt(
        None, "Start at this step. It overrides the first epoch.", label="First step", min=0, advanced=True
    )
    skip_until_initial_step: bool = opt(
        False,
        "Skip the data before the initial step too. Off: only epochs are counted from there.",
        label="Skip data",
        advanced=True,
    )

    @property
    def moved(self) -> bool:
        return self.initial_step is not None or self.initial_epoch is not None

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Check that the first step lies before the last."""
        yield from Steps.check(self, run)
        if self.max_train_epochs and (self.initial_epoch or 0) > self.max_train_epochs and self.initial_step is None:
            yield Problem(
                "initial_epoch",
                "({first}) must not be above max_train_epochs ({last})",
                also="max_train_epochs initial_step",
                first=self.initial_epoch,
                last=self.max_train_epochs,
            )
        if not self.max_train_epochs and (self.initial_step or 0) >= self.max_train_steps:
            yield Problem(
                "initial_step",
                "({first}) must be below max_train_steps ({last})",
                also="max_train_steps max_train_epochs",
                first=self.initial_step,
                last=self.max_train_steps,
            )

    def notes(self, run: RunConfig) -> Iterator[Problem]:
        """Warn of what restarts anyway."""
        if self.initial_epoch and self.initial_step is not None:
            yield Problem(
                "initial_epoch", "has no effect here: initial_step says where to begin", fix={"initial_epoch": None}
            )
        if self.skip_until_initial_step and not self.moved:
            yield Problem(
                "skip_until_initial_step",
                "has no effect here: neither initial_step nor initial_epoch is set",
                fix={"skip_until_initial_step": False},
            )
        if self.moved and not self.resume:
            yield Problem(
                "",
                "without {other}, the optimizer and the learning rate schedule start again, whatever the first step",
                other=option_name("resume"),
                also="resume initial_step initial_epoch",
                topic="training",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenPrecision(Precision):
    """Like `Precision`, for a frozen model, whose parts may differ."""

    fp8_base_unet: bool = opt(
        False,
        "Keep only the image model in 8 bits, and the text encoders in 16.",
        label="fp8 image model only",
        advanced=True,
    )

    @property
    def fp8_denoiser(self) -> bool:
        return self.fp8_base or self.fp8_base_unet

    @property
    def fp8_encoders(self) -> bool:
        return self.fp8_base and not self.fp8_base_unet


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterPrecision(FrozenPrecision):
    """Like `FrozenPrecision`, with 4 bits and rules for adapters."""

    base_bits: Literal[4] | None = opt(
        None,
        "4 keeps the image model in 4 bits (nf4), a quarter of bf16. Slower, less exact.",
        label="Bits of the base model",
    )

    @property
    def nf4_denoiser(self) -> bool:
        return self.base_bits == 4

    def check(self, run: Any) -> Iterator[Problem]:
        """Reject dtypes that LyCORIS cannot handle: unless bypassing, it adds its product to the stored weights."""
        idle = [name for name in IN_8_BITS if self.nf4_denoiser and getattr(self, name)]
        # Their own fix would be weights in 8 bits.
        yield from (problem for problem in FrozenPrecision.check(self, run) if problem.option not in idle)
        for name in idle:
            template = "is for a base model in 8 bits, and base_bits keeps it in 4: leave it out"
            yield Problem(name, template, also="base_bits", fix={name: False})
        for name in ("fp8_base", "fp8_base_unet", "int8_base"):
            if self.nf4_denoiser and getattr(self, name):
                yield exclusive(run, name, "base_bits")
        module = run.network.module
        if not (self.fp8_denoiser or self.int8_base or self.nf4_denoiser) or not module.startswith("lycoris"):
            return
        name = next(name for name in ("fp8_base", "fp8_base_unet", "int8_base", "base_bits") if getattr(self, name))
        arguments = [argument.lower().replace(" ", "") for argument in run.network.network_args]
        algo = next((algo for algo in ("full", "dylora") if f"algo={algo}" in arguments), "")
        if algo:
            yield Problem(
                name,
                "cannot be used with algo={algo}, which needs whole weights: use algo=lokr or another algorithm",
                algo=algo,
                also="network_args network_module",
            )
        elif "dora_wd=true" in arguments:
            yield Problem(
                name,
                "cannot be used with dora_wd, which needs whole weights: leave one of them out",
                also="network_args network_module",
            )
        elif "bypass_mode=true" not in arguments:
            yield Problem(
                name,
                "cannot be used with network_module = {module}: add bypass_mode=True to network_args",
                module=module,
                also="network_args network_module",
                fix={"network_args": (*run.network.network_args, "bypass_mode=True")},
            )
