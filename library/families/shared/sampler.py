"""Shared parts of samplers: cached prompts, seeded noise, and decoding of latents."""

import contextlib
import functools
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from library.families.base import ModelComponents, SampleRequest
from library.families.shared import vae_memory, vae_tiles
from library.families.shared.finite import require_finite
from library.objectives import flow

MAX_ENCODED_PROMPTS = 64  # encoded prompts of earlier requests to cache; prompts encoded together are never dropped
TOKEN = 16  # pixels of a side of one token of a transformer
MAX_REFERENCE_PIXELS = 1024 * 1024  # of a reference image in `crop_to_tokens`; larger ones are scaled down
AT_ONCE = "at once"
TEXT_MULTIPLE = 16  # texts of any length are padded to a multiple of this, so that few sizes occur

# The current samples [B, ...] and the times [B] -> the velocity of the model, noise minus image, float32 [B, ...].
Velocity = Callable[[Tensor, Tensor], Tensor]


class Sampler(ABC):
    """Generates sample images with the networks of a training, without changing their device or mode.

    The caller sets evaluation mode, autocast and devices, so that compiled graphs are reused.
    Global random states do not change.
    """

    def __init__(self, family: Any, components: ModelComponents):
        self.family, self.components = family, components
        self._known: dict[Hashable, dict[str, Tensor]] = {}
        self.decoded_by = ""  # "tiles" or "CPU" once there was not enough memory to decode an image at once
        # Whether the two prompts of guidance are predicted one after the other, as one batch does not fit into memory.
        self.one_by_one = False
        # Frees memory that is not needed for decoding; returns whether there was any.
        self.make_room: Callable[[], bool] = lambda: False
        # Returns the bytes of memory for what all steps of an image read; None without a limit, 0 to keep nothing.
        self.room_to_keep: Callable[[], int | None] = lambda: None
        self.requires_finite = True  # whether an image of NaN is an error
        self._text_length = 0  # of the longest requested prompt, if texts may have any length
        self.live: tuple[str, ...] = ()  # text encoders that learn, whose outputs are not cached

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

    def count_steps(self, request: SampleRequest) -> int:
        """Return how many steps an image takes."""
        return len(request.sigmas) or request.steps

    def count_passes(self, request: SampleRequest) -> int:
        """Return how often the denoiser predicts until an image is there, for all prompts of guidance together."""
        return self.count_steps(request)

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
        self._text_length = max((self._length(self._known[key]) for key in requested), default=0)
        not_requested = [key for key in self._known if key not in requested]
        for key in not_requested[: max(len(self._known) - max(MAX_ENCODED_PROMPTS, len(requested)), 0)]:
            del self._known[key]

    def remember_encoded(self, request: SampleRequest, encoded: Mapping[str, Tensor]) -> None:
        """Cache the encoded [negative, prompt] of a request, whose text then needs no text encoders."""
        self._known[self.text_key(request)] = dict(encoded)

    def unknown(self, requests: Iterable[SampleRequest]) -> list[SampleRequest]:
        requests_by_key = {self.text_key(request): request for request in requests}
        return [request for key, request in requests_by_key.items() if key not in self._known]

    def __call__(self, request: SampleRequest) -> Image.Image:
        return self.images([request])[0]

    @torch.no_grad()
    def images(self, requests: Sequence[SampleRequest]) -> list[Image.Image]:
        """Denoise requests of one `batch_key` in one batch, and decode them one by one."""
        return [self._image(latents[None]) for latents in self.latents(*requests)]

    def _image(self, latents: Tensor) -> Image.Image:
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
        length = max(self._text_length, *map(self._length, texts))  # so that prompts share compiled and recorded passes
        rows = [(text, slice(row, row + 1)) for row in range(first, 2) for text in texts]
        return {name: joined_rows([text[name][row] for text, row in rows], length).to(device) for name in texts[0]}

    def in_batches(self, text: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return a text as the batches that are predicted: one, or negative prompts and prompts `one_by_one`."""
        number = 2 if self.one_by_one else 1
        parts = {name: tensor.chunk(number) for name, tensor in text.items()}
        return [{name: part[at] for name, part in parts.items()} for at in range(len(next(iter(parts.values()))))]

    def _length(self, encoded: Mapping[str, Tensor]) -> int:
        """Return the length that masked texts are padded to; 0 for texts of a fixed length."""
        mask = encoded.get(self.family.text_cache.mask)
        return 0 if mask is None else -(-mask.shape[1] // TEXT_MULTIPLE) * TEXT_MULTIPLE

    def _encoded(self, request: SampleRequest) -> dict[str, Tensor]:
        encoded = self._known.get(self.text_key(request))
        if encoded is None:
            return self.encode_request(request)
        if not self.live:
            return encoded
        return encoded | self.family.text(self.components, [request.negative, request.prompt], self.live)

    def decoded(self, latents: Tensor) -> Tensor:
        """Decode latents to pixels [3, H, W] in [0, 1]; if memory is short in tiles, then in tiles on the CPU.

        Raises the error of the last attempt, and ConfigError for NaN.
        """

        def with_more_room() -> Tensor:
            if not self.make_room():
                raise torch.OutOfMemoryError
            return self._decoded(latents)

        ways = {"": lambda: self._decoded(latents), AT_ONCE: with_more_room}
        ways["tiles"] = lambda: self._decoded(latents, tiled=True)
        if vae_memory.is_small(latents):
            del ways["tiles"]
        ways["CPU"] = lambda: self._decoded(latents.cpu(), tiled=True)
        way, pixels = vae_memory.first_that_fits(ways)
        self.decoded_by = "" if way == AT_ONCE else way or self.decoded_by
        if self.requires_finite:
            require_finite(pixels, latents, self.components.vae)
        return (pixels[0].float() / 2 + 0.5).clamp(0, 1)

    # Why: docs/decisions/2026-11-29-decoders-stay-eager.md
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

    def encoded(self, pixels: Tensor) -> Tensor:
        """Encode a control image [1, 3, H, W] on its device; the VAE is moved there for this and back."""
        with self.vae_on(pixels.device):
            return self.family.control_latents(self.components, pixels)

    def sigmas(self, request: SampleRequest, tokens: int) -> list[float]:
        """Return the sigmas of all steps of an image with this many tokens, and the 0 at which the last one ends."""
        if request.sigmas:
            return [*request.sigmas, 0.0]
        if request.shift:
            return flow.shifted_line(request.steps, request.shift)
        return self.model_sigmas(request.steps, tokens)

    @abstractmethod
    def model_sigmas(self, steps: int, tokens: int) -> list[float]:
        """Return the steps + 1 sigmas by which the model is usually sampled."""

    def guided(self, negative: Tensor, prompt: Tensor, scale: Tensor) -> Tensor:
        return negative + scale * (prompt - negative)

    def model_times(self, sigmas: Sequence[float]) -> list[float]:
        return [*sigmas]

    def denoise(
        self,
        noise: Tensor,
        requests: Sequence[SampleRequest],
        velocity: Callable[[dict[str, Tensor], Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Integrate from noise [N, ...] to the images of requests; `velocity` takes an encoded text, samples and times,
        see `integrate`.
        """
        texts, (height, width) = self.in_batches(self.text(requests, noise.device)), self.grid(requests[0])
        velocities = [functools.partial(velocity, text) for text in texts]
        return self.integrate(noise, self.sigmas(requests[0], height * width), requests, velocities)

    def integrate(
        self,
        noise: Tensor,
        sigmas: Sequence[float],
        requests: Sequence[SampleRequest],
        velocities: Sequence[Velocity],
    ) -> Tensor:
        """Integrate from noise [N, ...] to the images, along sigmas from 1 to 0.

        `velocities` has a function for each batch of `in_batches`: current samples [B, ...] and times [B], for as many
        prompts as the batch has -> noise minus image, float32 [B, ...]. No step waits for the device.
        """
        number, scales = len(noise), per_sample([request.scale for request in requests], noise)
        texts = 2 if self.is_guided(requests[0]) else 1
        repeats = texts // len(velocities)
        exact = torch.float64  # rounded once, as the products of the steps
        differences = torch.tensor(sigmas, dtype=exact).diff().float().to(noise.device)
        times = torch.tensor(self.model_times(sigmas[:-1]), dtype=exact).float().to(noise.device)
        for time, difference in zip(times.unbind(), differences.unbind(), strict=True):
            batch = noise.expand(repeats, *noise.shape).flatten(0, 1)
            step = torch.cat([velocity(batch, time.expand(len(batch))) for velocity in velocities])
            if texts == 2:
                step = self.guided(step[:number], step[number:], scales)
            noise = noise + difference * step
        return noise


def to_pixels(image: Image.Image | np.ndarray) -> Tensor:
    """Return an image in RGB as pixels [1, 3, H, W] in -1..1."""
    return torch.from_numpy(np.asarray(image).astype("float32") / 255).permute(2, 0, 1)[None] * 2 - 1


def crop_to_tokens(image: Image.Image) -> Image.Image:
    """Scale an image down to at most MAX_REFERENCE_PIXELS, and crop it around its centre to whole tokens."""
    width, height = image.size
    if width * height > MAX_REFERENCE_PIXELS:
        scale = math.sqrt(MAX_REFERENCE_PIXELS / (width * height))
        image = image.resize((int(width * scale), int(height * scale)), Image.Resampling.LANCZOS)
        width, height = image.size
    inner = max(width // TOKEN, 1) * TOKEN, max(height // TOKEN, 1) * TOKEN
    left, top = (width - inner[0]) // 2, (height - inner[1]) // 2
    return image.crop((left, top, left + inner[0], top + inner[1]))


def seeded_noise(requests: Sequence[SampleRequest], *shape: int) -> Tensor:
    """Return noise [N, ...] on the host, each by its own seed."""
    return torch.cat([torch.randn(1, *shape, generator=sample_generator(request)) for request in requests])


def per_sample(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Return a number for each sample [N, 1, ...], to multiply tensors like this one."""
    return torch.tensor(numbers, dtype=torch.float32).to(like.device).view(-1, *(1 for _ in like.shape[1:]))


def joined_rows(rows: Sequence[Tensor], length: int = 0) -> Tensor:
    """Join tensors [1, L, ...] along the first dimension; shorter ones are padded with zeros, to `length` at least."""
    if rows[0].dim() < 2:
        return torch.cat([*rows])
    length = max(length, *(row.shape[1] for row in rows))
    return torch.cat([torch.cat((row, row.new_zeros(1, length - row.shape[1], *row.shape[2:])), dim=1) for row in rows])


def sample_generator(request: SampleRequest) -> torch.Generator:
    seed = secrets.randbelow(2**32) if request.seed is None else request.seed
    return torch.Generator().manual_seed(seed)
