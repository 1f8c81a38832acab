"""Sample images of FLUX 3: Euler steps along the straight path, from seeded noise to an image."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from library.families.base import SampleRequest
from library.families.flux_3.model import KnownStreams, Size
from library.families.shared import packing, statistics_vae
from library.families.shared.sampler import TOKEN, FlowSampler, crop_to_tokens, seeded_noise, to_pixels
from library.objectives import flow

if TYPE_CHECKING:
    from library.families.flux_3.family import Flux3Family

SHIFT = 6.93  # of the sigmas, at any size of image
MAX_PIXELS_ALONE = 4 * 1024 * 1024  # of the only reference image
LONGEST_SIDE, SHORTEST_SIDE = 4096, 64  # of the canvas of the only one
SMALLER = 0.995  # factor by which an image is scaled until its canvas has few enough pixels


class Flux3Sampler(FlowSampler):
    """Reference images follow the image as additional tokens. A distilled model also gets the end time of each step."""

    family: "Flux3Family"

    def latents(self, *requests: SampleRequest) -> Tensor:
        """Denoise from seeded noise; float32 [N, 32, h, w]. Prompts and negative prompts are one padded batch."""
        model = self.denoiser
        device = model.txt_in.weight.device
        height, width = self.grid(requests[0])
        tokens = seeded_noise(requests, model.sizes.in_channels, height, width).flatten(2).transpose(1, 2).to(device)
        references = self.references(requests[0].controls, device)
        sizes = ((height, width), *map(packing.token_grid, references))
        shown = [packing.pack(reference) for reference in references]
        sigmas = self.sigmas(requests[0], height * width)

        def velocity(
            text: Mapping[str, Tensor],
            known: KnownStreams | None,
            ends: Iterator[Tensor],
            tokens: Tensor,
            times: Tensor,
        ) -> Tensor:
            pictures = [] if known else [tokens_of.to(tokens).expand(len(tokens), -1, -1) for tokens_of in shown]
            end = next(ends).expand(len(times)) if model.sizes.distilled else None
            img = torch.cat([tokens, *pictures], dim=1)
            return model(img, sizes, text["ctx_vec"], text["ctx_mask"], times, end, known).float()

        ends = torch.tensor(sigmas[1:], dtype=torch.float64).float().to(device)
        velocities = [
            functools.partial(velocity, text, self.known_streams(text, shown, sizes), iter(ends.unbind()))
            for text in self.in_batches(self.text(requests, device))
        ]
        return packing.unpack(self.integrate(tokens, sigmas, requests, velocities), height, width)

    def known_streams(
        self, text: Mapping[str, Tensor], references: Sequence[Tensor], sizes: Sequence[Size]
    ) -> KnownStreams | None:
        """Return what all steps read of text and references, whose tokens are [1, R, channels]; None if it depends on
        the step, or if a block's weights are at hand only while the block runs in a step.
        """
        model, txt = self.denoiser, text["ctx_vec"]
        if model.sizes.distilled or self.room_to_keep() == 0:
            return None
        tokens = [txt.new_zeros(len(txt), 0, model.sizes.in_channels)]
        tokens += [reference.to(txt.device).expand(len(txt), -1, -1) for reference in references]
        return model.know_streams(torch.cat(tokens, dim=1), sizes, txt, text["ctx_mask"])

    def references(self, controls: Sequence[Image.Image], device: torch.device) -> list[Tensor]:
        """Return the latents of reference images; the VAE is moved to the device for this and back."""
        if not controls:
            return []
        with self.vae_on(device):
            return [self.encoded(pixels_of(control, len(controls) == 1).to(device)) for control in controls]

    def model_sigmas(self, steps: int, tokens: int) -> list[float]:
        return flow.shifted_line(steps, SHIFT)

    def decoder_input(self, latents: Tensor) -> Tensor:
        return statistics_vae.denormalised(self.components.vae, latents)


def pixels_of(picture: Image.Image, alone: bool) -> Tensor:
    """Return a reference image as [1, 3, H, W] in -1..1, in whole tokens: the only one whole on a larger canvas, one of
    several cut around its centre.
    """
    picture = picture.convert("RGB")
    return to_pixels(canvas_of(picture) if alone else crop_to_tokens(picture))


def canvas_of(picture: Image.Image) -> np.ndarray:
    """Return a picture [H, W, 3], scaled down to at most MAX_PIXELS_ALONE and surrounded by its reflection up to whole
    tokens.
    """
    width, height = picture.size
    scale = min(1.0, math.sqrt(MAX_PIXELS_ALONE / (width * height)), LONGEST_SIDE / max(width, height))
    while True:
        size = max(1, round(width * scale)), max(1, round(height * scale))
        canvas = [min(LONGEST_SIDE, max(SHORTEST_SIDE, -(-side // TOKEN) * TOKEN)) for side in size]
        if canvas[0] * canvas[1] <= MAX_PIXELS_ALONE:
            break
        scale *= SMALLER
    if size != picture.size:
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    room = [(canvas[1] - size[1], (canvas[1] - size[1]) // 2), (canvas[0] - size[0], (canvas[0] - size[0]) // 2)]
    around = [*((before, missing - before) for missing, before in room), (0, 0)]
    # A reflection leaves out the edge itself; a picture smaller than a token is mirrored with it.
    return np.pad(np.asarray(picture), around, mode="reflect" if min(size) > TOKEN else "symmetric")
