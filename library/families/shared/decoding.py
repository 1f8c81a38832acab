"""Decode latents tile by tile, if there is not enough memory to decode them at once."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Decode = Callable[[Tensor], Tensor]  # latents [1, C, h, w] -> pixels [1, 3, H, W]
TILE = 64  # latents of a tile's side; 512 pixels
OVERLAP = 16  # latents that two neighbouring tiles share, in which one fades into the other
# Parts of the messages of other errors that mean out of memory.
NO_ROOM = ("can't allocate memory", "not enough memory", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    is_typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_typed or (isinstance(error, RuntimeError) and any(sign in str(error) for sign in NO_ROOM))


def in_tiles(decode: Decode, latents: Tensor) -> Tensor:
    """Latents [1, C, h, w] -> pixels [1, 3, H, W] in float32 on the CPU, decoded tile by tile.

    Pixels differ slightly from those decoded at once, as the decoder's norms see a tile instead of the image.
    """
    # Overlapping tiles fade into each other, which hides their seams.
    whole = weight = torch.zeros(())
    for top, left in itertools.product(*(_starts(side) for side in latents.shape[-2:])):
        tile = latents[..., top : top + TILE, left : left + TILE]
        pixels = decode(tile).float().cpu()
        scale = pixels.shape[-1] // tile.shape[-1]
        if not whole.dim():
            size = latents.shape[-2] * scale, latents.shape[-1] * scale
            whole, weight = torch.zeros(1, 3, *size), torch.zeros(size)
        height, width = pixels.shape[-2:]
        share = torch.outer(_fading(height, OVERLAP * scale), _fading(width, OVERLAP * scale))
        place = ..., slice(top * scale, top * scale + height), slice(left * scale, left * scale + width)
        whole[place] += pixels * share
        weight[place] += share
    return whole / weight


def fits_in_a_tile(latents: Tensor) -> bool:
    return max(latents.shape[-2:]) <= TILE


def _starts(side: int) -> Iterator[int]:
    """Yield where the tiles of a side begin; the last one ends with the image."""
    last = max(side - TILE, 0)
    yield from range(0, last, TILE - OVERLAP)
    yield last


def _fading(side: int, overlap: int) -> Tensor:
    """Return the weight of each row or column of a tile: rising over the overlap and falling again, never 0."""
    place = torch.arange(side)
    return torch.minimum(place + 1, side - place).clamp(max=overlap) / overlap
