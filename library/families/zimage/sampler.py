"""Sample images of Z-Image: Euler steps along the straight path, from seeded noise to an image."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from library.families.base import SampleRequest
from library.families.shared import autoencoder
from library.families.shared.packing import pack_channels_last, unpack_channels_last
from library.families.shared.sampler import Sampler, generator_of
from library.objectives import flow

if TYPE_CHECKING:
    from library.families.zimage.family import ZImageFamily

SIDE = 16  # pixels of one token
SHIFT = 3.0  # of the sigmas, at any size of image, unless the prompt names another


class ZImageSampler(Sampler):
    """Euler steps, whatever sample_sampler says."""

    family: "ZImageFamily"

    def is_guided(self, request: SampleRequest) -> bool:
        """Whether the negative prompt is steered away from."""
        return request.scale > 0.0

    def latents(self, request: SampleRequest) -> Tensor:
        """Denoise from seeded noise; float32 [1, 16, h, w]. Prompt and negative prompt are one padded batch."""
        model = self.denoiser
        device = model.x_pad_token.device
        height, width = (side // SIDE for side in self.size(request))
        text = self.text(request, device)
        count = len(text["llm_embed"])
        noise = torch.randn(1, model.sizes.in_channels // 4, 2 * height, 2 * width, generator=generator_of(request))
        tokens = pack_channels_last(noise).to(device)
        sigmas = schedule(request.steps, request.shift or SHIFT)
        for now, after in zip(sigmas, sigmas[1:], strict=False):
            times = torch.full((count,), 1 - now, device=device)
            shown = tokens.expand(count, -1, -1)
            answer = model(shown, (height, width), text["llm_embed"], text["llm_mask"], times).float()
            if count == 2:  # away from the negative prompt, from the prompt on
                answer = answer[1:] + request.scale * (answer[1:] - answer[:1])
            tokens = tokens - (after - now) * answer
        scale, shift = autoencoder.FLUX
        return unpack_channels_last(tokens, height, width) / scale + shift

    def decoder_input(self, latents: Tensor) -> Tensor:
        """Latents of the cache are what the autoencoder takes."""
        return latents


def schedule(steps: int, shift: float = SHIFT) -> list[float]:
    """The steps + 1 sigmas of a sampling run, from 1 to 0."""
    line = torch.linspace(1, 1 / steps, steps, dtype=torch.float64)
    return [*flow.shifted(line, shift).tolist(), 0.0]
