"""What samples cost: counted by the check in time and memory, kept in the run's record, and shown in the panel."""

import itertools
import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from kohya_gui.panel import samples as gallery
from library import families
from library.check import preview_memory, preview_time
from library.check.estimate import MemoryEstimate
from library.check.preview_memory import complete_prompts
from library.config.building import replace_options
from library.config.schema import section_options
from library.config.sections.sampling import Sampling
from library.families.base import SampleRequest
from library.runs import bundle, layout, reader
from library.sampling import caption_prompts
from library.sampling.engine import images_left
from library.sampling.requests import imageless_request
from library.train import journal
from library.train.step.clock import Clock
from tests.training import SCRIPTS, config_of, train


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a cat --w 64 --h 64 --s 1\na dog --w 64 --h 64 --s 1\n", encoding="utf-8")
    return path


def test_the_record_keeps_the_images_and_the_panel_shows_their_cost(demo, squares, tmp_path, prompts):
    values = {"train_data_dir": squares, "output_dir": tmp_path / "out", "max_train_steps": 2}
    made = train(config_of(demo, "flux_train_network", sample_prompts=prompts, sample_every_n_steps=1, **values))
    events = made.events("preview")
    assert [(event["step"], event["pictures"]) for event in events] == [(1, 2), (2, 2)]
    assert all(0 < event["seconds"] < 60 and 0 < event["share"] <= 1 for event in events)
    total = made.facts["previews"]
    assert total["pictures"] == 4
    assert total["seconds"] == pytest.approx(sum(event["seconds"] for event in events), abs=0.01)
    assert total["share"] == events[-1]["share"]
    run = reader.run_at(made.folder)
    progress = reader.progress(run.folder).update()
    cost = f"2 sample images in {events[-1]['seconds']:.1f} s; samples took {events[-1]['share']:.0%} of the training"
    assert f"{cost}</p>" in gallery.gallery(run, progress)
    run.facts["state"] = "running"
    assert f"{cost} so far</p>" in gallery.gallery(run, progress)
    assert bundle.EVENTS["preview"] == ("step", "pictures", "seconds", "share") and "previews" in bundle.BUNDLED_FACTS


def test_a_clock_that_is_set_back_changes_no_share(demo, tmp_path, squares, prompts, monkeypatch):
    """By a day before each reading."""
    days = itertools.count()
    clock = SimpleNamespace(time=lambda: time.time() - 86400 * next(days), monotonic=time.monotonic)
    monkeypatch.setattr(journal, "time", clock)
    values = {"train_data_dir": squares, "output_dir": tmp_path / "out", "max_train_steps": 2}
    made = train(config_of(demo, "flux_train_network", sample_prompts=prompts, sample_every_n_steps=1, **values))
    assert all(0 < event["share"] < 1 for event in made.events("preview"))


@pytest.mark.parametrize("damaged", [{}, {"pictures": 2}, {"pictures": "x", "seconds": 1, "share": 0.1}])
def test_a_damaged_or_older_record_shows_no_cost(tmp_path, damaged):
    (tmp_path / layout.PROGRESS).write_text(json.dumps({"kind": "preview", **damaged}) + "\n", encoding="utf-8")
    assert gallery._cost_html(reader.progress(tmp_path).update(), active=True) == ""


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_check_counts_steps_and_sizes(demo, script, prompts):
    plain = config_of(demo, script, sample_prompts=prompts, sample_every_n_steps=2, max_train_steps=8)
    clock = Clock(8, 4, 2)

    def steps(**values):
        return preview_time.preview_time(replace_options(plain, **values), clock, (64, 64)).steps

    prompts.write_text("a cat --w 64 --h 64 --l 1\n", encoding="utf-8")
    few = steps(sample_steps=2)
    assert steps(sample_steps=4) == pytest.approx(2 * few)
    prompts.write_text("a cat --w 128 --h 64 --l 1\n", encoding="utf-8")
    assert steps(sample_steps=2) > few
    assert steps(sample_steps=2, sample_compile="true") < steps(sample_steps=2, sample_compile="false")


@pytest.mark.parametrize("script", ["sdxl_train_network", "flux_train_network"])
@pytest.mark.parametrize("name", section_options(Sampling)["sample_sampler"].choices)
def test_the_check_counts_the_passes_that_a_sampler_takes(demo, script, name, prompts):
    prompts.write_text(f"a cat --w 64 --h 64 --l 1 --s 6 --ss {name}\n", encoding="utf-8")
    config = config_of(demo, script, sample_prompts=prompts, sample_every_n_steps=2, max_train_steps=8)
    family = families.family_for(config)
    components = family.load(torch.float32, torch.float32)
    sampler, taken = family.sampler(components), []
    components.denoiser.register_forward_pre_hook(lambda *_: taken.append(1))
    (prompt,) = complete_prompts(config)
    with torch.no_grad():
        sampler.latents(imageless_request(prompt))
    assert images_left([prompt], sampler, rounds=3).passes == 3 * len(taken)
    counted = preview_time.preview_time(config, Clock(8, 4, 2), (64, 64)).steps
    prompts.write_text("a cat --w 64 --h 64 --l 1 --s 6 --ss euler\n", encoding="utf-8")
    usual = preview_time.preview_time(config, Clock(8, 4, 2), (64, 64)).steps
    assert counted / usual == pytest.approx(len(taken) / 6)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_check_counts_both_prompts_where_the_sampler_is_guided(demo, script, prompts):
    config = config_of(demo, script, sample_prompts=prompts, sample_every_n_steps=2, max_train_steps=8, sample_steps=1)
    family = families.family_for(config)
    sampler = family.sampler(family.load(torch.float32, deferring=True))

    def steps(scale):
        prompts.write_text(f"a cat --w 64 --h 64 --l {scale}\n", encoding="utf-8")
        return preview_time.preview_time(config, Clock(8, 4, 2), (64, 64)).steps

    once = min(steps(scale) for scale in (0, 0.5, 1, 5))
    for scale in (0, 0.5, 1, 5):
        passes = 2 if sampler.is_guided(SampleRequest("", scale=scale)) else 1
        assert steps(scale) == pytest.approx(passes * once)


@pytest.mark.parametrize(
    ("values", "times"),
    [
        ({"sample_every_n_steps": 3}, 3),  # 3, 6, and 8, which is the last
        ({"sample_every_n_steps": 4}, 2),
        ({"sample_every_n_steps": 3, "sample_at_first": True}, 4),
        ({"sample_every_n_epochs": 1, "sample_every_n_steps": 1}, 2),
        ({"sample_at_first": True}, 2),
        ({}, 0),
    ],
)
def test_times_follow_the_schedule(demo, prompts, values, times):
    config = config_of(demo, "flux_train_network", sample_prompts=prompts, **values)
    assert preview_time.count_times(config, Clock(8, 4, 2)) == times
    from_captions = replace(config, sample=replace(config.sample, sample_prompts=None, sample_from_captions=1))
    assert preview_time.count_times(from_captions, Clock(8, 4, 2)) == times
    for schedule in (config, from_captions):  # a training that goes on has its base model's images
        left = preview_time.count_times(schedule, Clock(8, 4, 2, step=7, epoch=2, in_epoch=3))
        assert left == (1 if times else 0)
    assert len(preview_memory.complete_prompts(from_captions)) == 2
    assert preview_memory.largest_sample(from_captions) == (caption_prompts.MAX_SAMPLE_SIDE,) * 2


def test_memory_counts_batches_and_the_lora(demo, prompts, tmp_path):
    config = config_of(demo, "flux_train_network", sample_prompts=prompts, sample_every_n_steps=2)
    needs = MemoryEstimate(6, {"model": 4.0, "activations": 9.0}, memory=24.0)

    def peak(**values):
        return preview_memory.denoising_peak(needs, replace_options(config, **values), (1024, 1024))

    one = peak()
    assert peak(sample_batch_size=1) == one < peak(sample_batch_size=8)
    save_file({"a": torch.zeros(2**20)}, tmp_path / "a.safetensors")
    assert peak(sample_lora=(f"{tmp_path / 'a.safetensors'}:0.5",)) > one + 0.9 * 4 / 1024
    tight = replace(needs, memory=peak(sample_batch_size=8) / 2)
    (said,) = preview_memory.sentences(tight, replace_options(config, sample_batch_size=8))
    assert said[0] in ("hint", "ok")
