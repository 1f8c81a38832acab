"""Shared parts of samplers: cached prompts, seeded noise, and decoding of latents."""

import contextlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from library.families.base import ModelComponents, SampleRequest
from library.families.shared import vae_memory, vae_tiles

MAX_ENCODED_PROMPTS = 64  # encoded prompts of earlier requests to cache; prompts encoded together are never dropped
TOKEN = 16  # pixels of a side of one token of a transformer
AT_ONCE = "at once"
TEXT_MULTIPLE = 16  # texts of any length are padded to a multiple of this, so that few sizes occur

# The current sample [B, ...] and the times [B] -> the velocity of the model, noise minus image, float32 [B, ...].
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
        # Whether both prompts of guidance are predicted one after the other, as one batch does not fit into memory.
        self.one_by_one = False
        # Frees memory that is not needed for decoding; returns whether there was any.
        self.make_room: Callable[[], bool] = lambda: False
        self._text_length = 0  # of the longest requested prompt, if texts may have any length

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
        first = 0 if self.is_guided(request) else 1
        return {name: tensor[first:].to(device) for name, tensor in self._padded(encoded).items()}

    def in_batches(self, text: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the prompts of a text as the batches that are predicted: one, or one for each prompt."""
        rows = range(len(next(iter(text.values())))) if self.one_by_one else ()
        return [{name: tensor[row : row + 1] for name, tensor in text.items()} for row in rows] or [dict(text)]

    def _length(self, encoded: Mapping[str, Tensor]) -> int:
        """Return the length that masked texts are padded to; 0 for texts of a fixed length."""
        mask = encoded.get(self.family.text_cache.mask)
        return 0 if mask is None else -(-mask.shape[1] // TEXT_MULTIPLE) * TEXT_MULTIPLE

    # Prompts of one length share compiled and recorded passes.
    def _padded(self, encoded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Pad masked texts to the length of the longest that was requested."""
        own = self._length(encoded)
        if not own:
            return dict(encoded)
        length = max(own, self._text_length)
        return {name: pad_rows(tensor, length) for name, tensor in encoded.items()}

    def decoded(self, latents: Tensor) -> Tensor:
        """Decode latents to pixels [3, H, W] in [0, 1]; if memory is short in tiles, then in tiles on the CPU.

        Raises the error of the last attempt.
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

    def guided(self, negative: Tensor, prompt: Tensor, scale: float) -> Tensor:
        return negative + scale * (prompt - negative)

    def model_times(self, sigmas: Sequence[float]) -> list[float]:
        """Return the times that the model takes for these noise levels."""
        return [*sigmas]

    def integrate(
        self, noise: Tensor, sigmas: Sequence[float], request: SampleRequest, velocities: Sequence[Velocity]
    ) -> Tensor:
        """Integrate from noise [1, ...] to the image, along sigmas from 1 to 0.

        `velocities` has a function for each batch of `in_batches`: current sample [B, ...] and times [B], for as many
        prompts as the batch has -> noise minus image, float32 [B, ...]. No step waits for the device.
        """
        texts = 2 if self.is_guided(request) else 1
        size = (texts // len(velocities), *noise.shape[1:])
        exact = torch.float64  # rounded once, as the products of the steps
        levels = torch.tensor(sigmas, dtype=exact)
        differences = levels.diff().float().to(noise.device)
        times = torch.tensor(self.model_times(sigmas[:-1]), dtype=exact).float().to(noise.device)
        for time, difference in zip(times.unbind(), differences.unbind(), strict=True):
            step = torch.cat([velocity(noise.expand(size), time.expand(size[0])) for velocity in velocities])
            if texts == 2:
                step = self.guided(step[:1], step[1:], request.scale)
            noise = noise + difference * step
        return noise


def pad_rows(tensor: Tensor, length: int) -> Tensor:
    """Pad [B, L, ...] with zeros to [B, length, ...]."""
    missing = length - tensor.shape[1]
    return torch.cat((tensor, tensor.new_zeros(len(tensor), missing, *tensor.shape[2:])), dim=1) if missing else tensor


def sample_generator(request: SampleRequest) -> torch.Generator:
    seed = secrets.randbelow(2**32) if request.seed is None else request.seed
    return torch.Generator().manual_seed(seed)
