"""Several prompts are denoised in one batch, with the images of one by one; what does not fit costs no other."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from library import families
from library.compiler import gpu_memory
from library.config.building import build_config
from library.config.problems import ConfigError
from library.families.base import SampleRequest
from library.sampling import batching, generate
from library.sampling.batching import BatchSizer, in_batches
from library.sampling.plan import Column
from library.sampling.prompts import Prompt
from tests.sampling.test_sampling import given, quiet  # noqa: F401
from tests.training import shallow  # noqa: F401

SCRIPTS = [families.lora_script(name) for name in families.FAMILIES]
CPU = torch.device("cpu")
LONG = "a very long caption about a cat in a garden under an old tree, " * 3
REQUESTS = [
    SampleRequest("a cat", "", 64, 96, 2, 4.0, 2.0, 1),
    SampleRequest(LONG, "blurry, dark and " * 4, 64, 96, 2, 2.5, 4.0, 2),
    SampleRequest("", "bad", 64, 96, 2, 6.0, None, 3),
]


def loaded(config):
    family = families.family_for(config)
    return family, family.load(torch.float32, torch.float32)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("scale", [None, 1.0, 0.0])
def test_a_batch_of_unequal_captions_equals_one_by_one(given, script, scale):  # noqa: F811
    family, parts = loaded(given(script))
    sampler, passes = family.sampler(parts), []
    requests = [replace(request, scale=request.scale if scale is None else scale) for request in REQUESTS]
    if len({sampler.batch_key(request) for request in requests}) > 1:  # SDXL's texts have no mask for their padding
        requests[1] = replace(requests[1], prompt="a small white cat", negative="dark")
    assert len({sampler.batch_key(request) for request in requests}) == 1
    parts.denoiser.register_forward_pre_hook(lambda *_: passes.append(1))
    with torch.no_grad():
        alone = torch.cat([sampler.latents(request) for request in requests])
        assert len(passes) == 6
        together = sampler.latents(*requests)
    assert len(passes) == 8
    assert torch.allclose(together, alone, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(alone[0], alone[1], atol=0.1)


@pytest.mark.parametrize("name", ["euler_a", "dpm_2_a", "heun", "dpmsolver++", "pndm", "lcm"])
def test_samplers_of_sdxl_draw_each_noise_by_its_own_seed(given, name):  # noqa: F811
    family, parts = loaded(given("sdxl_train_network"))
    sampler = family.sampler(parts)
    requests = [replace(request, prompt="a cat", steps=4, sampler_name=name) for request in REQUESTS[::2]]
    with torch.no_grad():
        alone = torch.cat([sampler.latents(request) for request in requests])
        assert torch.allclose(sampler.latents(*requests), alone, atol=1e-3, rtol=1e-3)


def test_only_what_has_the_same_size_and_steps_shares_a_batch(given):  # noqa: F811
    family, parts = loaded(given("flux_train_network"))
    sampler, request = family.sampler(parts), REQUESTS[0]
    key = sampler.batch_key(request)
    others = [{"width": 128}, {"steps": 3}, {"scale": 1.0}, {"sigmas": (1.0,)}, {"shift": 2.0}, {"sampler_name": "lms"}]
    assert all(sampler.batch_key(replace(request, **other)) not in (key, None) for other in others)
    assert sampler.batch_key(replace(request, seed=9, prompt="b", guidance=1.0, width=65)) == key
    image = Image.new("RGB", (64, 64))
    assert sampler.batch_key(replace(request, controls=(image,))) is None
    family, parts = loaded(given("sdxl_train_network"))
    sampler = family.sampler(parts)
    assert sampler.batch_key(request) != sampler.batch_key(replace(request, prompt=LONG * 3))


@pytest.mark.parametrize("script", SCRIPTS)
def test_images_of_batches_are_those_of_single_ones(given, script, tmp_path):  # noqa: F811
    texts = enumerate(("a cat", "a dog in a park", "b"))
    prompts = [Prompt(text, width=64, height=64, seed=seed, sample_steps=1) for seed, text in texts]

    def drawn(size):
        config = given(script)
        config = replace(config, sample=replace(config.sample, sample_batch_size=size))
        sheet = generate.generate(config, [Column("base", ())], prompts, tmp_path / str(size), quiet)
        return np.stack([np.asarray(Image.open(file)).astype(int) for row in sheet.files for file in row])

    alone = drawn(1)
    assert np.abs(drawn(2) - alone).max() <= 1 and np.abs(alone[0] - alone[1]).max() > 1


class Sampled:
    """A sampler's side of batches: images by number, and what the device has room for."""

    def __init__(self, room, broken=()):
        self.room, self.broken, self.batches = room, broken, []

    def batch_key(self, request):
        return None if request.controls else request.width

    def make(self, requests):
        self.batches.append([request.seed for request in requests])
        if len(requests) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if any(request.seed in self.broken for request in requests):
            raise RuntimeError("broken")
        return [f"image {request.seed}" for request in requests]

    def run(self, sizer, number=5, **changes):
        requests = [(n, SampleRequest("a", seed=n, **changes)) for n in range(number)]
        return dict(in_batches(self, requests, sizer, self.make))


def test_a_batch_without_room_is_halved_and_stays_so():
    sampler, sizer = Sampled(room=2), BatchSizer(4, CPU)
    assert sampler.run(sizer) == {n: f"image {n}" for n in range(5)}
    assert sampler.batches == [[0, 1, 2, 3], [0, 1], [2, 3], [4]]
    sampler.batches.clear()
    sampler.run(sizer)
    assert sampler.batches == [[0, 1], [2, 3], [4]]


def test_a_size_without_room_is_not_tried_again():
    sampler = Sampled(room=1)
    assert sampler.run(BatchSizer(5, CPU)) == {n: f"image {n}" for n in range(5)}
    assert sampler.batches == [[0, 1, 2, 3, 4], [0, 1], [0], [1], [2], [3], [4]]


def test_one_that_fails_costs_no_other_its_image():
    sampler = Sampled(room=9, broken={2})
    made = sampler.run(BatchSizer(4, CPU))
    assert {n for n, image in made.items() if isinstance(image, str)} == {0, 1, 3, 4}
    assert isinstance(made[2], RuntimeError) and sampler.batches[-1] == [4]
    alone = Sampled(room=0).run(BatchSizer("auto", CPU), number=2)
    assert all(isinstance(error, torch.OutOfMemoryError) for error in alone.values())


def test_what_ends_the_work_is_raised():
    class Cancelled(Exception):
        pass

    def make(requests):
        raise Cancelled

    with pytest.raises(Cancelled):
        [*in_batches(Sampled(9), [(0, REQUESTS[0]), (1, REQUESTS[1])], BatchSizer(2, CPU), make, (Cancelled,))]


@pytest.mark.parametrize(("limit", "batches"), [(None, [[0], [1, 2, 3], [4, 5]]), (9, [[0], [1, 2], [3, 4], [5]])])
def test_auto_takes_as_many_as_the_memory_of_a_gpu_holds(monkeypatch, limit, batches):
    """The first image is measured alone: 2 of 12 GB, partly in use, or of what gpu_memory_limit leaves."""
    memory = {"allocated": 4, "peak": 6}
    cuda = SimpleNamespace(
        memory_allocated=lambda device: memory["allocated"],
        max_memory_allocated=lambda device: memory["peak"],
        memory_reserved=lambda device: 5,
        reset_peak_memory_stats=lambda device: None,
        mem_get_info=lambda device: (7, 12),
    )
    monkeypatch.setattr(batching.torch, "cuda", cuda)
    sampler, sizer = Sampled(room=9), BatchSizer("auto", torch.device("cuda"))
    monkeypatch.setattr(gpu_memory, "_limits", [(limit, torch.device("cuda"))] if limit else [])
    sampler.run(sizer, number=6)
    assert sampler.batches == batches
    sampler.run(sizer, number=1, controls=(Image.new("RGB", (8, 8)),))
    assert sizer.limit(None) == 1 and sizer.limit("another size") == 1


def test_on_a_processor_auto_makes_them_one_by_one():
    sampler = Sampled(room=9)
    sampler.run(BatchSizer("auto", CPU), number=3)
    assert sampler.batches == [[0], [1], [2]]


@pytest.mark.parametrize(("value", "read"), [("auto", "auto"), ("4", 4), (16, 16)])
def test_a_size_is_a_number_or_auto(value, read):
    config = build_config(families.config_class("flux_train_network"), {"sample_batch_size": value}, notes=[])
    assert config.sample.sample_batch_size == read


@pytest.mark.parametrize("value", ["many", "-1", "65", "1.5"])
def test_other_sizes_are_named(value):
    with pytest.raises(ConfigError, match="sample_batch_size"):
        build_config(families.config_class("flux_train_network"), {"sample_batch_size": value}, notes=[])


def test_no_room_for_one_image_is_a_sentence(given, tmp_path, monkeypatch):  # noqa: F811
    config = given("flux_train_network")
    monkeypatch.setattr("library.families.flux.sampler.FluxSampler.denoised", lambda *_: Sampled(0).make(REQUESTS))
    with pytest.raises(ConfigError, match="Not enough memory for an image of 64x64"):
        generate.generate(config, [Column("base", ())], [Prompt("a", width=64, height=64)], tmp_path, quiet)
