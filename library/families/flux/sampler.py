"""Sample images of FLUX.1: Euler steps along the straight path, from seeded noise to an image."""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from library.families.base import SampleRequest
from library.families.flux import control_tokens
from library.families.shared import packing
from library.families.shared.sampler import FlowSampler, seeded_noise
from library.objectives import flow

if TYPE_CHECKING:
    from library.families.flux.family import FluxFamily


class FluxSampler(FlowSampler):
    """Kontext gets reference images as additional tokens, Fill as additional channels of each token."""

    family: "FluxFamily"

    def is_guided(self, request: SampleRequest) -> bool:
        return request.scale != 1.0

    def latents(self, *requests: SampleRequest) -> Tensor:
        """Denoise from seeded noise; float32 [N, C, h, w] in the cache's convention."""
        height, width = self.grid(requests[0])
        text = self.text(requests, self.denoiser.img_in.weight.device)
        controls = self.controls(requests[0], text["t5_out"].device)
        return packing.unpack(self.denoised(requests, text, (height, width), controls), height, width)

    def controls(self, request: SampleRequest, device: torch.device) -> list[Tensor]:
        """Return the control inputs for `predict`. To inpaint, a missing image is grey, a missing mask covers all."""
        (height, width), use = self.size(request), self.family.variant.control_images
        if not use.inpaints:
            sizes = [
                control_tokens.reference_size(control.size, height * width) for control in request.controls[: use.most]
            ]
            pictures = [control_tokens.scaled_pixels(*pair) for pair in zip(request.controls, sizes, strict=False)]
            return [self.encoded(picture.to(device)) for picture in pictures]
        image = torch.zeros(1, 3, height, width)
        mask = torch.ones(1, 1, height, width)
        if request.controls:
            image = control_tokens.scaled_pixels(request.controls[0], (width, height))
        if request.mask:
            mask = control_tokens.scaled_paint_mask(request.mask, (width, height))
        return [self.encoded((image * (1 - mask)).to(device)), mask.to(device)]

    def denoised(
        self,
        requests: Sequence[SampleRequest],
        text: dict[str, Tensor],
        size: tuple[int, int],
        controls: Sequence[Tensor] = (),
    ) -> Tensor:
        """Denoise from seeded noise; `size` counts tokens. Return packed latents, float32 [N, h * w, 4 C]."""
        model, inpaints = self.denoiser, self.family.variant.control_images.inpaints
        device, usual = model.img_in.weight.device, self.family.sample_defaults["guidance_scale"]
        noise = seeded_noise(requests, size[0] * size[1], model.sizes.out_channels)
        strengths = [usual if request.guidance is None else request.guidance for request in requests]
        references = [] if inpaints else [*map(packing.token_grid, controls)]
        more = control_tokens.packed(controls, inpaints)

        def velocity(conditions: Mapping[str, Any], tokens: Tensor, times: Tensor) -> Tensor:
            img = control_tokens.add_control_tokens(tokens, more, inpaints)
            return model(img=img, timesteps=times, **conditions)[:, : tokens.shape[1]].float()

        velocities = []
        for part in self.in_batches(text):
            guidance = torch.tensor(strengths, device=device).repeat(len(part["t5_out"]) // len(requests))
            conditions = self.family.conditions(part, size, device, references) | {"guidance": guidance}
            velocities.append(functools.partial(velocity, conditions))
        return self.integrate(noise.to(device), self.sigmas(requests[0], size[0] * size[1]), requests, velocities)

    def model_sigmas(self, steps: int, tokens: int) -> list[float]:
        return flow.flow_sigmas(steps, tokens, shift=not self.denoiser.sizes.is_schnell)

    def decoder_input(self, latents: Tensor) -> Tensor:
        return latents / self.family.scale + self.family.shift
