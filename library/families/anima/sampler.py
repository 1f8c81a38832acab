"""Sample images of Anima: Euler steps along the straight path, from seeded noise to an image."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from library.families.base import SampleRequest
from library.families.shared import packing, qwen_vae
from library.families.shared.sampler import FlowSampler, seeded_noise
from library.objectives import flow

if TYPE_CHECKING:
    from library.families.anima.family import AnimaFamily

SHIFT = 3.0  # shift of the sigmas at any image size, unless the prompt sets another


class AnimaSampler(FlowSampler):
    """Converts latents to tokens and back in each step, as the model has another channel order in its output."""

    family: "AnimaFamily"

    def latents(self, *requests: SampleRequest) -> Tensor:
        """Denoise from seeded noise; float32 [N, 16, h, w]. Prompts and negative prompts are one batch."""
        model = self.denoiser
        height, width = self.grid(requests[0])
        noise = seeded_noise(requests, model.sizes.channels // 4, 2 * height, 2 * width)

        def velocity(text: Mapping[str, Tensor], latents: Tensor, times: Tensor) -> Tensor:
            output = model(packing.pack(latents), (height, width), *text.values(), times).float()
            return packing.unpack_channels_last(output, height, width)

        return self.denoise(noise.to(model.t_embedding_norm.weight.device), requests, velocity)

    def model_sigmas(self, steps: int, tokens: int) -> list[float]:
        return flow.shifted_line(steps, SHIFT)

    def decoder_input(self, latents: Tensor) -> Tensor:
        return qwen_vae.denormalise_qwen(self.components.vae, latents)
