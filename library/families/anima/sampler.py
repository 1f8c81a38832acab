"""Sample images of Anima: Euler steps along the straight path, from seeded noise to an image."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from library.families.base import SampleRequest
from library.families.shared import packing, qwen_vae
from library.families.shared.sampler import Sampler, generator_of
from library.objectives import flow

if TYPE_CHECKING:
    from library.families.anima.family import AnimaFamily

SIDE = 16  # pixels of one token
SHIFT = 3.0  # of the sigmas, at any size of image, unless the prompt names another


class AnimaSampler(Sampler):
    """Euler steps, whatever sample_sampler says."""

    family: "AnimaFamily"

    def is_guided(self, request: SampleRequest) -> bool:
        """Whether the negative prompt is steered away from."""
        return request.scale > 1.0

    def latents(self, request: SampleRequest) -> Tensor:
        """Denoise from seeded noise; float32 [1, 16, h, w]. Prompt and negative prompt are one batch."""
        model = self.denoiser
        device = model.t_embedding_norm.weight.device
        height, width = (side // SIDE for side in self.size(request))
        text = [*self.text(request, device).values()]
        count = len(text[0])
        noise = torch.randn(1, model.sizes.channels // 4, 2 * height, 2 * width, generator=generator_of(request))
        latents = noise.to(device)
        sigmas = schedule(request.steps, request.shift or SHIFT)
        for now, after in zip(sigmas, sigmas[1:], strict=False):
            times = torch.full((count,), now, device=device)
            tokens = packing.pack(latents).expand(count, -1, -1)
            answer = packing.unpack_channels_last(model(tokens, (height, width), *text, times).float(), height, width)
            if count == 2:  # away from the negative prompt
                answer = answer[:1] + request.scale * (answer[1:] - answer[:1])
            latents = latents + (after - now) * answer
        return latents

    def decoder_input(self, latents: Tensor) -> Tensor:
        """Latents of the cache as the VAE takes them."""
        return qwen_vae.denormalised(latents)


def schedule(steps: int, shift: float = SHIFT) -> list[float]:
    """The steps + 1 sigmas of a sampling run, from 1 to 0."""
    return flow.shifted(torch.linspace(1, 0, steps + 1, dtype=torch.float64), shift).tolist()
