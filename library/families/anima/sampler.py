"""Sample images of Anima: Euler steps along the straight path, from seeded noise to an image."""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from library.families.base import SampleRequest
from library.families.shared import packing, qwen_vae
from library.families.shared.sampler import FlowSampler, sample_generator
from library.objectives import flow

if TYPE_CHECKING:
    from library.families.anima.family import AnimaFamily

SHIFT = 3.0  # shift of the sigmas at any image size, unless the prompt sets another


class AnimaSampler(FlowSampler):
    """Converts latents to tokens and back in each step, as the model has another channel order in its output."""

    family: "AnimaFamily"

    def latents(self, request: SampleRequest) -> Tensor:
        """Denoise from seeded noise; float32 [1, 16, h, w]. Prompt and negative prompt are one batch."""
        model = self.denoiser
        device = model.t_embedding_norm.weight.device
        height, width = self.grid(request)
        noise = torch.randn(1, model.sizes.channels // 4, 2 * height, 2 * width, generator=sample_generator(request))

        def velocity(text: Mapping[str, Tensor], latents: Tensor, times: Tensor) -> Tensor:
            output = model(packing.pack(latents), (height, width), *text.values(), times).float()
            return packing.unpack_channels_last(output, height, width)

        velocities = [functools.partial(velocity, text) for text in self.in_batches(self.text(request, device))]
        sigmas = anima_sigmas(request.steps, request.shift or SHIFT)
        return self.integrate(noise.to(device), sigmas, request, velocities)

    def decoder_input(self, latents: Tensor) -> Tensor:
        return qwen_vae.denormalise_qwen(latents)


def anima_sigmas(steps: int, shift: float = SHIFT) -> list[float]:
    return flow.shifted(torch.linspace(1, 0, steps + 1, dtype=torch.float64), shift).tolist()
