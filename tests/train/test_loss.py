"""Short batches in the shape of full ones, and noise of several processes."""

from types import SimpleNamespace

import pytest
import torch

from library import families
from library.objectives.base import NoisedBatch
from library.train.step.loss import LossFunction, predict_padded
from library.train.step.rng import StepGenerators


def noised(rows):
    values = torch.randn(rows, 4, 6, 6)
    return NoisedBatch(values, torch.rand(rows), values + 1, torch.ones(rows), sigmas=torch.rand(rows))


def test_a_short_batch_is_predicted_in_full_shape_with_its_own_numbers():
    torch.manual_seed(0)
    model = SimpleNamespace(shapes=[])

    def predict(given, text, sizes):
        model.shapes.append((len(given.latents), len(given.sigmas), len(text["t"]), len(sizes)))
        return given.latents * given.timesteps[:, None, None, None] + text["t"][:, :, None, None].mean() + sizes.mean()

    batch, text, sizes = noised(3), {"t": torch.ones(3, 4)}, torch.ones(3, 6)
    answer = predict_padded(5, predict, batch, text, sizes)
    assert model.shapes == [(5, 5, 5, 5)]
    torch.testing.assert_close(answer, predict(batch, text, sizes))
    assert predict_padded(3, predict, batch, text, sizes).shape[0] == 3


def test_gradients_of_filling_rows_do_not_count():
    weight = torch.ones((), requires_grad=True)
    batch, sizes = noised(1), torch.ones(1, 6)
    predict_padded(4, lambda n, *_: n.latents * weight, batch, {}, sizes).sum().backward()
    torch.testing.assert_close(weight.grad, batch.latents.sum())


@pytest.mark.parametrize("name", families.FAMILIES)
def test_processes_draw_together_what_one_draws_for_all_their_images(name):
    config = families.config_class(families.lora_script(name))()
    family, latents = families.family_for(config), torch.randn(2, 16, 8, 8)

    def noise(rank, ranks):
        generators = StepGenerators(7, torch.device("cpu"), rank)
        generators.seed_batch(3, 1)
        machine = SimpleNamespace(rank=rank, ranks=ranks)
        compute = LossFunction(family, None, None, config, machine, generators, None)
        return compute.add_noise(latents if ranks > 1 else latents.repeat(2, 1, 1, 1))

    whole, parts = noise(0, 1), [noise(rank, 2) for rank in range(2)]
    for field in ("latents", "timesteps", "target", "weight"):
        together = torch.cat([getattr(part, field) for part in parts])
        assert torch.equal(together, getattr(whole, field)), field
    assert not torch.equal(parts[0].timesteps, parts[1].timesteps)
