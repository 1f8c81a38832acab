"""Sample images of FLUX.1: Euler steps along the straight path, from seeded noise to an image."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from library.families.base import SampleRequest
from library.families.shared import packing
from library.families.shared.sampler import Sampler, generator_of
from library.objectives import flow

if TYPE_CHECKING:
    from library.families.flux.family import FluxFamily

SIDE = 16  # pixels of one token


class FluxSampler(Sampler):
    """Euler steps, whatever sample_sampler says."""

    family: "FluxFamily"

    def is_guided(self, request: SampleRequest) -> bool:
        """Whether the negative prompt is steered away from."""
        return request.scale != 1.0

    def latents(self, request: SampleRequest) -> Tensor:
        """Denoise from seeded noise; float32 [1, C, h, w] in the cache's convention."""
        height, width = (side // SIDE for side in self.size(request))
        text = self.text(request, self.denoiser.img_in.weight.device)
        return packing.unpack(self.denoised(request, text, (height, width)), height, width)

    def denoised(self, request: SampleRequest, text: dict[str, Tensor], size: tuple[int, int]) -> Tensor:
        """Seeded noise, denoised; `size` counts tokens. Returns packed latents, float32 [1, h * w, 4 C]."""
        model = self.denoiser
        count, device = len(text["t5_out"]), model.img_in.weight.device
        noise = torch.randn(1, size[0] * size[1], model.sizes.in_channels, generator=generator_of(request))
        tokens = noise.to(device)
        strength = self.family.sample_defaults["guidance_scale"] if request.guidance is None else request.guidance
        guidance = torch.full((count,), strength, device=device)
        fixed = self.family.conditions(text, size, device) | {"guidance": guidance}
        sigmas = flow.schedule(request.steps, size[0] * size[1], shift=not model.sizes.is_schnell)
        for now, after in zip(sigmas, sigmas[1:], strict=False):
            times = torch.full((count,), now, device=device)
            velocity = model(img=tokens.expand(count, -1, -1), timesteps=times, **fixed).float()
            if count == 2:
                velocity = velocity[:1] + (velocity[1:] - velocity[:1]) * request.scale
            tokens = tokens + (after - now) * velocity
        return tokens

    def decoder_input(self, latents: Tensor) -> Tensor:
        """Latents of the cache as the autoencoder takes them."""
        return latents / self.family.scale + self.family.shift
