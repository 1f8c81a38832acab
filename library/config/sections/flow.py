"""Common options of models trained by flow matching: noise, timesteps, losses and files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from library.config.problems import Message, Problem
from library.config.run_config import Rule, RunConfig
from library.config.schema import opt
from library.config.sections.noise import Loss, Noise
from library.config.sections.outputs import FullSave

_NOISE = "it is for diffusion models, and this model is trained by flow matching"
_WEIGHT = "it weighs steps of a diffusion model; for this model see weighting_scheme"
# Options parsed for every family that mean nothing to these.
FLOW_INEFFECTIVE: Mapping[str, str] = {
    "v_parameterization": "this model always predicts a velocity",
    "clip_skip": "this model uses a fixed layer; it is only written into the metadata",
    "weighted_captions": "this model does not support prompt weights",
    "noise_offset": _NOISE,
    "noise_offset_random_strength": _NOISE,
    "adaptive_noise_scale": _NOISE,
    "multires_noise_iterations": _NOISE,
    "multires_noise_discount": _NOISE,
    "zero_terminal_snr": _NOISE,
    "min_snr_gamma": _WEIGHT,
    "debiased_estimation_loss": _WEIGHT,
    "scale_v_pred_loss_like_noise_pred": _WEIGHT,
    "v_pred_like_loss": _WEIGHT,
    "sample_sampler": "sample images of this model always use the Euler sampler",
}


def flow_rules(size_shift: str) -> tuple[Rule, ...]:
    """Return when options of flow matching have no effect. `size_shift`: the family's timestep_sampling with a shift by
    the size of the image, "" without one.
    """
    reason = Message("timestep_sampling is not sigmoid, shift or {shift}", shift=size_shift)
    if not size_shift:
        reason = Message("timestep_sampling is neither sigmoid nor shift")
    return (*_RULES, ("sigmoid_scale", lambda c: c.noise.timestep_sampling not in ("sigma", "uniform"), reason))


_RULES: tuple[Rule, ...] = (
    (
        "discrete_flow_shift",
        lambda c: c.noise.timestep_sampling in ("shift", "sigma"),
        "timestep_sampling is neither shift nor sigma",
    ),
    (
        "weighting_scheme",
        lambda c: (
            c.noise.timestep_sampling == "sigma"
            or c.noise.model_prediction_type == "sigma_scaled"
            or c.noise.always_weighted
        ),
        "neither timestep_sampling is sigma nor model_prediction_type sigma_scaled",
    ),
    (
        "weighting_scheme",
        lambda c: c.noise.timestep_sampling == "sigma" or c.noise.weighting_scheme not in ("logit_normal", "mode"),
        "logit_normal and mode choose timesteps where timestep_sampling is sigma",
    ),
    (
        "weighting_scheme",
        lambda c: (
            c.noise.model_prediction_type == "sigma_scaled"
            or c.noise.always_weighted
            or c.noise.weighting_scheme not in ("sigma_sqrt", "cosmap")
        ),
        "sigma_sqrt and cosmap weigh losses where model_prediction_type is sigma_scaled",
    ),
    (
        "logit_mean logit_std mode_scale",
        lambda c: c.noise.timestep_sampling == "sigma",
        "timestep_sampling is not sigma",
    ),
    (
        "logit_mean logit_std",
        lambda c: c.noise.weighting_scheme == "logit_normal",
        "weighting_scheme is not logit_normal",
    ),
    ("mode_scale", lambda c: c.noise.weighting_scheme == "mode", "weighting_scheme is not mode"),
    (
        "preserve_distribution_shape",
        lambda c: c.noise.timestep_range != (0.0, 1.0),
        "neither min_timestep nor max_timestep is set",
    ),
    (
        "preserve_distribution_shape",
        lambda c: c.noise.timestep_sampling != "sigma",
        "timestep_sampling = sigma draws from the steps of that range",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow(Noise):
    """Noise, timesteps and the type of the prediction."""

    timestep_sampling: Literal["sigma", "uniform", "sigmoid", "shift"] | str = opt(
        "sigma", "How timesteps are sampled."
    )
    discrete_flow_shift: float = opt(
        3.0,
        "Above 1 trains noisy timesteps more often: composition more than detail.",
        label="Flow shift",
        min=0.0,
    )
    sigmoid_scale: float = opt(1.0, "Above 1 trains very low and very high timesteps more often.", min=0.0)
    model_prediction_type: Literal["raw", "additive", "sigma_scaled"] = opt(
        "sigma_scaled",
        "How the prediction of the model is interpreted. raw is usual.",
        label="Prediction type",
    )
    weighting_scheme: Literal["sigma_sqrt", "logit_normal", "mode", "cosmap", "none", "uniform"] = opt(
        "uniform", "Weights timesteps, with sigma sampling (how often) or sigma_scaled prediction (loss)."
    )
    logit_mean: float = opt(0.0, "The mean of the weighting scheme logit_normal.", advanced=True)
    logit_std: float = opt(
        1.0,
        "The standard deviation of the weighting scheme logit_normal.",
        label="Logit standard deviation",
        min=0.0,
        advanced=True,
    )
    mode_scale: float = opt(1.29, "The scale of the weighting scheme mode.", advanced=True)
    preserve_distribution_shape: bool = opt(
        False,
        "Draw timesteps again until they are in the range, instead of scaling them into it.",
        label="Keep the distribution's shape",
        advanced=True,
    )
    always_weighted: ClassVar[bool] = False  # apply weighting_scheme even if the prediction is not sigma_scaled
    weighted_by_step: ClassVar[bool] = False  # weight by the nearest of 1000 timesteps, as in musubi-tuner
    size_shift: ClassVar[str]  # timestep_sampling with a shift by an image's number of tokens
    # Two numbers of tokens with the logarithm of their shift; others are interpolated linearly. FLUX's values.
    shift_line: ClassVar[tuple[tuple[int, float], tuple[int, float]]] = ((256, 0.5), (4096, 1.15))

    @property
    def timestep_range(self) -> tuple[float, float]:
        return (self.min_timestep or 0) / 1000, (1000 if self.max_timestep is None else self.max_timestep) / 1000

    @property
    def redraws_timesteps(self) -> bool:
        return self.preserve_distribution_shape and self.timestep_range != (0.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowLoss(Loss):
    """Loss function and loss weighting."""

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Reject losses that need a table of signal-to-noise ratios, which flow matching has none of."""
        if self.loss_type in ("huber", "smooth_l1") and self.huber_schedule == "snr":
            yield Problem(
                "huber_schedule",
                "= snr is not possible with this model and loss_type = {kind}: use constant",
                kind=self.loss_type,
                also="loss_type",
                fix={"huber_schedule": "constant"},
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetensorsSave(FullSave):
    """Like `FullSave`, for models that other programs read as safetensors only."""

    only_safetensors: ClassVar[bool] = True

    def notes(self, run: RunConfig) -> Iterator[Problem]:
        """Warn that only .safetensors is written."""
        if self.save_model_as not in (None, "safetensors"):
            yield Problem(
                "save_model_as",
                "has no effect here: this model is always saved as safetensors",
                fix={"save_model_as": None},
            )
