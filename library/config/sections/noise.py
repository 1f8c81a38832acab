"""Noise, timesteps, and the loss."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from library.config.problems import Problem
from library.config.reading import parse_count
from library.config.run_config import RunConfig
from library.config.schema import opt


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Noise and timestep settings."""

    noise_offset: float | None = opt(
        None, "0.03 to 0.1 lets the model learn darker and brighter images; 0.0357 is usual."
    )
    noise_offset_random_strength: bool = opt(
        False, "Vary the noise offset between 0 and its value.", label="Random noise offset"
    )
    adaptive_noise_scale: float | None = opt(
        None, "Add this times the mean of each image to the noise offset.", advanced=True
    )
    multires_noise_iterations: int | None = opt(
        None,
        "Pyramid noise: the number of coarser noise levels (6 to 10).",
        parse=parse_count,
        label="Multires noise iterations",
    )
    multires_noise_discount: float = opt(
        0.3, "Pyramid noise: the factor of each coarser level (0.3 to 0.8); lower is weaker.", min=0.0
    )
    ip_noise_gamma: float | None = opt(
        None,
        "Extra noise in the model's input that is not part of the target (0.1).",
        label="Input perturbation",
        min=0.0,
    )
    ip_noise_gamma_random_strength: bool = opt(
        False, "Vary the input perturbation between 0 and its value.", label="Random input perturbation", advanced=True
    )
    zero_terminal_snr: bool = opt(
        False,
        "Make the last timestep pure noise. For v-prediction models trained this way.",
        label="Zero terminal SNR",
    )
    min_timestep: int | None = opt(
        None,
        "Train no timestep below this (0 to 999). Low timesteps are fine detail.",
        label="Lowest timestep",
        min=0,
        max=1000,
        advanced=True,
    )
    max_timestep: int | None = opt(
        None,
        "Train only timesteps below this (1 to 1000). High timesteps are composition.",
        label="Highest timestep",
        min=0,
        max=1000,
        advanced=True,
    )

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Check noise options."""
        if self.adaptive_noise_scale is not None and self.noise_offset is None:
            yield Problem(
                "adaptive_noise_scale",
                "needs noise_offset: set it too, or leave both off",
                also="noise_offset",
                fix={"adaptive_noise_scale": None},
            )
        if (self.min_timestep or 0) > (1000 if self.max_timestep is None else self.max_timestep):
            yield Problem(
                "min_timestep",
                "({least}) must not be above max_timestep ({most})",
                also="max_timestep",
                least=self.min_timestep,
                most=self.max_timestep,
            )

    def notes(self, run: RunConfig) -> Iterator[Problem]:
        """Warn of values that are allowed but rarely intended."""
        if self.zero_terminal_snr and not run.model.v_parameterization:
            yield Problem(
                "zero_terminal_snr",
                "is made for v-prediction models; v_parameterization is off",
                also="v_parameterization",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Loss function and loss weighting."""

    loss_type: Literal["l1", "l2", "huber", "smooth_l1"] = opt(
        "l2", "l2 is the usual loss; huber and smooth_l1 are less sensitive to outliers.", label="Loss"
    )
    huber_schedule: Literal["constant", "exponential", "snr"] = opt(
        "snr", "How the threshold of huber and smooth_l1 depends on the timestep."
    )
    huber_c: float = opt(0.1, "The threshold of huber and smooth_l1. 0.1 is usual.", label="Huber threshold", min=0.0)
    huber_scale: float = opt(
        1.0, "A factor on that threshold, for the schedules constant and exponential.", min=0.0, advanced=True
    )
    min_snr_gamma: float | None = opt(
        None,
        "Less weight for timesteps with little noise (Min-SNR): learns faster. 5 is usual.",
        label="Min-SNR gamma",
        min=0.0,
    )
    debiased_estimation_loss: bool = opt(
        False,
        "Debiased estimation loss: a higher loss weight for noisy timesteps.",
        label="Debiased estimation",
        advanced=True,
    )
    scale_v_pred_loss_like_noise_pred: bool = opt(
        False,
        "Scale the v-prediction loss like the noise prediction loss.",
        label="Scale v-prediction loss",
        advanced=True,
    )
    v_pred_like_loss: float | None = opt(
        None,
        "Add this share of a v-prediction loss to a noise prediction loss.",
        label="V-prediction like loss",
        min=0.0,
        advanced=True,
    )

    normalize_masked_area_loss: bool = opt(
        False,
        "Images with small masks count as much as those with large ones.",
        label="Normalise masked area",
        advanced=True,
    )

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Reject weightings of another kind of prediction."""
        if self.scale_v_pred_loss_like_noise_pred and not run.model.v_parameterization:
            yield Problem(
                "scale_v_pred_loss_like_noise_pred",
                "needs v_parameterization: it is for v-prediction models",
                also="v_parameterization",
                fix={"scale_v_pred_loss_like_noise_pred": False},
            )
        if self.v_pred_like_loss and run.model.v_parameterization:
            yield Problem(
                "v_pred_like_loss",
                "cannot be used with v_parameterization: that loss is v-prediction already",
                also="v_parameterization",
                fix={"v_pred_like_loss": None},
            )
