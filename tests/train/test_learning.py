"""A LoRA of the small trained model learns a thing that is new to it, and no training with a planted error passes for
that. The bounds, how they are measured, and the errors are in benchmarks/small_model/learning.py."""

import pytest
import torch

from benchmarks.small_model import learning


@pytest.fixture(scope="module")
def meter(tmp_path_factory):
    return learning.LearningMeter(tmp_path_factory.mktemp("learning"))


def test_a_lora_learns_the_zorb_and_leaves_the_rest_alone(meter):
    found = meter.measure(learning.train_with(None, meter, seed=1))
    assert not found.failures, found


@pytest.mark.parametrize("error", [None, *learning.ERRORS], ids=lambda error: error.__name__ if error else "none")
def test_a_planted_error_breaks_the_bound_of_the_error_and_nothing_else_does(meter, error):
    lora = learning.train_with(error, meter, seed=2, max_train_steps=learning.FEW_STEPS)
    assert (meter.error_share(lora) > learning.MOST_EARLY_ERROR) == (error is not None)


@pytest.mark.parametrize("family", learning.MOST_CAPTION_SHARE)
def test_captions_tell_the_small_model_what_is_in_a_picture(family, tmp_path):
    assert learning.CaptionMeter(tmp_path, family).share() <= learning.MOST_CAPTION_SHARE[family]


@pytest.mark.parametrize("family", learning.MOST_CAPTION_SHARE)
def test_the_denoiser_gets_its_inputs_on_its_own_device(family, tmp_path, monkeypatch):
    """The device "meta" stands for a GPU: it refuses inputs on the host as well."""
    correct, shapes = learning.open_sampling_model, []

    def on_meta(*args):
        model = correct(*args)
        predict, model.world.device = model.family.predict, torch.device("meta")
        model.components.denoiser.to("meta")

        def predicted(denoiser, *inputs):
            output = predict(denoiser, *inputs)
            assert output.device.type == "meta"
            shapes.append(output.shape)
            return torch.zeros(output.shape)

        monkeypatch.setattr(model.family, "predict", predicted)
        return model

    monkeypatch.setattr(learning, "open_sampling_model", on_meta)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which knows no "meta"
    assert learning.CaptionMeter(tmp_path, family).share() == 1
    assert len(shapes) == 8  # two captions at four timesteps


@pytest.mark.parametrize("layer", [-1, 0], ids=["last", "first"])
def test_text_embeddings_of_the_wrong_layer_break_the_bound(layer, tmp_path):
    meter = learning.CaptionMeter(tmp_path, "sdxl")
    with learning.wrong_layer(layer):
        assert meter.share() > learning.MOST_CAPTION_SHARE["sdxl"]
