"""Sample images of Qwen-Image-2.1: Euler steps along the straight path, from seeded noise to an image."""

import functools
import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from library.families.base import SampleRequest
from library.families.qwen_image_21.model import KnownCondition, Size
from library.families.qwen_image_21.options import MAX_REFERENCES, SHIFT_LINE
from library.families.qwen_image_21.vae import denormalise_qwen_21
from library.families.shared.chat_images import scaled_size
from library.families.shared.packing import pack, token_grid, unpack
from library.families.shared.sampler import FlowSampler, seeded_noise, to_pixels
from library.objectives import flow

if TYPE_CHECKING:
    from library.families.qwen_image_21.family import Qwen21Family

SPARE_SHARE = 4  # times the memory of a condition's keys and values that must be free: recorded steps hold a copy
TURBO_SIGMAS = (1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568)  # that Turbo was distilled for


class Qwen21Sampler(FlowSampler):
    """Reference images stand inside of the text, and are read by the text encoder, too."""

    family: "Qwen21Family"

    def latents(self, *requests: SampleRequest) -> Tensor:
        """Denoise from seeded noise; float32 [N, 16, h, w]. Prompts and negative prompts are one padded batch."""
        model = self.denoiser
        device = model.img_in.weight.device
        height, width = self.grid(requests[0])
        noise = seeded_noise(requests, model.sizes.in_channels, height, width)
        tokens = noise.flatten(2).transpose(1, 2).to(device)
        references = self.references(requests[0], device)
        sizes = [(height, width), *map(token_grid, references)]
        leads = self.family.leads[: len(references)] if references else ()
        shown = [pack(image) for image in references]

        def velocity(text: Mapping[str, Tensor], known: KnownCondition | None, tokens: Tensor, times: Tensor) -> Tensor:
            pictures = [] if known else [image.expand(len(tokens), -1, -1) for image in shown]
            words = [text[key] for key in self.family.text_cache.keys]
            return model(torch.cat((tokens, *pictures), dim=1), sizes, *words, times, leads, known).float()

        def prepared(text: Mapping[str, Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
            known = self.known_condition(text[self.family.text_cache.keys[0]], shown, sizes[1:], leads)
            return functools.partial(velocity, text, known)

        velocities = [prepared(text) for text in self.in_batches(self.text(requests, device))]
        tokens = self.integrate(tokens, self.sigmas(requests[0], height * width), requests, velocities)
        return unpack(tokens, height, width)

    def known_condition(
        self, txt: Tensor, references: Sequence[Tensor], sizes: Sequence[Size], leads: Sequence[int]
    ) -> KnownCondition | None:
        """Return what all steps read of the condition; None if there is no room to keep it.

        `references` are the tokens [1, h * w, channels] of each reference image.
        """
        model, number = self.denoiser, len(txt)
        tokens = txt.shape[1] + sum(image.shape[1] for image in references)
        numbers = 2 * len(model.transformer_blocks) * number * tokens * model.sizes.hidden
        room = self.room_to_keep()
        if room is not None and room < SPARE_SHARE * numbers * model.img_in.weight.element_size():
            return None
        images = [txt.new_zeros(number, 0, model.sizes.in_channels)]
        images += [image.to(txt.device).expand(number, -1, -1) for image in references]
        return model.know_condition(torch.cat(images, dim=1), sizes, txt, leads)

    def references(self, request: SampleRequest, device: torch.device) -> list[Tensor]:
        return [self.encoded(to_pixels(picture).to(device)) for picture in self.scaled_references(request)]

    def scaled_references(self, request: SampleRequest) -> list[Image.Image]:
        """Return the reference images, each with its own proportions at the preview's number of pixels."""
        height, width = self.size(request)
        return [scaled_reference(picture, height * width) for picture in request.controls[:MAX_REFERENCES]]

    def encode_request(self, request: SampleRequest) -> dict[str, Tensor]:
        """Encode the prompts with the reference images."""
        images = self.scaled_references(request)
        return self.family.text_with_pictures(self.components, [request.negative, request.prompt], [images, images])

    def text_key(self, request: SampleRequest) -> Hashable:
        """Add the images that the text encoder reads together with the prompt."""
        digests = [hashlib.blake2b(control.tobytes()).digest() for control in request.controls]
        return super().text_key(request), *([self.size(request)] if digests else []), *digests

    def model_sigmas(self, steps: int, tokens: int) -> list[float]:
        """Return the sigmas of the pipeline: shifted for the number of tokens, or Turbo's own for its steps."""
        if self.family.is_turbo and steps == len(TURBO_SIGMAS):
            return [*TURBO_SIGMAS, 0.0]
        return flow.stretched_sigmas(steps, flow.shift_of_tokens(tokens, SHIFT_LINE))

    def decoder_input(self, latents: Tensor) -> Tensor:
        return denormalise_qwen_21(self.components.vae, latents)


def scaled_reference(picture: Image.Image, area: int) -> Image.Image:
    """Scale an image to about `area` pixels; transparent parts become white."""
    scaled = picture.convert("RGBA").resize(scaled_size(picture.size, area), Image.Resampling.LANCZOS)
    white = Image.new("RGB", scaled.size, (255, 255, 255))
    white.paste(scaled, mask=scaled.getchannel("A"))
    return white
