"""In the denoising loop the host never waits for the device, whatever the family and the sampler.

Passes run on PyTorch's "meta" device, from which nothing can be read, and blocking copies are watched.
"""

import contextlib

import pytest
import torch

from library.config.schema import section_options
from library.config.sections import Sampling
from library.data import pixels
from library.sampling import generate
from library.sampling.prompts import Prompt
from library.sampling.requests import request_of
from tests.sampling.test_sampling import SCRIPTS, given, quiet, shallow  # noqa: F401 - a fixture, and what it needs
from tests.train.test_syncs import META, AttentionRecorder, Calls, meta_as_cpu  # noqa: F401 - a fixture

STEPS = 5
SAMPLERS = section_options(Sampling)["sample_sampler"].choices
CASES = [(script, "ddim") for script in SCRIPTS] + [(SCRIPTS[0], name) for name in SAMPLERS]


def waits(config, sampler_name="ddim", spoil=None):
    """What makes the host wait between the second pass and the last."""
    model = generate.open_sampling_model(config, (), quiet)
    sampler, denoiser = model.family.sampler(model.components), model.components.denoiser
    prompt = Prompt("a cat", "a dog", width=64, height=64, seed=3, sample_steps=STEPS, scale=3.0, guidance_scale=3.0)
    request = request_of(prompt, pixels.Decoding(upright=True))
    object.__setattr__(request, "sampler_name", sampler_name)
    watch, passes, watching = AttentionRecorder(), [], contextlib.ExitStack()

    def begin(*_):
        passes.append(1)
        if len(passes) == 2:  # in the first, tables may go to the device
            watching.enter_context(watch)
            watching.enter_context(Calls(watch.found))

    with model.computing():
        sampler.remember([request])
        denoiser.to(META)
        denoiser.register_forward_pre_hook(begin)
        if spoil:
            denoiser.register_forward_hook(spoil)
        with watching:
            latents = sampler.latents(request)
            end = len(watch.found)
    assert latents.device == META and len(passes) >= STEPS
    return watch.found[:end]


@pytest.mark.parametrize(("script", "sampler_name"), CASES)
def test_no_step_waits_for_the_device(given, meta_as_cpu, script, sampler_name):  # noqa: F811
    assert waits(given(script), sampler_name) == []


def test_what_waits_is_seen(given, meta_as_cpu):  # noqa: F811
    flux = SCRIPTS[1]
    assert "_to_copy cpu -> meta" in str(waits(given(flux), spoil=lambda *a: a[-1] * torch.ones(1).to(META)))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        waits(given(flux), spoil=lambda *a: a[-1] * a[-1].sum().item())
