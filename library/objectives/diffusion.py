"""Noise prediction on a discrete schedule of 1000 steps (SDXL): noised latents, targets and loss weights.

All values come from tables on the latents' device, so a training step never waits for the device. Formulas: DDPM (arXiv
2006.11239), v-prediction (2202.00512), zero terminal SNR (2305.08891), min-SNR (2303.09556), input perturbation
(2301.11706); combined as in kohya-ss/sd-scripts.
"""

import hashlib
import random
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from library.config import sections
from library.objectives.base import NoisedBatch

STEPS = 1000
BETA_START, BETA_END = 0.00085, 0.012
LARGEST_SNR = 1000.0  # clips the ratio of the first, nearly noise-free steps


def betas() -> Tensor:
    """Return the schedule that all Stable Diffusion models were trained with ("scaled linear"), float32 [1000]."""
    return torch.linspace(BETA_START**0.5, BETA_END**0.5, STEPS, dtype=torch.float32) ** 2


def alphas(terminal_zero: bool = False) -> Tensor:
    """Return cumulative products of 1 - beta (abar), float32 [1000]; with `terminal_zero` rescaled to end in zero."""
    alpha_bar = torch.cumprod(1.0 - betas(), dim=0)
    if not terminal_zero:
        return alpha_bar
    root = alpha_bar.sqrt()
    return ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2


def diffusion_loss_weights(loss: sections.Loss, v_prediction: bool) -> Tensor:
    """Return the loss weight of each timestep, float32 [1000]: the product of all enabled weightings.

    The signal-to-noise ratio is that before `zero_terminal_snr`, as in sd-scripts.
    """
    alpha_bar = alphas()
    snr = alpha_bar / (1.0 - alpha_bar)
    clipped = snr.clamp(max=LARGEST_SNR)
    weights = torch.ones(STEPS)
    if loss.min_snr_gamma:
        weights = weights * snr.clamp(max=loss.min_snr_gamma) / (snr + 1.0 if v_prediction else snr)
    if loss.scale_v_pred_loss_like_noise_pred:
        weights = weights * clipped / (clipped + 1.0)
    if loss.v_pred_like_loss:
        weights = weights * (1.0 + loss.v_pred_like_loss * (clipped + 1.0) / clipped)
    if loss.debiased_estimation_loss:
        weights = weights / (clipped + 1.0) if v_prediction else weights / clipped.sqrt()
    return weights


def huber_thresholds(loss: sections.Loss, alpha_bar: Tensor) -> Tensor | None:
    """Return the threshold c of the huber and smooth_l1 losses by timestep, float32 [1000]; None for other losses."""
    if loss.loss_type not in ("huber", "smooth_l1"):
        return None
    if loss.huber_schedule == "exponential":
        return loss.huber_c ** (torch.arange(STEPS, dtype=torch.float32) / STEPS) * loss.huber_scale
    if loss.huber_schedule == "snr":
        sigmas = ((1.0 - alpha_bar) / alpha_bar).sqrt()
        return (1.0 - loss.huber_c) / (1.0 + sigmas) ** 2 + loss.huber_c
    return torch.full((STEPS,), loss.huber_c * loss.huber_scale)


@dataclass(frozen=True)
class Tables:
    """Values by timestep, each float32 [1000] on one device."""

    signal: Tensor  # sqrt(abar)
    noise: Tensor  # sqrt(1 - abar)
    weight: Tensor
    huber_c: Tensor | None


class Diffusion:
    """The training objective of one run.

    `noise` and `loss` are the config's sections of these names; cached latents (raw VAE samples) times `scale`
    are in the model's units.
    """

    def __init__(self, noise: sections.Noise, loss: sections.Loss, v_prediction: bool = False, scale: float = 0.13025):
        self.options, self.v_prediction, self.scale = noise, v_prediction, scale
        alpha_bar = alphas(noise.zero_terminal_snr)
        thresholds = huber_thresholds(loss, alpha_bar)
        self._host = Tables(
            alpha_bar.sqrt(), (1.0 - alpha_bar).sqrt(), diffusion_loss_weights(loss, v_prediction), thresholds
        )
        self._tables: dict[torch.device, Tables] = {}

    def tables(self, device: torch.device) -> Tables:
        """Return the tables on a device, copied there once."""
        if device not in self._tables:
            host = self._host
            thresholds = None if host.huber_c is None else host.huber_c.to(device)
            moved = (host.signal.to(device), host.noise.to(device), host.weight.to(device))
            self._tables[device] = Tables(*moved, thresholds)
        return self._tables[device]

    def noised(self, latents: Tensor, generator: torch.Generator, timesteps: Tensor | None = None) -> NoisedBatch:
        """Raw latents [B, C, h, w] -> the input of the denoiser and its target, float32.

        `generator` lives on the latents' device. `timesteps` [B] are drawn unless given (validation).
        """
        clean = latents.float() * self.scale
        table = self.tables(clean.device)
        noise = self.noise(clean, generator)
        if timesteps is None:
            timesteps = self.timesteps(len(clean), clean.device, generator)
        signal_share = table.signal[timesteps].view(-1, 1, 1, 1)
        noise_share = table.noise[timesteps].view(-1, 1, 1, 1)
        added = self.perturbed(noise, generator)
        return NoisedBatch(
            latents=signal_share * clean + noise_share * added,
            timesteps=timesteps.float(),
            target=signal_share * noise - noise_share * clean if self.v_prediction else noise,
            weight=table.weight[timesteps],
            sigmas=None,
            huber_c=None if table.huber_c is None else table.huber_c[timesteps],
        )

    def timesteps(self, count: int, device: torch.device, generator: torch.Generator) -> Tensor:
        """Draw one timestep per image, uniform in [min_timestep, max_timestep); int64 [count]."""
        low = self.options.min_timestep or 0
        high = STEPS if self.options.max_timestep is None else self.options.max_timestep
        if low >= high:
            return torch.full((count,), min(high, STEPS - 1), device=device, dtype=torch.int64)
        return torch.randint(low, high, (count,), generator=generator, device=device)

    def noise(self, clean: Tensor, generator: torch.Generator) -> Tensor:
        """Return the noise to predict: Gaussian, optionally with an offset per channel and a pyramid of
        coarser noise.
        """
        options = self.options
        noise = _normal(clean.shape, clean, generator)
        if options.noise_offset:
            noise = noise + self.offset(clean, generator) * _normal((*clean.shape[:2], 1, 1), clean, generator)
        if options.multires_noise_iterations:
            noise = self.pyramid(noise, generator)
        return noise

    def offset(self, clean: Tensor, generator: torch.Generator) -> Tensor | float:
        """Return the strength of the offset noise: one number, or [B, C, 1, 1] if it follows the latents' means."""
        options, strength = self.options, self.options.noise_offset or 0.0
        if options.noise_offset_random_strength:
            strength = strength * torch.rand(1, generator=generator, device=clean.device)
        if options.adaptive_noise_scale:
            means = clean.mean(dim=(2, 3), keepdim=True).abs()
            strength = (strength + options.adaptive_noise_scale * means).clamp(min=0.0)
        return strength

    def pyramid(self, noise: Tensor, generator: torch.Generator) -> Tensor:
        """Add noise at ever coarser sizes with falling weight, rescaled to a standard deviation of one.

        https://wandb.ai/johnowhitaker/multires_noise
        """
        # The host needs the sizes, so they are drawn from the generator's state, which it knows; reading drawn values
        # would wait for the device.
        height, width = noise.shape[-2:]
        host_random = _host_random(generator)
        for i in range(self.options.multires_noise_iterations or 0):
            ratio = (2.0 + 2.0 * host_random.random()) ** i
            size = (max(1, int(height / ratio)), max(1, int(width / ratio)))
            coarse = _normal((*noise.shape[:2], *size), noise, generator)
            grown = functional.interpolate(coarse, size=(height, width), mode="bilinear")
            noise = noise + grown * self.options.multires_noise_discount**i
            if 1 in size:
                break
        return noise / noise.std()

    def perturbed(self, noise: Tensor, generator: torch.Generator) -> Tensor:
        """Return the noise to add: with `ip_noise_gamma` slightly more than the target contains."""
        options, gamma = self.options, self.options.ip_noise_gamma
        if not gamma:
            return noise
        if options.ip_noise_gamma_random_strength:
            gamma = gamma * torch.rand(1, generator=generator, device=noise.device)
        return noise + gamma * _normal(noise.shape, noise, generator)


def _normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=like.device, dtype=torch.float32)


def _host_random(generator: torch.Generator) -> random.Random:
    # Seeded by the generator's state, which a resumed run restores.
    state = generator.get_state().numpy().tobytes()
    return random.Random(hashlib.blake2b(state, digest_size=8).digest())
