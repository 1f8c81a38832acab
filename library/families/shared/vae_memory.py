"""Encode and decode with less memory where a whole batch does not fit: picture by picture, then in tiles."""

import logging
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from library.families.shared import vae_tiles

logger = logging.getLogger(__name__)
SMALL = 512 * 512  # pixels of a picture for which tiles save too little memory to try them
LATENT = 8  # pixels of a side of one latent
AT_ONCE, SLICES, TILES = "at once", "image by image", "in tiles"
# Parts of the messages of other errors that mean out of memory.
NO_ROOM = ("can't allocate memory", "not enough memory", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED")
# How many values of pixels did not fit, by VAE and way: encoding thousands of pictures must not fail first for each.
_did_not_fit: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()


def is_out_of_memory(error: BaseException) -> bool:
    is_typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_typed or (isinstance(error, RuntimeError) and any(sign in str(error) for sign in NO_ROOM))


def is_small(latents: Tensor) -> bool:
    return latents.shape[-2] * latents.shape[-1] * LATENT**2 <= SMALL


def first_that_fits(ways: Mapping[str, Callable[[], Tensor]]) -> tuple[str, Tensor]:
    """Return the name and the result of the first way that does not run out of memory. Raises the error of the last."""
    *_, last = ways
    for name, way in ways.items():
        try:
            return name, way()
        except Exception as error:
            if name == last or not is_out_of_memory(error):
                raise
        if torch.cuda.is_available():  # outside of the handler, whose error keeps tensors alive
            torch.cuda.empty_cache()
    raise AssertionError("the last way returns or raises")


def encode(vae: Any, pixels: Tensor) -> Tensor:
    """Pixels [B, 3, H, W] -> means and log variances of an AutoencoderKL [B, 2 C, h, w], or means of an ImageVAE
    [B, C, h, w]; if memory is short picture by picture, then in tiles. Raises the error of the last attempt.
    """
    pictures = pixels.split(1)
    ways: dict[str, Callable[[], Tensor]] = {AT_ONCE: lambda: _encode_whole(vae, pixels)}
    if len(pictures) > 1:
        ways[SLICES] = lambda: torch.cat([_encode_whole(vae, picture) for picture in pictures])
    if pictures[0][0, 0].numel() > SMALL:
        ways[TILES] = lambda: torch.cat([vae_tiles.encode_in_tiles(vae, picture) for picture in pictures])
    *others, last = ways
    sizes, limits = {AT_ONCE: pixels.numel(), SLICES: pictures[0].numel()}, _did_not_fit.setdefault(vae, {})
    tried = [name for name in others if name not in limits or sizes[name] < limits[name]]
    used, encoded = first_that_fits({name: ways[name] for name in (*tried, last)})
    failed = tried[: tried.index(used)] if used in tried else tried
    if failed and failed[-1] not in limits:
        logger.warning("memory is too short to encode images %s, so they are encoded %s", failed[-1], used)
    limits |= {name: sizes[name] for name in failed}
    return encoded


def _encode_whole(vae: Any, pixels: Tensor) -> Tensor:
    encoded = vae.encode(pixels)
    return encoded if isinstance(encoded, Tensor) else encoded.latent_dist.parameters
