"""Sample images of Krea 2: Euler steps along the straight path, from seeded noise to an image."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from library.families.base import SampleRequest
from library.families.krea_2.options import SHIFT_LINE
from library.families.shared.packing import pack, unpack
from library.families.shared.qwen_vae import denormalise_qwen
from library.families.shared.sampler import FlowSampler, seeded_noise
from library.objectives import flow

if TYPE_CHECKING:
    from library.families.krea_2.family import Krea2Family

TURBO_MU = 1.15  # of Turbo at any size of image; Raw's follows SHIFT_LINE


class Krea2Sampler(FlowSampler):
    """Guidance as of most models, whose scale is 1 more than that of diffusers' pipeline."""

    family: "Krea2Family"

    def latents(self, *requests: SampleRequest) -> Tensor:
        """Denoise from seeded noise; float32 [N, 16, h, w]. Prompts and negative prompts are one padded batch."""
        model = self.denoiser
        height, width = self.grid(requests[0])
        noise = seeded_noise(requests, model.sizes.in_channels // 4, 2 * height, 2 * width)
        tokens = pack(noise).to(model.first.weight.device)

        def velocity(text: Mapping[str, Tensor], tokens: Tensor, times: Tensor) -> Tensor:
            return model(tokens, (height, width), text["krea2_vl_embed"], text["krea2_vl_mask"], times).float()

        return unpack(self.denoise(tokens, requests, velocity), height, width)

    def model_sigmas(self, steps: int, tokens: int) -> list[float]:
        """Return a line from 1 shifted by the number of tokens, or by Turbo's own shift, and 0."""
        mu = TURBO_MU if self.family.is_turbo else flow.shift_of_tokens(tokens, SHIFT_LINE)
        line = torch.linspace(1, 1 / steps, steps, dtype=torch.float64)
        return [*flow.shifted(line, math.exp(mu)).tolist(), 0.0]

    def decoder_input(self, latents: Tensor) -> Tensor:
        return denormalise_qwen(self.components.vae, latents)
