"""Captions that are encoded once are what the text encoders of a step say, whatever changes these."""

import itertools

import numpy as np
import pytest
from PIL import Image

from library.train.evaluation.samples import SampleRunner
from tests.training import config_of, pictures, train

FLUX = "flux_train_network"
NUMBERS = itertools.count()  # of trainings
LIVE, CACHED = ({"cache_text_encoder_outputs": cached} for cached in (False, True))
LOKR = {"network_module": "lycoris.kohya", "network_args": ["algo=lokr"]}


@pytest.fixture(scope="module")
def trained(demo, squares, tmp_path_factory):
    """A function: script, values -> the file of a training that changes the text encoders much; one for each."""
    files = {}

    def find(script, **values):
        if (key := (script, *sorted(values))) not in files:
            folder = tmp_path_factory.mktemp("trained")
            rates = {"network_train_unet_only": False, "text_encoder_lr": 5e-2, "learning_rate": 5e-2}
            values |= {**LIVE, **rates, "train_data_dir": squares, "max_train_steps": 3, "seed": 1}
            files[key] = train(config_of(demo, script, output_dir=folder, **values)).file
        return files[key]

    return find


def losses(demo, script, folder, **values):
    """Train in a new folder: a run without its folder counts as active while the process of the tests lives."""
    values = {"max_train_steps": 2, "seed": 3, **values}
    return train(config_of(demo, script, output_dir=folder / str(next(NUMBERS)), **values)).losses


@pytest.mark.parametrize("script", ["sdxl_train_network", "train_network", FLUX])
def test_base_weights_change_the_captions_too(demo, squares, tmp_path, trained, script):
    values = {"train_data_dir": squares, "network_train_unet_only": True, "base_weights": [trained(script)]}
    plain = losses(demo, script, tmp_path / "plain", **CACHED, **values, base_weights_multiplier=[0.0])
    live, cached = (losses(demo, script, tmp_path / "out", **values, **how) for how in (LIVE, CACHED))
    assert live == cached and plain != cached


@pytest.mark.parametrize("more", [{}, {"fp8_base": True, "mixed_precision": "bf16"}])
def test_captions_on_disk_are_made_anew_with_other_base_weights(demo, tmp_path, trained, more):
    images = pictures(tmp_path / "images")
    file, how = trained(FLUX), {**CACHED, "cache_text_encoder_outputs_to_disk": True, "network_train_unet_only": True}
    for strength in (1.0, 0.5):
        values = {"train_data_dir": images, "base_weights": [file], "base_weights_multiplier": [strength], **more}
        first, again = (losses(demo, FLUX, tmp_path / "out", **how, **values) for _ in range(2))
        assert first == again == losses(demo, FLUX, tmp_path / "out", **CACHED, **values, network_train_unet_only=True)


@pytest.mark.parametrize("more", [{}, LOKR], ids=str)
def test_adapters_of_a_file_change_the_captions_also_if_they_do_not_learn(demo, squares, tmp_path, trained, more):
    values = {"train_data_dir": squares, "network_train_unet_only": False, "text_encoder_lr": 0, **more}
    values["network_weights"] = trained(FLUX, **more)
    live, cached = (losses(demo, FLUX, tmp_path / "out", **values, **how) for how in (LIVE, CACHED))
    assert live == cached


@pytest.fixture
def sampled(demo, squares, tmp_path):
    (tmp_path / "prompts.txt").write_text("a red cat --w 64 --h 64 --d 3\n", encoding="utf-8")
    values = {"sample_prompts": tmp_path / "prompts.txt", "sample_at_first": True, "sample_every_n_steps": 3}
    values |= {"train_data_dir": squares, "sample_steps": 2, "max_train_steps": 3, "seed": 3}
    return values | {"network_train_unet_only": False, "unet_lr": 1e-6, "text_encoder_lr": 1e-1}


@pytest.mark.parametrize("more", [{}, LOKR], ids=str)
def test_samples_show_what_a_text_encoder_has_learned(demo, tmp_path, sampled, more):
    rows = []
    for how in (LIVE, CACHED):
        run = train(config_of(demo, FLUX, output_dir=tmp_path / str(next(NUMBERS)), **sampled, **more, **how))
        rows.append([np.asarray(Image.open(event["file"])) for event in run.events("sample")])
    (first, last), cached = rows
    assert not np.array_equal(first, last)
    assert np.array_equal(first, cached[0]) and np.array_equal(last, cached[1])


def test_prompts_that_change_draw_no_numbers_of_the_training(demo, tmp_path, sampled, monkeypatch):
    """The text encoder that learns drops values at random in steps alone."""
    sampled |= {"network_dropout": 0.3, "sample_every_n_steps": 1}
    plain = {name: value for name, value in sampled.items() if not name.startswith("sample")}
    at_first = SampleRunner.at_first

    def change(*arguments):
        at_first(*arguments)
        (tmp_path / "prompts.txt").write_text("another dog --w 64 --h 64 --d 3\n", encoding="utf-8")

    monkeypatch.setattr(SampleRunner, "at_first", change)
    watched = losses(demo, FLUX, tmp_path / "watched", **CACHED, **sampled)
    assert watched == losses(demo, FLUX, tmp_path / "plain", **CACHED, **plain)
