"""Blocks are skipped where steps change little: which, how often, with what in their place; nothing is left behind."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from library import families
from library.config.building import build_config
from library.config.problems import ConfigError
from library.families.base import BlockChain, SampleRequest
from library.families.capabilities import HasBlockChain
from library.sampling import feature_cache, generate
from library.sampling.feature_cache import FeatureCache, distance
from library.sampling.plan import Column
from library.sampling.prompts import Prompt
from tests.sampling.test_sampling import given, quiet  # noqa: F401
from tests.training import SCRIPTS as TRAININGS
from tests.training import cached_squares as squares  # noqa: F401
from tests.training import config_of, shallow, train  # noqa: F401

SCRIPTS = [families.lora_script(name) for name in families.FAMILIES]
STEPS = 8
# Full and skipped passes of 8 steps where everything is similar, by how many may be skipped in a row.
PASSES = {3: "FFSSSFSS", 1: "FFSFSFSF"}
REQUEST = SampleRequest("a cat", "", 64, 64, STEPS, 2.0, 2.0, 1, "euler")


@pytest.fixture(params=SCRIPTS)
def opened(given, request):  # noqa: F811
    """A family's sampler, and the blocks of its chain with how often each has run."""
    family = families.family_for(given(request.param))
    parts = family.load(torch.float32, torch.float32)
    assert isinstance(family, HasBlockChain)
    lists = [getattr(parts.denoiser, name) for name in family.block_chain.lists]
    blocks = [block for one in lists for block in (one if isinstance(one, nn.ModuleList) else [one])]
    runs = [0] * len(blocks)
    for place, block in enumerate(blocks):
        block.register_forward_hook(lambda *_, place=place: runs.__setitem__(place, runs[place] + 1))
    return SimpleNamespace(family=family, parts=parts, sampler=family.sampler(parts), runs=runs)


def latents(opened, threshold, *requests):
    cache = FeatureCache(opened.parts.denoiser, opened.family.block_chain, threshold)
    opened.runs[:] = [0] * len(opened.runs)
    with torch.no_grad(), cache.active():
        return opened.sampler.latents(*(requests or [REQUEST])), cache


def test_a_threshold_below_every_change_gives_the_same_image(opened):
    plain, off = latents(opened, "off")
    assert not off.passes and set(opened.runs) == {STEPS}
    cached, cache = latents(opened, 1e-9)
    assert torch.equal(cached, plain) and (cache.skipped, cache.passes) == (0, STEPS) and set(opened.runs) == {STEPS}


def test_similar_steps_run_the_first_block_alone(opened):
    plain, _ = latents(opened, "off")
    cached, cache = latents(opened, 1e9)
    unet = opened.family.block_chain.is_unet
    full = PASSES[opened.family.block_chain.max_skipped].count("F")
    first, *middle = opened.runs
    last = [middle.pop()] if unet else []  # the last level of a U-Net joins its first one
    assert first == STEPS and set(middle) == {full} and last in ([], [STEPS])
    assert (cache.skipped, cache.passes) == (STEPS - full, STEPS)
    assert cached.isfinite().all() and cached.shape == plain.shape and not torch.equal(cached, plain)


def test_nothing_is_left_behind_also_after_an_error(opened):
    names, states = [*opened.parts.denoiser._modules], [*opened.parts.denoiser.state_dict()]
    attributes = {*vars(opened.parts.denoiser)}
    cache = FeatureCache(opened.parts.denoiser, opened.family.block_chain, 1.0)
    with contextlib.suppress(RuntimeError), cache.active():
        assert [*opened.parts.denoiser.state_dict()] == states  # also within it
        raise RuntimeError
    assert {*vars(opened.parts.denoiser)} == attributes and [*opened.parts.denoiser._modules] == names
    first, _ = latents(opened, 0.5)
    again, _ = latents(opened, 0.5)
    assert torch.equal(first, again)  # no batch remembers another


def test_a_batch_is_decided_together_and_close_to_one_by_one(opened):
    requests = [REQUEST, SampleRequest("a dog", "", 64, 64, STEPS, 2.0, 2.0, 2, "euler")]
    together, _ = latents(opened, 1e9, *requests)
    alone = torch.cat([latents(opened, 1e9, request)[0] for request in requests])
    assert torch.allclose(together, alone, atol=1e-3, rtol=1e-3)  # where all steps are skipped that may be


def test_compiled_blocks_give_the_image_of_eager_ones(opened):
    eager, _ = latents(opened, 1e9)
    torch._dynamo.reset()
    for module in opened.parts.denoiser.modules():
        if type(module).__name__ in opened.family.block_classes:
            module.compile(backend="eager", dynamic=False)
    compiled, cache = latents(opened, 1e9)
    torch._dynamo.reset()
    assert cache.skipped == PASSES[opened.family.block_chain.max_skipped].count("S") and torch.allclose(
        compiled, eager, atol=1e-4, rtol=1e-4
    )


class Toy(nn.Module):
    """Two lists, as of FLUX.1: of two streams, then of both as one, whose blocks change them by `rate` of the pass."""

    def __init__(self):
        super().__init__()
        self.pairs = nn.ModuleList(Pair() for _ in range(2))
        self.joint = nn.ModuleList(Single() for _ in range(2))
        self.number = 0

    def forward(self, img, txt):
        for block in self.pairs:
            img, txt = block(img, txt, self.number)
        joint = torch.cat((txt, img), dim=1)
        for block in self.joint:
            joint = block(joint, self.number)
        self.number += 1
        return joint


class Pair(nn.Module):
    def forward(self, img, txt, number):
        return img + 1, txt + number


class Single(nn.Module):
    def forward(self, joint, number):
        return joint + 3 * number + 1


def test_the_taylor_step_is_exact_where_changes_are_linear():
    toy, chain = Toy(), BlockChain(("pairs", "joint"))
    img, txt = torch.randn(1, 3, 4), torch.randn(1, 2, 4)
    expected = [toy(img, txt) for _ in range(9)]
    toy.number = 0
    cache = FeatureCache(toy, chain, 0.5)
    with cache.active():
        found = [toy(img, txt) for _ in range(9)]
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, expected, strict=True))
    assert cache.skipped == 6 and cache.passes == 9  # FFSSSFSSS


def test_passes_of_one_step_have_states_of_their_own():
    """The two prompts of guidance, one after the other."""
    toy, chain = Toy(), BlockChain(("pairs", "joint"))
    one, other = torch.randn(1, 3, 4), torch.randn(1, 3, 4) * 50
    txt, cache = torch.zeros(1, 2, 4), FeatureCache(toy, chain, 0.5)
    with cache.active(passes_per_step=2):
        for _ in range(4):
            toy(one, txt)
            toy(other, txt)
    assert (cache.skipped, cache.passes) == (4, 8)


def test_the_distance_is_that_of_the_image_that_moved_most():
    before = torch.tensor([[1.0, -1.0], [2.0, 2.0]])
    change = torch.tensor([[1.0, -1.5], [2.0, 1.0]])
    assert float(distance(change, before)) == pytest.approx(0.25)
    assert float(distance(torch.zeros(1, 2), torch.zeros(1, 2))) == 0


def test_a_chain_without_blocks_to_skip_is_left_alone():
    toy = Toy()
    toy.pairs, toy.joint = toy.pairs[:1], nn.ModuleList()
    with FeatureCache(toy, BlockChain(("pairs", "joint")), 0.5).active():
        assert "pairs" not in vars(toy)
    assert not FeatureCache(toy, None, 0.5).is_on


@pytest.mark.parametrize("value", [0.0001, "0.3", 1, "auto", "AUTO", "off"])
def test_thresholds_that_are_read(value):
    config = build_config(families.config_class(SCRIPTS[0]), {"sample_cache": value}, notes=[])
    assert config.sample.sample_cache in (0.0001, 0.3, 1.0, "auto", "off")


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("value", [-0.1, 1.5, "much", float("nan")])
def test_a_threshold_out_of_range_is_named_before_anything_is_loaded(script, value):
    with pytest.raises(ConfigError, match="sample_cache"):
        build_config(families.config_class(script), {"sample_cache": value}, notes=[])


def test_images_of_the_shell_use_it(given, tmp_path, caplog):  # noqa: F811
    caplog.set_level("INFO", logger=feature_cache.__name__)
    config = given("flux_train_network")
    config = build_config(type(config), {**config_values(config), "sample_cache": 1.0, "sample_steps": STEPS}, notes=[])
    sheet = generate.generate(config, [Column("base", ())], [Prompt("a", width=64, height=64, seed=1)], tmp_path, quiet)
    assert np.asarray(Image.open(sheet.files[0][0])).std() > 0
    assert f"skipped most blocks in {PASSES[3].count('S')} of {STEPS} passes" in caplog.text


def config_values(config):
    from library.config.schema import changed, flatten_sections

    return flatten_sections(changed(config))


@pytest.mark.parametrize("script", [TRAININGS[0], "flux_train"])
def test_previews_of_a_training_skip_only_where_that_is_set(shallow, squares, tmp_path, caplog, script):  # noqa: F811
    caplog.set_level("INFO", logger=feature_cache.__name__)
    (tmp_path / "p.txt").write_text(f"a cat --w 64 --h 64 --d 3 --s {STEPS}\n", encoding="utf-8")
    values = {"train_data_dir": squares, "max_train_steps": 2, "seed": 3, "sample_prompts": tmp_path / "p.txt"}
    values["sample_every_n_steps"] = 1
    plain = train(config_of(shallow, script, output_dir=tmp_path / "a", **values))
    assert "skipped" not in caplog.text
    cached = train(config_of(shallow, script, output_dir=tmp_path / "b", sample_cache=1.0, **values))
    assert caplog.text.count("sample_cache skipped most blocks") == 2
    assert cached.losses == plain.losses and len(cached.events("sample")) == 2
