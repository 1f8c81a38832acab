"""Flow matching: noised latents, targets, timestep sampling, and loss weights.

sigma in [0, 1] is the share of noise: x = (1 - sigma) * x0 + sigma * noise; the target is noise - x0 for every
prediction type. A FLUX timestep is 1000 * sigma; our denoiser takes sigma itself. Formulas are those of
kohya-ss/sd-scripts, or of kohya-ss/musubi-tuner for the models that it trains. All values stay on the latents' device:
nothing here synchronises.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from library.config import sections
from library.config.problems import ConfigError
from library.objectives.base import NoisedBatch

Line = tuple[tuple[int, float], tuple[int, float]]  # two points: number of image tokens, and mu
DEFAULT_SHIFT_LINE: Line = sections.Flow.shift_line
TABLE = 1000  # length of the table that `timestep_sampling = sigma` draws from
LAST_SIGMA = 0.02  # of the last step of `stretched_sigmas`
REDRAWS = 1000  # draws per image with preserve_distribution_shape, all at once, so that nothing synchronises
NO_SNR = "huber_schedule: snr needs a schedule that flow matching does not have; set it to constant or exponential"


def noised(
    latents: Tensor,
    noise: sections.Flow,
    loss: sections.Loss,
    generator: torch.Generator,
    sigmas: Tensor | None = None,
) -> NoisedBatch:
    """Mix noise into latents [B, C, h, w] by the options of the sections `noise` and `loss`; all float32.

    The generator is on the latents' device; noise, timesteps and perturbation are drawn from it in this order. `sigmas`
    [B] are drawn unless given.
    """
    latents = latents.float()
    eps = _normal(latents, generator)
    sigmas = sampled(latents, noise, generator) if sigmas is None else sigmas.float()
    share = sigmas.view(-1, 1, 1, 1)
    return NoisedBatch(
        latents=(1 - share) * latents + share * (eps + perturbation(latents, noise, generator)),
        timesteps=sigmas,
        target=eps - latents,
        weight=flow_loss_weights(sigmas, noise),
        sigmas=sigmas,
        huber_c=huber_threshold(sigmas, loss),
    )


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, dtype=torch.float32, device=like.device, generator=generator)


def perturbation(latents: Tensor, noise: sections.Flow, generator: torch.Generator) -> Tensor | float:
    """Return noise in the model's input that the target does not contain (ip_noise_gamma), or 0."""
    if not noise.ip_noise_gamma:
        return 0.0
    strength: Tensor | float = noise.ip_noise_gamma
    if noise.ip_noise_gamma_random_strength:
        strength = strength * torch.rand((), device=latents.device, generator=generator)
    return strength * _normal(latents, generator)


def sampled(latents: Tensor, noise: sections.Flow, generator: torch.Generator) -> Tensor:
    """Return one sigma per image [B], distributed by timestep_sampling, between min_timestep and max_timestep.

    A distribution is scaled into that range as in musubi-tuner, or drawn from until it falls inside.
    """
    count, (low, high) = latents.shape[0], noise.timestep_range
    if noise.timestep_sampling != "sigma" and noise.redraws_timesteps:
        return sigmas_in_range(drawn(count * REDRAWS, latents, noise, generator), count, low, high)
    sigmas = drawn(count, latents, noise, generator)
    return sigmas if noise.timestep_sampling == "sigma" else sigmas * (high - low) + low


def sigmas_in_range(sigmas: Tensor, count: int, low: float, high: float) -> Tensor:
    """Return the first `count` of these sigmas in the range; if too few, scale others into it."""
    fits = (sigmas >= low) & (sigmas <= high)
    order = torch.argsort((~fits).to(torch.uint8), stable=True)[:count]
    chosen = sigmas[order]
    return torch.where(fits[order], chosen, chosen * (high - low) + low)


def drawn(count: int, latents: Tensor, noise: sections.Flow, generator: torch.Generator) -> Tensor:
    """Draw sigmas [count], distributed by timestep_sampling; flux_shift depends on the latents' size."""
    device = latents.device

    def uniform() -> Tensor:
        return torch.rand(count, device=device, generator=generator)

    def normal() -> Tensor:
        return torch.randn(count, device=device, generator=generator)

    if noise.timestep_sampling == "uniform":
        return uniform()
    if noise.timestep_sampling == "sigma":
        return from_table(density(noise, uniform, normal), noise.discrete_flow_shift, *noise.timestep_range)
    sigmas = torch.sigmoid(noise.sigmoid_scale * normal())
    if noise.timestep_sampling == "sigmoid":
        return sigmas
    if noise.timestep_sampling == noise.size_shift:
        return shifted(sigmas, math.exp(shift_of_size(latents.shape[-2], latents.shape[-1], noise.shift_line)))
    return shifted(sigmas, noise.discrete_flow_shift)


def density(noise: sections.Flow, uniform: Callable[[], Tensor], normal: Callable[[], Tensor]) -> Tensor:
    """Draw a position in the table per image, in [0, 1]: the part of weighting_scheme that chooses timesteps."""
    if noise.weighting_scheme == "logit_normal":
        return torch.sigmoid(noise.logit_mean + noise.logit_std * normal())
    u = uniform()
    if noise.weighting_scheme == "mode":
        return 1 - u - noise.mode_scale * (torch.cos(math.pi * u / 2) ** 2 - 1 + u)
    return u


def from_table(u: Tensor, shift: float, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Positions in [0, 1] -> sigmas in the table of 1000 shifted steps, from `high`, the noisiest, to above `low`."""
    first, end = (math.ceil(round(TABLE * (1 - unshifted(sigma, shift)), 6)) for sigma in (high, low))
    first = min(first, TABLE - 1)
    index = torch.floor((end - first) * u + first).clamp(first, max(first, end - 1))
    return shifted((TABLE - index) / TABLE, shift)


def unshifted(sigma: float, shift: float) -> float:
    return sigma / (shift - (shift - 1) * sigma) if 0 < sigma < 1 else sigma


def shifted(sigmas: Tensor, shift: float) -> Tensor:
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def shifted_line(steps: int, shift: float) -> list[float]:
    """Return the steps + 1 sigmas of a sampling run: equal steps from 1 to 0, shifted."""
    return shifted(torch.linspace(1, 0, steps + 1, dtype=torch.float64), shift).tolist()


def shift_of_tokens(tokens: int, line: Line = DEFAULT_SHIFT_LINE) -> float:
    """Return mu for a number of image tokens: linear through two points and beyond. The shift is e^mu."""
    (first_tokens, first_mu), (second_tokens, second_mu) = line
    return first_mu + (tokens - first_tokens) * (second_mu - first_mu) / (second_tokens - first_tokens)


def shift_of_size(height: int, width: int, line: Line = DEFAULT_SHIFT_LINE) -> float:
    """Return mu for latents of a height and width; a token is a square of 2 by 2."""
    return shift_of_tokens((height // 2) * (width // 2), line)


def flow_sigmas(steps: int, tokens: int, shift: bool = True) -> list[float]:
    """Return the steps + 1 sigmas of a sampling run, from 1 to 0; shifted by the number of tokens (dev) or not
    (schnell).
    """
    line = torch.linspace(1, 0, steps + 1)
    return (shifted(line, math.exp(shift_of_tokens(tokens))) if shift else line).tolist()


def stretched_sigmas(steps: int, mu: float) -> list[float]:
    """Return the steps + 1 sigmas of a sampling run: shifted by e^mu, stretched so that the last step begins at
    LAST_SIGMA, then 0.
    """
    left = 1 - shifted(torch.linspace(1, 1 / steps, steps, dtype=torch.float64), math.exp(mu))
    if steps > 1:
        left = left * ((1 - LAST_SIGMA) / left[-1])
    return [*(1 - left).tolist(), 0.0]


def flow_loss_weights(sigmas: Tensor, noise: sections.Flow) -> Tensor:
    """Return the loss weight of each image [B]: weighting_scheme, which FLUX.1 applies only to sigma_scaled
    predictions.
    """
    if noise.model_prediction_type != "sigma_scaled" and not noise.always_weighted:
        return torch.ones_like(sigmas)
    if noise.weighted_by_step and noise.timestep_sampling != "sigma":
        # musubi-tuner looks up the nearest timestep in its table of 1000, counted from 1.
        sigmas = (sigmas * TABLE + 1).round().clamp(1, TABLE) / TABLE
    if noise.weighting_scheme == "sigma_sqrt":
        return sigmas.clamp_min(1e-6) ** -2  # a sigma of exactly 0 would get infinite weight
    if noise.weighting_scheme == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))
    return torch.ones_like(sigmas)


def huber_threshold(sigmas: Tensor, loss: sections.Loss) -> Tensor | None:
    """Return the threshold between square and linear of huber and smooth_l1 [B]; None for other losses."""
    if loss.loss_type not in ("huber", "smooth_l1"):
        return None
    if loss.huber_schedule == "constant":
        return torch.full_like(sigmas, loss.huber_c * loss.huber_scale)
    if loss.huber_schedule == "exponential":
        return loss.huber_c**sigmas * loss.huber_scale
    raise ConfigError(NO_SNR)


def prediction(output: Tensor, noisy: Tensor, sigmas: Tensor | None, kind: str) -> Tensor:
    """Convert the model's output to what is compared with the target, by model_prediction_type."""
    if kind == "raw":
        return output
    if kind == "additive":
        return output + noisy
    assert sigmas is not None  # a NoisedBatch of flow matching always has them
    return output * -sigmas.view(-1, 1, 1, 1) + noisy
