"""How a training learns: noise, loss, adapters, optimizer, length and validation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from library.config.reading import count, steps_or_share
from library.config.schema import opt
from library.config.sections.inputs import Data

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
    "Prodigy",
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """What is added to an image before the model has to find it again."""

    noise_offset: float | None = opt(None, "shift of brightness in the noise, for dark and bright images (0.03 to 0.1)")
    noise_offset_random_strength: bool = opt(False, "vary noise_offset between 0 and its value")
    adaptive_noise_scale: float | None = opt(None, "add this times the image's own mean to noise_offset", advanced=True)
    multires_noise_iterations: int | None = opt(
        None, "mix in noise of this many coarser sizes (6 to 10)", parse=count, label="Multires noise iterations"
    )
    multires_noise_discount: float = opt(0.3, "how quickly the coarser sizes fade", min=0.0)
    ip_noise_gamma: float | None = opt(None, "a little extra noise in the input only (0.1)", min=0.0)
    ip_noise_gamma_random_strength: bool = opt(False, "vary ip_noise_gamma between 0 and its value", advanced=True)
    zero_terminal_snr: bool = opt(False, "the noisiest step is pure noise; for v-prediction models")
    min_timestep: int | None = opt(None, "least noise that is trained, 0 to 999", min=0, max=1000, advanced=True)
    max_timestep: int | None = opt(None, "most noise that is trained, 1 to 1000", min=0, max=1000, advanced=True)

    def check(self, run: Any) -> Iterator[str]:
        """Rules about noise."""
        if self.adaptive_noise_scale is not None and self.noise_offset is None:
            yield "adaptive_noise_scale needs noise_offset: set it too, or leave both off"
        if (self.min_timestep or 0) > (1000 if self.max_timestep is None else self.max_timestep):
            yield f"min_timestep ({self.min_timestep}) must not be above max_timestep ({self.max_timestep})"

    def notes(self, run: Any) -> Iterator[str]:
        """What is allowed but seldom meant."""
        if self.zero_terminal_snr and not run.model.v_parameterization:
            yield "zero_terminal_snr is made for v-prediction models; v_parameterization is off"


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """How wrong an answer is."""

    loss_type: Literal["l1", "l2", "huber", "smooth_l1"] = opt("l2", "l2 is usual; huber and smooth_l1 bear outliers")
    huber_schedule: Literal["constant", "exponential", "snr"] = opt(
        "snr", "how the threshold of huber and smooth_l1 follows the noise"
    )
    huber_c: float = opt(0.1, "threshold of huber and smooth_l1", min=0.0)
    huber_scale: float = opt(1.0, "factor on that threshold (constant and exponential)", min=0.0, advanced=True)
    min_snr_gamma: float | None = opt(None, "weigh nearly clean steps less; 5 is usual", min=0.0)
    debiased_estimation_loss: bool = opt(False, "weigh noisy steps more", advanced=True)
    scale_v_pred_loss_like_noise_pred: bool = opt(
        False, "v-prediction: weigh steps as noise prediction does", advanced=True
    )
    v_pred_like_loss: float | None = opt(
        None, "noise prediction: add this share of a v-prediction loss", min=0.0, advanced=True
    )

    def check(self, run: Any) -> Iterator[str]:
        """Weights that belong to one kind of prediction."""
        if self.scale_v_pred_loss_like_noise_pred and not run.model.v_parameterization:
            yield "scale_v_pred_loss_like_noise_pred needs v_parameterization: it is for v-prediction models"
        if self.v_pred_like_loss and run.model.v_parameterization:
            yield "v_pred_like_loss cannot be used with v_parameterization: that loss is v-prediction already"


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The adapters that learn."""

    network_module: Literal["networks.lora", "networks.lora_flux", "lycoris.kohya"] | str | None = opt(
        None, "kind of adapter; LoRA when not set", label="Adapter"
    )
    network_dim: int | None = opt(None, "rank: 4 to 32 for styles and people, up to 128; 4 when not set", min=1)
    network_alpha: float = opt(1.0, "strength is alpha / rank; 0 means alpha = rank", min=0.0)
    network_dropout: float | None = opt(None, "share of rank values dropped in training", min=0.0, max=1.0)
    network_train_unet_only: bool = opt(False, "adapters in the image model only", label="Image model only")
    network_train_text_encoder_only: bool = opt(
        False, "adapters in the text encoders only", label="Text encoders only", advanced=True
    )
    network_args: tuple[str, ...] = opt((), "more arguments of the adapter, key=value (conv_dim=8 conv_alpha=4)")
    network_weights: str | None = opt(None, "adapter file to go on from", kind="file")
    dim_from_weights: bool = opt(False, "take ranks from that file", advanced=True)
    scale_weight_norms: float | None = opt(None, "hold the size of each adapter at this norm (1.0)", min=0.0)
    base_weights: tuple[str, ...] = opt(
        (), "adapter files that are merged into the model before training", advanced=True
    )
    base_weights_multiplier: tuple[float, ...] = opt((), "strength of each of these", advanced=True)
    training_comment: str | None = opt(None, "a comment that is written into the file")
    no_metadata: bool = opt(False, "write no training settings into the file", advanced=True)

    @property
    def module(self) -> str:
        """The kind of adapter that is meant."""
        return self.network_module or "networks.lora"

    def check(self, run: Any) -> Iterator[str]:
        """Rules about which adapters learn and where they start."""
        if self.network_train_unet_only and self.network_train_text_encoder_only:
            yield "network_train_unet_only and network_train_text_encoder_only leave nothing to train: choose one"
        if self.dim_from_weights and not self.network_weights:
            yield "dim_from_weights needs network_weights, the file to take the ranks from"
        if len(self.base_weights_multiplier) > len(self.base_weights):
            yield (
                f"base_weights_multiplier has {len(self.base_weights_multiplier)} values for "
                f"{len(self.base_weights)} base_weights: give at most one for each file"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Optim:
    """How fast it learns, and by which rule."""

    learning_rate: float = opt(2e-6, "size of a step; 1e-4 is usual for LoRA, 1e-5 for a full model", min=0.0)
    optimizer_type: OptimizerName | str = opt(
        "", "rule of a step, or module.Class; AdamW when empty", label="Optimizer"
    )
    optimizer_args: tuple[str, ...] = opt((), "arguments of the optimizer, key=value (weight_decay=0.1)")
    lr_scheduler: SchedulerName | str = opt("constant", "how the learning rate changes in time", label="Schedule")
    lr_warmup_steps: int | float = opt(
        0, "steps in which the rate rises from 0; below 1 or with % a share of all steps", parse=steps_or_share
    )
    lr_scheduler_num_cycles: int = opt(1, "restarts of cosine_with_restarts", min=1)
    max_grad_norm: float = opt(1.0, "cut gradients to this norm; 0 does not cut", min=0.0)
    lr_decay_steps: int | float = opt(
        0,
        "last steps in which warmup_stable_decay falls; below 1 or with % a share",
        parse=steps_or_share,
        advanced=True,
    )
    lr_scheduler_power: float = opt(1.0, "power of polynomial", advanced=True)
    lr_scheduler_timescale: int | None = opt(None, "time scale of inverse_sqrt in steps", min=1, advanced=True)
    lr_scheduler_min_lr_ratio: float | None = opt(
        None, "where cosine_with_min_lr and warmup_stable_decay end, as a share", min=0.0, max=1.0, advanced=True
    )
    lr_scheduler_type: str = opt("", "your own schedule, module.Class, instead of lr_scheduler", advanced=True)
    lr_scheduler_args: tuple[str, ...] = opt((), "arguments of the schedule, key=value", advanced=True)
    use_8bit_adam: bool = opt(False, "old name for optimizer_type = AdamW8bit", advanced=True)
    use_lion_optimizer: bool = opt(False, "old name for optimizer_type = Lion", advanced=True)
    fused_backward_pass: bool = opt(
        False, "step each weight as soon as its gradient is there; saves memory, Adafactor only", advanced=True
    )

    @property
    def optimizer(self) -> str:
        """The optimizer that is meant, with the old switches read."""
        old = "AdamW8bit" if self.use_8bit_adam else "Lion" if self.use_lion_optimizer else "AdamW"
        return self.optimizer_type or old

    def check(self, run: Any) -> Iterator[str]:
        """One optimizer, and what it can be combined with."""
        chosen = {"use_8bit_adam": self.use_8bit_adam, "use_lion_optimizer": self.use_lion_optimizer}
        chosen["optimizer_type"] = bool(self.optimizer_type)
        if sum(chosen.values()) > 1:
            names = [name for name, on in chosen.items() if on]
            yield f"{' and '.join(names)} both choose an optimizer: keep optimizer_type only"
        schedule = self.lr_scheduler_type or self.lr_scheduler
        if self.lr_warmup_steps and (self.lr_scheduler_type or schedule.split(":")[0] in ("constant", "adafactor")):
            yield (
                f"lr_warmup_steps does not go with lr_scheduler = {schedule}, which has no warm-up: "
                "set it to 0, or use constant_with_warmup"
            )
        if not self.fused_backward_pass:
            return
        if self.optimizer.lower() != "adafactor":
            yield "fused_backward_pass works with Adafactor only: set optimizer_type = Adafactor"
        if run.steps.gradient_accumulation_steps > 1:
            yield "fused_backward_pass cannot accumulate: set gradient_accumulation_steps = 1"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOptim(Optim):
    """The same, with rates of their own for the parts that adapters are in."""

    unet_lr: float | None = opt(
        None,
        "learning rate of the image model's adapters; learning_rate when not set",
        min=0.0,
        label="Image model rate",
    )
    text_encoder_lr: tuple[float, ...] = opt(
        (),
        "learning rates of the text encoders' adapters; learning_rate when not set",
        min=0.0,
        label="Text encoder rates",
    )

    def notes(self, run: Any) -> Iterator[str]:
        """What is for the whole model only."""
        if self.fused_backward_pass:
            yield "fused_backward_pass has no effect here: adapters have few gradients to save"


@dataclass(frozen=True, kw_only=True, slots=True)
class FullOptim(Optim):
    """The same, with what saves memory when the whole model learns."""

    fused_optimizer_groups: int | None = opt(
        None, "step the weights in this many groups during backward; saves memory", parse=count, advanced=True
    )

    def check(self, run: Any) -> Iterator[str]:
        """One way of stepping early."""
        yield from Optim.check(self, run)
        if self.fused_backward_pass and self.fused_optimizer_groups:
            yield "fused_backward_pass and fused_optimizer_groups exclude each other: choose one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """How long, and from where."""

    max_train_steps: int = opt(1600, "steps to train", min=1)
    max_train_epochs: int | None = opt(None, "times to go through all images; counts instead of steps", parse=count)
    gradient_accumulation_steps: int = opt(1, "batches whose gradients make one step", min=1)
    seed: int | None = opt(None, "the same seed gives the same training; drawn when not set")
    resume: str | None = opt(None, "folder of a saved state to go on from", kind="folder")
    resume_from_huggingface: bool = opt(False, "resume names a state on Hugging Face: owner/repo/path", advanced=True)

    def check(self, run: Any) -> Iterator[str]:
        """A state on the hub needs a name."""
        if self.resume_from_huggingface and not self.resume:
            yield "resume_from_huggingface needs resume: owner/repo/path[:revision[:repo_type]]"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSteps(Steps):
    """The same, with a start in the middle."""

    initial_epoch: int | None = opt(None, "epoch to start at, from 1", min=1, advanced=True)
    initial_step: int | None = opt(None, "step to start at; wins over initial_epoch", min=0, advanced=True)
    skip_until_initial_step: bool = opt(False, "go through the data up to that step first", advanced=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Images that are held back to see whether it still learns or only remembers."""

    validation_split: float = opt(0.0, "share of the images that is held back", min=0.0, max=1.0)
    validation_seed: int | None = opt(None, "chooses these images, and their noise")
    validate_every_n_steps: int | None = opt(None, "look every n steps", parse=count)
    validate_every_n_epochs: int | None = opt(None, "look every n epochs; each epoch when not set", parse=count)
    max_validation_steps: int | None = opt(None, "at most this many batches each time", parse=count)

    def notes(self, run: Any) -> Iterator[str]:
        """Nothing is held back."""
        often = self.validate_every_n_steps or self.validate_every_n_epochs
        if often and not self.validation_split and not run.data.dataset_config:
            yield "nothing is validated: validation_split is 0"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterData(Data):
    """The images, with the weight that regularisation has for adapters."""

    prior_loss_weight: float = opt(1.0, "weight of regularisation images in the loss", min=0.0)
