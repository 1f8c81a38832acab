"""The loss: per element, then one value per image, then their mean.

Nothing here synchronises with the device: masks and weights stay tensors, and cost nothing if absent.
"""

import torch.nn.functional as F
from torch import Tensor

SMALLEST_AREA = 1e-6  # avoids division by 0 for a black mask, whose loss stays 0


def elementwise(pred: Tensor, target: Tensor, kind: str, huber_c: Tensor | None) -> Tensor:
    """Return the loss of every element, in float32, in the shape of `pred`. `kind` is loss_type.

    Huber is the pseudo-Huber loss 2c (sqrt(d^2 + c^2) - c), smooth_l1 the same over c, with one threshold c per image
    (`huber_c`, [B]).
    """
    difference = pred.float() - target.float()
    if kind == "l2":
        return difference.square()
    if kind == "l1":
        return difference.abs()
    assert huber_c is not None  # noised batches have it for the other kinds
    c = huber_c.float().reshape(-1, *(1 for _ in difference.shape[1:]))
    root = (difference.square() + c * c).sqrt()
    return 2 * (root - c) * (c if kind == "huber" else 1)


def per_image(
    loss: Tensor,
    weight: Tensor | None = None,
    image_weight: Tensor | None = None,
    mask: Tensor | None = None,
    by_area: bool = False,
) -> Tensor:
    """[B, C, h, w] -> [B]: multiplied by the mask, averaged over all but the batch, multiplied by the weights.

    `weight` [B] is the objective's (`noised.weight`), `image_weight` [B] the data's (regularisation images). `mask` [B,
    1, h, w] in 0..1 counts masked elements as zero loss without rescaling the rest, as sd-scripts does; with `by_area`
    the result is divided by the mean of the mask, which makes it the mean loss of the unmasked area.
    """
    area: Tensor | None = None
    if mask is not None:
        mask, size = mask.to(loss), loss.shape[-2:]
        mask = mask if mask.shape[-2:] == size else F.interpolate(mask, size=size, mode="area")
        loss, area = loss * mask, mask.flatten(1).mean(1).clamp_min(SMALLEST_AREA)
    losses = loss.flatten(1).mean(1)
    if by_area and area is not None:
        losses = losses / area
    for factor in (image_weight, weight):
        if factor is not None:
            losses = losses * factor.to(losses)
    return losses
