"""Every option of an image acts on each model that takes it and on no other, also in a batch of unequal requests."""

import itertools
from dataclasses import replace

import pytest
import torch

from library import families
from library.config import ineffective
from library.families.base import SampleRequest
from library.families.shared.unet_sampler import SAMPLERS
from tests.sampling.test_sampling import given  # noqa: F401
from tests.training import shallow  # noqa: F401

SCRIPTS = [families.lora_script(name) for name in families.FAMILIES]
OF_DIFFUSION = [script for script in SCRIPTS if not families.config_class(script).shifts_samples]
PLAIN = SampleRequest("a cat", "", 64, 64, 2, 4.0, None, 1)
CHANGES = {
    "seed": {"seed": 2},
    "steps": {"steps": 3},
    "scale": {"scale": 2.5},
    "no guidance": {"scale": 1.0},
    "negative prompt": {"negative": "dark and blurry"},
    "sigmas": {"sigmas": (0.9, 0.4)},
    "shift": {"shift": 9.0},
    "guidance": {"guidance": 9.0},
    "sampler": {"sampler_name": "euler_a"},
    "width": {"width": 130},
    "height": {"height": 99},
}


def is_idle(config, change):
    """Whether the model takes no such option, by what the page and the check say."""
    option = {"shift": "sample_shift", "guidance": "sample_guidance_scale", "sampler": "sample_sampler"}.get(change)
    return option is not None and option in ineffective.of_model(config)


def differ(first, second):
    return first.shape != second.shape or not torch.allclose(first, second, atol=1e-5)


@pytest.fixture(params=SCRIPTS)
def sampled(request, given):  # noqa: F811
    config = given(request.param)
    family = families.family_for(config)
    with torch.no_grad():
        yield config, family.sampler(family.load(torch.float32, torch.float32))


def test_options_act_where_they_are_said_to(sampled):
    config, sampler = sampled
    plain = sampler.latents(PLAIN)
    assert torch.equal(plain, sampler.latents(PLAIN))
    acting = {name: differ(sampler.latents(replace(PLAIN, **change)), plain) for name, change in CHANGES.items()}
    assert acting == {name: not is_idle(config, name) for name in CHANGES}
    for scale in (0.0, 1.0, 1.5):  # without guidance there is no negative prompt
        without = replace(PLAIN, scale=scale)
        changed = differ(sampler.latents(without), sampler.latents(replace(without, negative="dark")))
        assert changed == sampler.is_guided(without)


def test_sides_are_rounded_down_and_one_step_is_enough(sampled):
    _, sampler = sampled
    multiple = sampler.family.sample_multiple
    for width, height in ((1, 65), (100, 130), (64, 127)):
        request = replace(PLAIN, width=width, height=height, steps=1)
        size = tuple(max(side // multiple * multiple, 64) for side in (height, width))
        latents = sampler.latents(request)
        assert sampler.size(request) == size and tuple(side * 8 for side in latents.shape[-2:]) == size
        assert latents.isfinite().all() and sampler.count_passes(request) == sampler.count_steps(request) == 1


@pytest.mark.parametrize("script", OF_DIFFUSION)
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("steps", [1, 3])
def test_every_sampler_gives_a_batch_of_unequal_requests_the_images_of_single_ones(given, script, name, steps):  # noqa: F811
    family = families.family_for(given(script))
    sampler = family.sampler(family.load(torch.float32, torch.float32))
    first = replace(PLAIN, sampler_name=name, steps=steps)
    requests = [first, replace(first, seed=5, scale=2.0, negative="dark"), replace(first, prompt="a dog", seed=9)]
    with torch.no_grad():
        alone = torch.cat([sampler.latents(request) for request in requests])
        together = sampler.latents(*requests)
    assert alone.isfinite().all() and float((together - alone).norm() / alone.norm()) < 1e-3
    assert sampler.count_steps(first) == steps


@pytest.mark.parametrize("steps", [1, 2, 1000])
@pytest.mark.parametrize("shift", [None, 0.3, 9.0])
def test_noise_falls_in_every_of_the_steps(sampled, steps, shift):
    config, sampler = sampled
    request = replace(PLAIN, steps=steps, shift=shift)
    assert sampler.count_steps(request) == sampler.count_passes(request) == steps
    if config.script not in OF_DIFFUSION:
        for tokens in (16, 4096):
            sigmas = sampler.sigmas(request, tokens)
            assert len(sigmas) == steps + 1 and sigmas[0] < 1.0 + 1e-9 and sigmas[-1] == 0.0
            assert all(below < above for above, below in itertools.pairwise(sigmas))
