"""Tiny trainings by flow matching against musubi-tuner's own functions (tests/golden/musubi_flow.json).

Both had the same stream of random numbers: for step n a generator of that seed, noise first, then timesteps.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from library import families
from library.compiler.log import CompileLog
from library.config.building import build_config
from library.config.ineffective import ineffective_options
from library.config.schema import options_of
from library.data.batch import Batch
from library.families.shared import autoencoder
from library.objectives import flow
from library.train.step.loss import LossFunction

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "musubi_flow.json").read_text(encoding="utf-8"))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def latents_of(family, step):
    """The images of a step; Z-Image's are scaled by the family, so they are given as the autoencoder makes them."""
    latents = torch.randn(2 if family == "qwen_image" else 1, 4, 8, 8, generator=seeded(1000 + step))
    scale, shift = autoencoder.FLUX
    return latents / scale + shift if family == "zimage" else latents


@pytest.mark.parametrize(
    "case", GOLDEN["trainings"], ids=lambda case: "-".join(map(str, (case["family"], *case["options"].values())))
)
def test_a_tiny_training_equals_musubi_tuners(case, monkeypatch):
    config = build_config(families.config_class(f"{case['family']}_train_network"), case["options"], notes=[])
    assert not ineffective_options(config).keys() & case["options"].keys() - {"weighting_scheme", "max_timestep"}
    family, weights = families.family_for(config), torch.tensor([0.2, -0.3, 0.1], requires_grad=True)

    def velocity(denoiser, noised, text, controls):
        return weights[0] * noised.latents + weights[1] * noised.latents.tanh() + weights[2]

    monkeypatch.setattr(family, "velocity", velocity)
    components = SimpleNamespace(denoiser=None, encoders={})
    compute_loss = LossFunction(
        family,
        components,
        SimpleNamespace(trained_parts={}),
        config,
        SimpleNamespace(rank=0, ranks=1, autocast=lambda: torch.autocast("cpu", enabled=False)),
        SimpleNamespace(noise=torch.Generator()),
        CompileLog(),
    )
    optimizer, losses = torch.optim.SGD([weights], lr=0.05), []
    for step in range(1, len(case["losses"]) + 1):
        compute_loss.generators.noise.manual_seed(step)
        latents = latents_of(case["family"], step)
        rows = torch.ones(len(latents))
        loss = compute_loss(Batch([""] * len(rows), rows, rows, [""] * len(rows), latents=latents, text={}))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(case["losses"], rel=1e-6, abs=1e-6)
    assert weights.tolist() == pytest.approx(case["weights"], rel=1e-6, abs=1e-6)


FLOW = [script for script in families.RUNS if "timestep_sampling" in options_of(families.config_class(script))]


@pytest.mark.parametrize("script", FLOW)
@pytest.mark.parametrize("again", [False, True])
def test_every_flow_model_trains_the_chosen_timesteps_alone(script, again):
    cls, latents = families.config_class(script), torch.zeros(2000, 1, 4, 4)
    for sampling in options_of(cls)["timestep_sampling"].choices:
        options = {"timestep_sampling": sampling, "min_timestep": 100, "max_timestep": 400}
        options |= {"preserve_distribution_shape": True} if again and sampling != "sigma" else {}
        config = build_config(cls, options, notes=[])
        assert not ineffective_options(config).keys() & options.keys() - {"max_timestep"}, sampling
        sigmas = flow.sampled(latents, config.noise, seeded(0))
        assert 0.1 <= sigmas.min() < 0.14 and 0.38 < sigmas.max() <= 0.4, sampling
        levels = families.family_for(config).validation_timesteps
        assert levels == pytest.approx([0.16, 0.22, 0.28, 0.34])


def test_drawing_again_keeps_the_shape_of_the_distribution_and_scaling_does_not():
    cls, latents = families.config_class("zimage_train_network"), torch.zeros(20000, 1, 4, 4)
    options = {"timestep_sampling": "sigmoid", "min_timestep": 500}
    noise = build_config(cls, options, notes=[]).noise
    whole = flow.sampled(latents, build_config(cls, {"timestep_sampling": "sigmoid"}, notes=[]).noise, seeded(0))
    q = torch.tensor([0.25, 0.5, 0.75])
    torch.testing.assert_close(flow.sampled(latents, noise, seeded(0)), whole * 0.5 + 0.5)
    sigmas = flow.sampled(
        latents[:2000], build_config(cls, options | {"preserve_distribution_shape": True}, notes=[]).noise, seeded(1)
    )
    torch.testing.assert_close(sigmas.quantile(q), whole[whole >= 0.5].quantile(q), atol=0.02, rtol=0)


def test_where_hardly_any_draw_is_in_the_range_others_are_scaled_into_it():
    sigmas = flow.sigmas_in_range(torch.tensor([0.1, 0.55, 0.3, 0.9]), 2, 0.5, 0.6)
    assert sigmas.tolist() == pytest.approx([0.55, 0.51])


def test_redrawing_does_not_make_the_host_wait():
    from torch._subclasses.fake_tensor import FakeTensorMode

    options = {"preserve_distribution_shape": True, "min_timestep": 500, "weighting_scheme": "cosmap"}
    config = build_config(families.config_class("zimage_train_network"), options, notes=[])
    with FakeTensorMode():
        flow.noised(torch.zeros(2, 16, 8, 8), config.noise, config.loss, None)


def test_the_range_of_a_shifted_table_is_that_of_the_timesteps_that_are_trained():
    every = torch.arange(1000) / 1000 + 1e-5
    for shift in (0.5, 3.0):
        sigmas = flow.from_table(every, shift, 0.2, 0.8)
        assert 0.2 < sigmas.min() < 0.21 and 0.79 < sigmas.max() <= 0.8, shift
    assert torch.equal(flow.from_table(every, 3.0), flow.from_table(every, 3.0, 0.0, 1.0))
    assert flow.from_table(every, 3.0, 0.5, 0.5).unique().numel() == 1


def test_a_range_and_its_way_without_effect_are_named():
    cls = families.config_class("qwen_image_train_network")
    reasons = {
        name: ineffective_options(build_config(cls, {"preserve_distribution_shape": True} | options, notes=[])).get(
            "preserve_distribution_shape"
        )
        for name, options in {
            "none": {},
            "one": {"max_timestep": 800},
            "table": {"max_timestep": 8, "timestep_sampling": "sigma"},
        }.items()
    }
    assert "neither min_timestep nor max_timestep" in str(reasons["none"]) and "sigma" in str(reasons["table"])
    assert reasons["one"] is None
