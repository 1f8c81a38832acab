"""Noise and timesteps of flow matching."""

from dataclasses import dataclass
from typing import Literal

from library.config.run_config import Rule
from library.config.schema import opt
from library.config.sections.learning import Noise

FLOW_RULES: tuple[Rule, ...] = (
    ("discrete_flow_shift", lambda c: c.noise.timestep_sampling in ("shift", "sigma"),
     "timestep_sampling is neither shift nor sigma"),
    ("weighting_scheme", lambda c: c.noise.timestep_sampling == "sigma"
     or c.noise.model_prediction_type == "sigma_scaled",
     "neither timestep_sampling is sigma nor model_prediction_type sigma_scaled"),
    ("logit_mean logit_std mode_scale", lambda c: c.noise.timestep_sampling == "sigma",
     "timestep_sampling is not sigma"),
    ("logit_mean logit_std", lambda c: c.noise.weighting_scheme == "logit_normal",
     "weighting_scheme is not logit_normal"),
    ("mode_scale", lambda c: c.noise.weighting_scheme == "mode", "weighting_scheme is not mode"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow(Noise):
    """How much noise a step has, and what the model answers."""

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
        "uniform", "How timesteps are weighted, with sigma sampling or sigma_scaled prediction."
    )
    logit_mean: float = opt(0.0, "The mean of logit_normal.", advanced=True)
    logit_std: float = opt(
        1.0, "The standard deviation of logit_normal.", label="Logit standard deviation", min=0.0, advanced=True
    )
    mode_scale: float = opt(1.29, "The scale of mode.", advanced=True)
