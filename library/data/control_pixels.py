"""What a model is shown beside noise and words, as pixels."""

import numpy as np
import torch

from library.data import augment, pixels
from library.data.images import ControlImage


def shown(control: ControlImage, interpolation: str | None, flip: bool = False) -> torch.Tensor:
    """What the model is shown of a control image: colours [3,H,W] in -1..1, grey (0) where its mask covers them."""
    view = augment.middle(control.fit, flip)
    picture = pixels.read(control.path)
    pixels.expect_size(control.path, picture, control.size)
    colours = pixels.to_tensor(pixels.look(picture, view, interpolation))
    return colours * (1 - paint_mask(control, view, interpolation)) if control.mask else colours


def paint_mask(control: ControlImage, view: augment.View, interpolation: str | None) -> torch.Tensor:
    """Where a model paints [H,W]: 1 where the mask is brighter than half, else 0."""
    if control.mask == control.path:
        mask = pixels.read(control.path, alpha=True)[:, :, 3]
    else:
        mask = pixels.read_mask(control.mask)
    seen = pixels.look(np.ascontiguousarray(mask), view, interpolation)
    return torch.from_numpy((seen >= 128).astype(np.float32))
