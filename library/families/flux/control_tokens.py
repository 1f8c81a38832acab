"""Image conditioning of Kontext and Fill: reference images as additional tokens, a mask as additional channels."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from library.families.shared import packing
from library.families.shared.sampler import to_pixels

if TYPE_CHECKING:
    from PIL import Image

TOKEN_SIDE = 16  # pixels of one token
MEGAPIXEL = 1024 * 1024
# Widths and heights that Kontext was trained with, and the transposed ones.
_SHAPES = (
    (672, 1568),
    (688, 1504),
    (720, 1456),
    (752, 1392),
    (800, 1328),
    (832, 1248),
    (880, 1184),
    (944, 1104),
    (1024, 1024),
)
KONTEXT_SHAPES = tuple(sorted({*_SHAPES, *((height, width) for width, height in _SHAPES)}))


def packed(controls: Sequence[Tensor], inpaints: bool) -> list[Tensor]:
    """Return the tokens of reference latents. For an inpainting model, combine the latents around a mask [B, C, 2 h, 2
    w] and the mask [B, 1, 16 h, 16 w] into extra channels of the image tokens.
    """
    if not inpaints:
        return [packing.pack(latents) for latents in controls]
    outside_mask, mask = controls
    pixels = torch.nn.functional.pixel_unshuffle(mask, 8)  # the mask square of each latent pixel, row by row
    return [torch.cat((packing.pack(outside_mask), packing.pack(pixels)), dim=-1)]


def add_control_tokens(tokens: Tensor, controls: Sequence[Tensor], inpaints: bool) -> Tensor:
    controls = [control.to(tokens).expand(len(tokens), -1, -1) for control in controls]
    return torch.cat((tokens, *controls), dim=-1 if inpaints else 1) if controls else tokens


def reference_size(size: tuple[int, int], area: int) -> tuple[int, int]:
    """Return width and height of a reference image beside a preview of `area` pixels: the nearest of
    Kontext's shapes.
    """
    _, width, height = min((abs(size[0] / size[1] - w / h), w, h) for w, h in KONTEXT_SHAPES)
    scale = (area / MEGAPIXEL) ** 0.5
    width, height = (max(TOKEN_SIDE, round(side * scale / TOKEN_SIDE) * TOKEN_SIDE) for side in (width, height))
    return width, height


def scaled_pixels(image: "Image.Image", size: tuple[int, int]) -> Tensor:
    """Scale an image to (width, height); return pixels [1, 3, H, W] in -1..1."""
    scaled = image.convert("RGB").resize(size, 1)  # Lanczos, as in diffusers' pipelines
    return to_pixels(scaled)


def scaled_paint_mask(mask: "Image.Image", size: tuple[int, int]) -> Tensor:
    """Scale a mask to (width, height) as [1, 1, H, W]: 1 where it is bright, so in the region to inpaint, else 0."""
    return (scaled_pixels(mask.convert("L"), size)[:, :1] >= 0).float()
