import json
from pathlib import Path

import pytest
import torch

from library.objectives import loss

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "sd_scripts_vectors.json").read_text())


@pytest.mark.parametrize("kind", ["l1", "l2", "huber", "smooth_l1"])
def test_kinds_agree_with_sd_scripts(kind):
    pred, target = torch.tensor([[0.5], [-1.0]]), torch.tensor([[0.0], [1.0]])
    actual = loss.elementwise(pred, target, kind, torch.full((2,), 0.1)).flatten().tolist()
    assert actual == pytest.approx(VECTORS["loss_types_pred(.5,-1)_tgt(0,1)_c0.1"][kind], rel=1e-6)


def test_each_image_has_its_own_threshold():
    pred, target, c = torch.ones(2, 4, 3, 3), torch.zeros(2, 4, 3, 3), torch.tensor([0.1, 2.0])
    actual = loss.elementwise(pred, target, "huber", c)[:, 0, 0, 0]
    torch.testing.assert_close(actual, 2 * c * ((1 + c**2).sqrt() - c))
    assert loss.elementwise(pred.bfloat16(), target.bfloat16(), "huber", c).dtype == torch.float32


def test_weights_and_masks():
    errors = torch.arange(2 * 4 * 2 * 2, dtype=torch.float32).reshape(2, 4, 2, 2)
    means = errors.flatten(1).mean(1)
    weights, images = torch.tensor([2.0, 0.5]), torch.tensor([1.0, 0.0])
    torch.testing.assert_close(loss.per_image(errors, weights, images), means * weights * images)
    mask = torch.zeros(2, 1, 4, 4)
    mask[..., :2] = 1  # the left half, twice as fine as the latents
    torch.testing.assert_close(loss.per_image(errors, mask=mask), errors[..., 0].flatten(1).sum(1) / 16)


def test_the_area_of_a_mask_can_be_divided_out():
    errors = torch.arange(3 * 4 * 2 * 2, dtype=torch.float32).reshape(3, 4, 2, 2)
    mask = torch.zeros(3, 1, 2, 2)
    mask[0, :, 0, 0], mask[1] = 1, 0.5
    losses = loss.per_image(errors, mask=mask, by_area=True)
    torch.testing.assert_close(losses[0], errors[0, :, 0, 0].mean())
    torch.testing.assert_close(losses[1], errors[1].mean())
    assert losses[2] == 0, "a black mask"
    assert torch.equal(loss.per_image(errors, by_area=True), loss.per_image(errors))


def test_a_mask_does_not_rescale():
    mask = torch.zeros(1, 1, 4, 4)
    mask[..., :2] = 1
    assert loss.per_image(torch.ones(1, 4, 4, 4), mask=mask).mean().item() == VECTORS["masked_loss_mean"]
