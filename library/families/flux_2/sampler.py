"""Sample images of FLUX.2: Euler steps along the straight path, from seeded noise to an image."""

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from library.families.base import SampleRequest
from library.families.flux_2.model import append_controls
from library.families.shared import packing, statistics_vae
from library.families.shared.sampler import TOKEN, FlowSampler, seeded_noise
from library.objectives import flow

if TYPE_CHECKING:
    from library.families.flux_2.family import Flux2Family

MAX_REFERENCE_PIXELS = 1024 * 1024  # maximum pixels of a reference image; larger ones are scaled down
# Linear functions of the number of image tokens: mu for 10 and for 200 steps.
MU_OF_10_STEPS, MU_OF_200_STEPS = (8.73809524e-05, 1.89833333), (0.00016927, 0.45666666)
MAX_STEP_DEPENDENT_TOKENS = 4300  # with more tokens, the number of steps has no effect


class Flux2Sampler(FlowSampler):
    """Reference images follow the image as additional tokens."""

    family: "Flux2Family"

    def latents(self, *requests: SampleRequest) -> Tensor:
        """Denoise from seeded noise; float32 [N, 32, h, w] in the cache's convention."""
        model = self.denoiser
        device = model.img_in.weight.device
        height, width = self.grid(requests[0])
        controls = [self.encoded(control, device) for control in requests[0].controls]
        noise = seeded_noise(requests, model.sizes.in_channels, height, width)
        tokens = noise.flatten(2).transpose(1, 2).to(device)
        usual = self.family.sample_defaults.get("guidance_scale", 1.0)
        strengths = [usual if request.guidance is None else request.guidance for request in requests]

        def velocity(conditions: Mapping[str, Any], tokens: Tensor, times: Tensor) -> Tensor:
            output = model(img=append_controls(tokens, controls), timesteps=times, **conditions)
            return output[:, : tokens.shape[1]].float()

        velocities = []
        for text in self.in_batches(self.text(requests, device)):
            guidance = torch.tensor(strengths, device=device).repeat(len(text["ctx_vec"]) // len(requests))
            conditions = self.family.conditions(text, (height, width), device, controls) | {"guidance": guidance}
            velocities.append(functools.partial(velocity, conditions))
        tokens = self.integrate(tokens, self.sigmas(requests[0], height * width), requests, velocities)
        return packing.unpack(tokens, height, width)

    def encoded(self, picture: Image.Image, device: torch.device) -> Tensor:
        with self.vae_on(device):
            return self.family.control_latents(self.components, reference_pixels(picture).to(device))

    def model_sigmas(self, steps: int, tokens: int) -> list[float]:
        return flux_2_sigmas(steps, tokens)

    def decoder_input(self, latents: Tensor) -> Tensor:
        return statistics_vae.denormalised(self.components.vae, latents)


def reference_pixels(picture: Image.Image) -> Tensor:
    """Return a reference image as [1, 3, H, W] in -1..1: scaled down to at most MAX_REFERENCE_PIXELS, and cropped
    around its centre to whole tokens.
    """
    picture = picture.convert("RGB")
    width, height = picture.size
    if width * height > MAX_REFERENCE_PIXELS:
        scale = math.sqrt(MAX_REFERENCE_PIXELS / (width * height))
        picture = picture.resize((int(width * scale), int(height * scale)), Image.Resampling.LANCZOS)
        width, height = picture.size
    inner = max(width // TOKEN, 1) * TOKEN, max(height // TOKEN, 1) * TOKEN
    left, top = (width - inner[0]) // 2, (height - inner[1]) // 2
    picture = picture.crop((left, top, left + inner[0], top + inner[1]))
    return torch.from_numpy(np.asarray(picture).astype("float32") / 255).permute(2, 0, 1)[None] * 2 - 1


def empirical_mu(tokens: int, steps: int) -> float:
    """Return the shift of the sigmas for a number of steps, by the empirical formula of the model's pipeline."""
    (slope_10, base_10), (slope_200, base_200) = MU_OF_10_STEPS, MU_OF_200_STEPS
    mu_200 = slope_200 * tokens + base_200
    if tokens > MAX_STEP_DEPENDENT_TOKENS:
        return mu_200
    per_step = (mu_200 - slope_10 * tokens - base_10) / 190
    return mu_200 + per_step * (steps - 200)


def flux_2_sigmas(steps: int, tokens: int) -> list[float]:
    line = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return flow.shifted(line, math.exp(empirical_mu(tokens, steps))).tolist()
