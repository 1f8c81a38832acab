"""Masks of prompts that paint a part of an image: from a file, or as a training has them for its images."""

import re

import numpy as np
from PIL import Image

from library.config.problems import ConfigError
from library.data import pixels
from library.data.control_pixels import drawn_mask
from library.data.images import ControlImage
from library.sampling.prompts import MAX_IMAGE_SIDE, Prompt

ALPHA = "alpha"  # the transparency of the image
DRAWN = re.compile(r"(\d{1,6}) (\d{1,5})x(\d{1,5})")  # number and size of a random mask


def training_mask(control: ControlImage) -> str | None:
    """Return the mask of a training's image that has no file as a prompt names it; None for one with a file."""
    if control.drawn is not None:
        width, height = control.fit.bucket
        return f"{control.drawn} {width}x{height}"
    return ALPHA if control.mask == control.path else None


def mask_of(prompt: Prompt, how: pixels.Decoding) -> Image.Image | None:
    """Return the mask of a prompt, bright where something is painted. Raises ConfigError if it cannot be read."""
    if prompt.control_image_mask_path:
        return Image.fromarray(pixels.read_mask(prompt.control_image_mask_path, how))
    path = next(iter(prompt.control_image_path or ()), None)
    if not (prompt.training_mask and path):
        return None
    if prompt.training_mask == ALPHA:
        return Image.fromarray(np.ascontiguousarray(pixels.read_pixels(path, how, alpha=True)[:, :, 3]))
    numbers = DRAWN.fullmatch(prompt.training_mask)
    number, *size = map(int, numbers.groups()) if numbers else (0, 0, 0)
    if not all(1 <= side <= MAX_IMAGE_SIDE for side in size):  # the record is damaged
        raise ConfigError("{mask} names no mask of a training", mask=prompt.training_mask)
    return Image.fromarray((drawn_mask(path, number, (size[0], size[1])) * 255).astype(np.uint8))
