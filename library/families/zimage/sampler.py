"""Sample images of Z-Image: Euler steps along the straight path, from seeded noise to an image."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from library.families.base import SampleRequest
from library.families.shared import autoencoder
from library.families.shared.packing import pack_channels_last, unpack_channels_last
from library.families.shared.sampler import FlowSampler, seeded_noise
from library.families.zimage.facts import FACTS
from library.objectives import flow

if TYPE_CHECKING:
    from library.families.zimage.family import ZImageFamily

SHIFT = 3.0  # shift of the sigmas at any image size, unless the prompt sets another


class ZImageSampler(FlowSampler):
    """The model's time runs from noise to image, and its guidance scale starts at 0."""

    family: "ZImageFamily"

    def is_guided(self, request: SampleRequest) -> bool:
        return request.scale > FACTS.unguided_scale

    def guided(self, negative: Tensor, prompt: Tensor, scale: Tensor) -> Tensor:
        """Apply guidance like the model's own pipeline: a scale of 0 is the prompt alone."""
        return prompt + scale * (prompt - negative)

    def model_times(self, sigmas: Sequence[float]) -> list[float]:
        return [1 - sigma for sigma in sigmas]

    def latents(self, *requests: SampleRequest) -> Tensor:
        """Denoise from seeded noise; float32 [N, 16, h, w]. Prompts and negative prompts are one padded batch."""
        model = self.denoiser
        height, width = self.grid(requests[0])
        noise = seeded_noise(requests, model.sizes.in_channels // 4, 2 * height, 2 * width)
        tokens = pack_channels_last(noise).to(model.x_pad_token.device)

        def velocity(text: Mapping[str, Tensor], tokens: Tensor, times: Tensor) -> Tensor:
            return -model(tokens, (height, width), text["llm_embed"], text["llm_mask"], times).float()

        scale, shift = autoencoder.FLUX
        return unpack_channels_last(self.denoise(tokens, requests, velocity), height, width) / scale + shift

    def model_sigmas(self, steps: int, tokens: int) -> list[float]:
        line = torch.linspace(1, 1 / steps, steps, dtype=torch.float64)
        return [*flow.shifted(line, SHIFT).tolist(), 0.0]

    def decoder_input(self, latents: Tensor) -> Tensor:
        return latents
