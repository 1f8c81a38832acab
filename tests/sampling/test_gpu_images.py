"""Recorded and compiled images against eager ones: on a GPU, in one command.

python -m pytest -q -m gpu tests/sampling
"""

from dataclasses import replace

import pytest
import torch

from library.sampling import generate
from library.sampling.engine import images_left
from library.sampling.requests import request_of
from tests.sampling.test_engine import STEPS, compiling, drawn, engine_of, opened, prompts_for
from tests.sampling.test_sampling import SCRIPTS, given, shallow  # noqa: F401 - a fixture, and what it needs
from tests.training import config_of, demo, shapes, train  # noqa: F401 - two fixtures

pytestmark = pytest.mark.gpu
CHANGES = {}, {"seed": 5, "prompt": "a red bicycle at night"}, {"width": 128}
# SD 1.5 at 64 x 64 ends in one token, which has a graph of its own, and norms of one pixel, which jump at any rounding.
LARGER = {"train_network": ({"width": 256, "height": 256}, {"width": 320, "height": 256})}
RECORDED = {"cuda_graphs": "true"}


def recording(config, **options):
    """Record the first pass of each size: `sample_compile = auto` would time some eager ones before."""
    config = replace(config, sample=replace(config.sample, sample_compile="false"))
    return replace(config, compile=replace(config.compile, **RECORDED, **options))


def apart(expected, latents):
    """The largest difference relative to the size of the expected numbers."""
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(expected, latents, strict=True))


@pytest.mark.parametrize("script", SCRIPTS)
def test_recorded_images_are_those_without_recording(given, script):  # noqa: F811
    """Equal to the last bit but for convolutions, which add up in any order."""
    config = recording(given(script))
    model = opened(config)
    prompts = prompts_for(model, *CHANGES)
    expected, engine = drawn(model, None, prompts), engine_of(model, config)
    found = drawn(model, engine, prompts)
    print(f"{script}: {apart(expected, found):.1e}")
    assert apart(expected, found) < (1e-3 if script.startswith("sdxl") else 1e-6)
    assert not engine.recorder.why_not and len(engine.recorder.recordings) == 2
    assert engine.recorder.replays == 3 * STEPS - 2
    assert apart(expected, drawn(model, engine, prompts)) < 1e-3 and engine.recorder.replays == 6 * STEPS - 2


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("graphs", ["false", "true"])
def test_compiled_images_are_the_eager_ones(given, script, graphs):  # noqa: F811
    config = compiling(given(script), "inductor", cuda_graphs=graphs)
    model = opened(config)
    prompts = prompts_for(model, *LARGER.get(script, CHANGES))
    expected, engine = drawn(model, None, prompts), engine_of(model, config)
    found = drawn(model, engine, prompts)
    log = engine.plan.log
    print(f"{script}: {apart(expected, found):.1e}, {log.summary()}")
    assert apart(expected, found) < 2e-3 and not log.recompilations() and not log.unproven()
    assert bool(engine.recorder.recordings) == (graphs == "true")
    engine.close()


def test_freed_recordings_return_their_memory(given):  # noqa: F811
    config = recording(given(SCRIPTS[1]))
    model = opened(config)
    drawn(model, None, prompts_for(model, *CHANGES))
    torch.cuda.empty_cache()
    before, engine = torch.cuda.memory_reserved(), engine_of(model, config)
    drawn(model, engine, prompts_for(model, *CHANGES))
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() > before
    engine.recorder.free()
    assert torch.cuda.memory_reserved() <= before + 2**21  # a workspace of a library


def test_without_memory_recordings_are_freed_and_the_image_is_made(given):  # noqa: F811
    config = recording(given(SCRIPTS[1]))
    model = opened(config)
    engine, (prompt,) = engine_of(model, config), prompts_for(model)
    expected = drawn(model, engine, [prompt])
    assert engine.recorder.recordings
    sampler, tries, request = model.family.sampler(model.components), [], request_of(prompt, generate.AS_SEEN)

    def hungry():
        tries.append(len(engine.recorder.recordings))
        if len(tries) == 1:
            torch.empty(2**50, device="cuda")
        return sampler.latents(request)

    with model.computing(), engine.running(images_left([prompt], sampler)):
        latents = engine.images(sampler, [request], hungry)
    assert tries == [1, 0] and apart(expected, [latents]) < 1e-5


@pytest.mark.parametrize("script", ["sdxl_train_network", "flux_train_network"])
@pytest.mark.parametrize("compiled", [False, True])
def test_previews_of_a_recorded_training_change_no_loss(demo, shapes, tmp_path, script, compiled):  # noqa: F811
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat --w 64 --h 64 --s 6 --d 1 --l 4\na dog --w 128 --h 64 --s 6 --d 2\n", encoding="utf-8")
    values = {"train_data_dir": shapes, "resolution": "96", "enable_bucket": True, "mixed_precision": "no", "seed": 3}
    values |= {"max_train_steps": 9, "gradient_checkpointing": True, "compile": compiled, **RECORDED}
    samples = {"sample_every_n_steps": 3, "sample_prompts": prompts, "sample_compile": str(compiled).lower()}
    plain = train(config_of(demo, script, output_dir=tmp_path / "plain", **values))
    images = train(config_of(demo, script, output_dir=tmp_path / "pictures", **values, **samples))
    log = (images.folder / "log.txt").read_text(encoding="utf-8")
    assert "Recorded a pass for images" in log and not images.events("sample_failed")
    worst = max(abs(a - b) / abs(a) for a, b in zip(plain.losses, images.losses, strict=True))
    print(f"{script}, compiled {compiled}: {worst:.1e}")
    assert worst < (1e-6 if script.startswith("flux") else 3e-4)
    assert plain.facts["compile"]["num_graphs"] == images.facts["compile"]["num_graphs"]


def test_auto_times_a_pass_and_decides(given):  # noqa: F811
    config = given(SCRIPTS[1])
    config = replace(config, sample=replace(config.sample, sample_compile="auto"))
    model = opened(config)
    engine = engine_of(model, config)
    drawn(model, engine, prompts_for(model))
    assert engine.pass_seconds and not engine.plan.active  # too few passes are left
