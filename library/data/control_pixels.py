"""Control images, reference images and inpainting masks as pixels."""

import os
from random import Random

import numpy as np
import torch
from PIL import Image, ImageDraw

from library.data import augment, pixels
from library.data.buckets import Size
from library.data.images import ControlImage

SHAPES = ("rectangle", "ellipse", "line")


def control_input(control: ControlImage, interpolation: str | None, flip: bool = False) -> torch.Tensor:
    """Return a control image as the model's input: colours [3,H,W] in -1..1, grey (0) in the masked region."""
    view = augment.middle(control.fit, flip)
    picture = pixels.read_pixels(control.path, control.how)
    pixels.expect_size(control.path, picture, control.size)
    colours = pixels.to_tensor(pixels.apply_view(picture, view, interpolation))
    return colours * (1 - inpainting_region(control, view, interpolation)) if control.is_masked else colours


def reference(control: ControlImage, interpolation: str | None) -> Image.Image:
    """Return a reference image, scaled and cropped as the model reads it."""
    picture = pixels.read_pixels(control.path, control.how)
    pixels.expect_size(control.path, picture, control.size)
    return Image.fromarray(pixels.apply_view(picture, augment.middle(control.fit), interpolation))


def inpainting_region(control: ControlImage, view: augment.View, interpolation: str | None) -> torch.Tensor:
    """Return the region to inpaint [H,W]: 1 where the mask is brighter than half, else 0."""
    if control.drawn is not None:
        mask = drawn_mask(control.path, control.drawn, view.size)
        return torch.from_numpy(np.ascontiguousarray(mask[:, ::-1] if view.flip else mask))
    if control.mask == control.path:
        mask = pixels.read_pixels(control.path, control.how, alpha=True)[:, :, 3]
    else:
        mask = pixels.read_mask(control.mask, control.how)
    cropped = pixels.apply_view(np.ascontiguousarray(mask), view, interpolation)
    return torch.from_numpy((cropped >= 128).astype(np.float32))


def drawn_mask(path: str, number: int, size: Size) -> np.ndarray:
    """Return the random mask of an image with this number, zeros and ones [H,W] in float32."""
    # Seeded by name, number and size, so that each epoch, process and resume draws the same.
    return random_mask(size, Random(f"{os.path.basename(path)} {number} {size}".encode("utf-8", "surrogatepass")))


def random_mask(size: Size, random: Random) -> np.ndarray:
    """Draw a mask [H,W] of zeros and ones, float32, for an image of (width, height): up to four rectangles, ellipses
    and broad lines."""
    mask = Image.new("L", size)
    draw = ImageDraw.Draw(mask)

    def point() -> tuple[int, int]:
        return random.randrange(size[0]), random.randrange(size[1])

    for _ in range(random.randint(1, 4)):
        kind = random.choice(SHAPES)
        if kind == "line":
            points = [point() for _ in range(random.randint(2, 6))]
            draw.line(points, fill=1, width=max(1, round(min(size) * random.uniform(0.05, 0.2))), joint="curve")
            continue
        (left, top), sides = point(), [round(side * random.uniform(0.2, 0.7)) for side in size]
        box = (left - sides[0] // 2, top - sides[1] // 2, left + sides[0] // 2, top + sides[1] // 2)
        (draw.rectangle if kind == "rectangle" else draw.ellipse)(box, fill=1)
    return np.asarray(mask, np.float32)
