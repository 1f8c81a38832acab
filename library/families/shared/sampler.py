"""Shared parts of samplers: cached prompts, seeded noise, and decoding of latents."""

import contextlib
import itertools
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from library.families.base import ModelComponents, SampleRequest
from library.families.shared import vae_memory, vae_tiles
from library.objectives import flow

MAX_ENCODED_PROMPTS = 64  # encoded prompts of earlier requests to cache; prompts encoded together are never dropped
TOKEN = 16  # pixels of a side of one token of a transformer


class Sampler(ABC):
    """Generates sample images with the networks of a training, without changing their device or mode.

    The caller sets evaluation mode, autocast and devices, so that compiled graphs are reused.
    Global random states do not change.
    """

    def __init__(self, family: Any, components: ModelComponents):
        self.family, self.components = family, components
        self._known: dict[Hashable, dict[str, Tensor]] = {}
        self.decoded_by = ""  # "tiles" or "CPU" once there was not enough memory to decode an image at once

    @abstractmethod
    def latents(self, *requests: SampleRequest) -> Tensor:
        """Denoise from seeded noise; float32 [N, C, h, w] in the convention of the cache.

        Several requests of one `batch_key` are one batch, with the same results as one by one.
        """

    @abstractmethod
    def decoder_input(self, latents: Tensor) -> Tensor:
        """Convert the result of `latents` to the input of the VAE's decoder."""

    @abstractmethod
    def is_guided(self, request: SampleRequest) -> bool:
        """Return whether classifier-free guidance is used."""

    def batch_key(self, request: SampleRequest) -> Hashable:
        """Return what requests must have in common to be denoised in one batch; None for one that is denoised alone."""
        if request.controls or request.mask or request.guide:
            return None
        steps = request.steps, request.sampler_name, request.shift, request.sigmas
        return self.size(request), self.is_guided(request), steps

    def encode(self, prompts: list[str]) -> dict[str, Tensor]:
        return self.family.text(self.components, prompts)

    def encode_request(self, request: SampleRequest) -> dict[str, Tensor]:
        return self.encode([request.negative, request.prompt])

    def text_key(self, request: SampleRequest) -> Hashable:
        return request.prompt, request.negative

    @property
    def denoiser(self) -> Any:
        # A distributed wrapper would wait for the other processes.
        return getattr(self.components.denoiser, "module", self.components.denoiser)

    @torch.no_grad()
    def remember(self, requests: Iterable[SampleRequest]) -> None:
        """Encode and cache the prompts of these requests, before the text encoders are unloaded.

        Of prompts that were cached before, the oldest are dropped beyond MAX_ENCODED_PROMPTS.
        """
        requests = list(requests)
        for request in self.unknown(requests):
            encoded = self.encode_request(request)
            self._known[self.text_key(request)] = {name: tensor.cpu() for name, tensor in encoded.items()}
        requested = {self.text_key(request) for request in requests}
        not_requested = [key for key in self._known if key not in requested]
        for key in not_requested[: max(len(self._known) - max(MAX_ENCODED_PROMPTS, len(requested)), 0)]:
            del self._known[key]

    def unknown(self, requests: Iterable[SampleRequest]) -> list[SampleRequest]:
        requests_by_key = {self.text_key(request): request for request in requests}
        return [request for key, request in requests_by_key.items() if key not in self._known]

    def __call__(self, request: SampleRequest) -> Image.Image:
        return self.pictures([request])[0]

    @torch.no_grad()
    def pictures(self, requests: Sequence[SampleRequest]) -> list[Image.Image]:
        """Denoise requests of one `batch_key` in one batch, and decode them one by one."""
        return [self._picture(latents[None]) for latents in self.latents(*requests)]

    def _picture(self, latents: Tensor) -> Image.Image:
        pixels = self.decoded(latents)
        return Image.fromarray((pixels * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy())

    def size(self, request: SampleRequest) -> tuple[int, int]:
        """Return height and width in pixels that the family can generate: rounded down to its multiple, at least 64."""
        multiple = self.family.sample_multiple
        height, width = (max(64, side // multiple * multiple) for side in (request.height, request.width))
        return height, width

    def text(self, requests: Sequence[SampleRequest], device: torch.device) -> dict[str, Tensor]:
        """Return the encoded negative prompts and then the prompts, or the prompts alone without guidance.

        Texts with a mask may differ in length: shorter ones are padded with zeros, which the mask covers.
        """
        first = 0 if self.is_guided(requests[0]) else 1
        texts = [self._encoded(request) for request in requests]
        return {
            name: joined_rows([text[name][row : row + 1] for row in range(first, 2) for text in texts]).to(device)
            for name in texts[0]
        }

    def _encoded(self, request: SampleRequest) -> dict[str, Tensor]:
        """Return the encoded [negative, prompt]."""
        encoded = self._known.get(self.text_key(request))
        return self.encode_request(request) if encoded is None else encoded

    def decoded(self, latents: Tensor) -> Tensor:
        """Decode latents to pixels [3, H, W] in [0, 1]; if memory is short in tiles, then in tiles on the CPU.

        Raises the error of the last attempt.
        """
        ways = {"": lambda: self._decoded(latents), "tiles": lambda: self._decoded(latents, tiled=True)}
        if vae_memory.is_small(latents):
            del ways["tiles"]
        ways["CPU"] = lambda: self._decoded(latents.cpu(), tiled=True)
        way, pixels = vae_memory.first_that_fits(ways)
        self.decoded_by = way or self.decoded_by
        return (pixels[0].float() / 2 + 0.5).clamp(0, 1)

    def _decoded(self, latents: Tensor, tiled: bool = False) -> Tensor:
        """Return the decoder's pixels [1, 3, H, W] in -1..1."""
        with self.vae_on(latents.device) as vae, torch.autocast(latents.device.type, enabled=False):
            decoder_input = self.decoder_input(latents).to(next(vae.parameters()).dtype)
            if tiled:
                return vae_tiles.decode_in_tiles(vae, decoder_input)
            return vae.decode(decoder_input, return_dict=False)[0]

    @contextlib.contextmanager
    def vae_on(self, device: torch.device) -> Iterator[Any]:
        """Move the VAE to a device within the context; nested in another context for that device, it stays there."""
        vae: Any = self.components.vae  # an AutoencoderKL
        if vae is None:
            raise TypeError("sample images need a VAE")
        home = next(vae.parameters()).device
        try:
            vae.to(device)
            yield vae
        finally:
            vae.to(home)


class FlowSampler(Sampler):
    """Euler steps along the straight path from noise to the image, independent of sample_sampler."""

    def is_guided(self, request: SampleRequest) -> bool:
        return request.scale > 1.0

    def grid(self, request: SampleRequest) -> tuple[int, int]:
        height, width = self.size(request)
        return height // TOKEN, width // TOKEN

    def sigmas(self, request: SampleRequest, tokens: int) -> list[float]:
        """Return the sigmas of all steps of an image with this many tokens, and the 0 at which the last one ends."""
        if request.sigmas:
            return [*request.sigmas, 0.0]
        if request.shift:
            line = torch.linspace(1, 0, request.steps + 1, dtype=torch.float64)
            return flow.shifted(line, request.shift).tolist()
        return self.model_sigmas(request.steps, tokens)

    @abstractmethod
    def model_sigmas(self, steps: int, tokens: int) -> list[float]:
        """Return the steps + 1 sigmas by which the model is usually sampled."""

    def guided(self, negative: Tensor, prompt: Tensor, scale: Tensor) -> Tensor:
        return negative + scale * (prompt - negative)

    def integrate(
        self,
        noise: Tensor,
        sigmas: Sequence[float],
        requests: Sequence[SampleRequest],
        velocity: Callable[[Tensor, float], Tensor],
    ) -> Tensor:
        """Integrate from noise [N, ...] to the images, along sigmas from 1 to 0.

        `velocity`: current samples [B, ...] and sigma -> noise minus image, float32 [B, ...]. B is 2 * N with guidance,
        for the negative prompts and then the prompts, else N.
        """
        number, scales = len(noise), per_sample([request.scale for request in requests], noise)
        count = 2 if self.is_guided(requests[0]) else 1
        for sigma, next_sigma in itertools.pairwise(sigmas):
            step = velocity(noise.expand(count, *noise.shape).flatten(0, 1), sigma)
            if count == 2:
                step = self.guided(step[:number], step[number:], scales)
            noise = noise + (next_sigma - sigma) * step
        return noise


def seeded_noise(requests: Sequence[SampleRequest], *shape: int) -> Tensor:
    """Return noise [N, ...] on the host, each by its own seed."""
    return torch.cat([torch.randn(1, *shape, generator=sample_generator(request)) for request in requests])


def per_sample(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Return a number for each sample [N, 1, ...], to multiply tensors like this one."""
    return torch.tensor(numbers, dtype=torch.float32).to(like.device).view(-1, *(1 for _ in like.shape[1:]))


def joined_rows(rows: Sequence[Tensor]) -> Tensor:
    """Join tensors [1, L, ...] along the first dimension; shorter ones are padded with zeros."""
    length = max(row.shape[1] for row in rows)
    return torch.cat([torch.cat((row, row.new_zeros(1, length - row.shape[1], *row.shape[2:])), dim=1) for row in rows])


def sample_generator(request: SampleRequest) -> torch.Generator:
    seed = secrets.randbelow(2**32) if request.seed is None else request.seed
    return torch.Generator().manual_seed(seed)
