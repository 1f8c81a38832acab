"""Sample images of Qwen-Image: Euler steps along the straight path, from seeded noise to an image."""

import hashlib
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from library.families.base import SampleRequest
from library.families.qwen_image.options import SHIFT_LINE
from library.families.qwen_image.pictures import scaled_size
from library.families.shared import packing
from library.families.shared.qwen_vae import denormalise_qwen
from library.families.shared.sampler import FlowSampler, seeded_noise, to_pixels
from library.objectives import flow

if TYPE_CHECKING:
    from library.families.qwen_image.family import QwenFamily


class QwenSampler(FlowSampler):
    """The Edit models get reference images as additional tokens after the image's."""

    family: "QwenFamily"

    def guided(self, negative: Tensor, prompt: Tensor, scale: Tensor) -> Tensor:
        """Move away from the negative prompt, keeping the norm of the prompt's prediction for each token."""
        guided = super().guided(negative, prompt, scale)
        return guided * (prompt.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))

    def latents(self, *requests: SampleRequest) -> Tensor:
        """Denoise from seeded noise; float32 [N, 16, h, w]. Prompts and negative prompts are one padded batch."""
        model = self.denoiser
        device = model.img_in.weight.device
        height, width = self.grid(requests[0])
        noise = seeded_noise(requests, model.sizes.in_channels // 4, 2 * height, 2 * width)
        references = self.references(requests[0], device)
        reference_tokens, sizes = packing.pack_with_references(noise.to(device), references)
        tokens, reference_tokens = reference_tokens[:, : height * width], reference_tokens[:1, height * width :]

        def velocity(text: Mapping[str, Tensor], tokens: Tensor, times: Tensor) -> Tensor:
            img = torch.cat((tokens, reference_tokens.expand(len(tokens), -1, -1)), dim=1)
            return model(img, sizes, text["vl_embed"], text["vl_mask"], times).float()

        return packing.unpack(self.denoise(tokens, requests, velocity), height, width)

    def references(self, request: SampleRequest, device: torch.device) -> list[Tensor]:
        """Return latents of the reference images, as many as the model takes, each with its own proportions at the
        preview's number of pixels.
        """
        height, width = self.size(request)
        controls = request.controls[: self.family.variant.control_images.most]
        sizes = [scaled_size(control.size, height * width) for control in controls]
        pictures = [
            control.convert("RGB").resize(size, Image.Resampling.LANCZOS)
            for control, size in zip(controls, sizes, strict=True)
        ]
        return [self.encoded(to_pixels(picture).to(device)) for picture in pictures]

    def encode_request(self, request: SampleRequest) -> dict[str, Tensor]:
        """Encode the prompts, with the reference images if the text encoder reads these."""
        if not self.family.variant.template:
            return super().encode_request(request)
        images = request.controls[: self.family.variant.control_images.most]
        return self.family.text_with_pictures(self.components, [request.negative, request.prompt], [images, images])

    def text_key(self, request: SampleRequest) -> Hashable:
        """Add the images that the text encoder reads together with the prompt."""
        digests = [
            hashlib.blake2b(control.tobytes()).digest() for control in request.controls if self.family.variant.template
        ]
        return super().text_key(request), *digests

    def model_sigmas(self, steps: int, tokens: int) -> list[float]:
        return qwen_sigmas(steps, tokens)

    def decoder_input(self, latents: Tensor) -> Tensor:
        return denormalise_qwen(self.components.vae, latents)


def qwen_sigmas(steps: int, tokens: int) -> list[float]:
    return flow.stretched_sigmas(steps, flow.shift_of_tokens(tokens, SHIFT_LINE))
