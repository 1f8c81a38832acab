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
    def latents(self, request: SampleRequest) -> Tensor:
        """Denoise from seeded noise; float32 [1, C, h, w] in the convention of the cache."""

    @abstractmethod
    def decoder_input(self, latents: Tensor) -> Tensor:
        """Convert the result of `latents` to the input of the VAE's decoder."""

    @abstractmethod
    def is_guided(self, request: SampleRequest) -> bool:
        """Return whether classifier-free guidance is used."""

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

    @torch.no_grad()
    def __call__(self, request: SampleRequest) -> Image.Image:
        pixels = self.decoded(self.latents(request))
        return Image.fromarray((pixels * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy())

    def size(self, request: SampleRequest) -> tuple[int, int]:
        """Return height and width in pixels that the family can generate: rounded down to its multiple, at least 64."""
        multiple = self.family.sample_multiple
        height, width = (max(64, side // multiple * multiple) for side in (request.height, request.width))
        return height, width

    def text(self, request: SampleRequest, device: torch.device) -> dict[str, Tensor]:
        """Return the encoded [negative, prompt], or the prompt alone without guidance."""
        encoded = self._known.get(self.text_key(request))
        if encoded is None:
            encoded = self.encode_request(request)
        return {name: tensor[0 if self.is_guided(request) else 1 :].to(device) for name, tensor in encoded.items()}

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

    def guided(self, negative: Tensor, prompt: Tensor, scale: float) -> Tensor:
        """Apply classifier-free guidance: the velocities of both prompts -> the guided velocity, all [1, ...]."""
        return negative + scale * (prompt - negative)

    def integrate(
        self,
        noise: Tensor,
        sigmas: Sequence[float],
        request: SampleRequest,
        velocity: Callable[[Tensor, float], Tensor],
    ) -> Tensor:
        """Integrate from noise [1, ...] to the image, along sigmas from 1 to 0.

        `velocity`: current sample [B, ...] and sigma -> noise minus image, float32 [B, ...]. B is 2 with
        guidance, for the negative prompt and the prompt, else 1.
        """
        count = 2 if self.is_guided(request) else 1
        for sigma, next_sigma in itertools.pairwise(sigmas):
            step = velocity(noise.expand(count, *noise.shape[1:]), sigma)
            if count == 2:
                step = self.guided(step[:1], step[1:], request.scale)
            noise = noise + (next_sigma - sigma) * step
        return noise


def sample_generator(request: SampleRequest) -> torch.Generator:
    """Return a seeded generator on the host, for the same image on every machine. A seed of None is random."""
    seed = secrets.randbelow(2**32) if request.seed is None else request.seed
    return torch.Generator().manual_seed(seed)
