"""Sample images of FLUX.2: Euler steps along the straight path, from seeded noise to an image."""

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from library.families.base import SampleRequest
from library.families.flux_2.model import append_controls
from library.families.shared import packing, statistics_vae
from library.families.shared.sampler import FlowSampler, crop_to_tokens, seeded_noise, to_pixels
from library.objectives import flow

if TYPE_CHECKING:
    from library.families.flux_2.family import Flux2Family

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
        controls = [
            self.encoded(to_pixels(crop_to_tokens(control.convert("RGB"))).to(device))
            for control in requests[0].controls
        ]
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

    def model_sigmas(self, steps: int, tokens: int) -> list[float]:
        return flow.shifted_line(steps, math.exp(empirical_mu(tokens, steps)))

    def decoder_input(self, latents: Tensor) -> Tensor:
        return statistics_vae.denormalised(self.components.vae, latents)


def empirical_mu(tokens: int, steps: int) -> float:
    """Return the shift of the sigmas for a number of steps, by the empirical formula of the model's pipeline."""
    (slope_10, base_10), (slope_200, base_200) = MU_OF_10_STEPS, MU_OF_200_STEPS
    mu_200 = slope_200 * tokens + base_200
    if tokens > MAX_STEP_DEPENDENT_TOKENS:
        return mu_200
    per_step = (mu_200 - slope_10 * tokens - base_10) / 190
    return mu_200 + per_step * (steps - 200)
