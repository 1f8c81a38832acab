"""A LoRA of the small trained model learns a thing that is new to it, and no training with a planted error passes for
that. The bounds, how they are measured, and the errors are in tests/train/learning.py."""

import pytest
import torch

from tests import training
from tests.train import learning


@pytest.fixture(scope="module")
def meter(tmp_path_factory):
    return learning.LearningMeter(tmp_path_factory.mktemp("learning"))


@pytest.fixture(autouse=True)
def each_picture_is_encoded_once():
    """All trainings and measurements look at the same pictures with the same VAE, in which no error is planted."""
    with training.encoding_once():
        yield


def test_a_lora_learns_the_zorb_and_leaves_the_rest_alone(meter):
    """The bound that planted errors break after a few steps holds in a training without any."""
    lora = learning.train_with(None, meter, seed=1, save_every_n_steps=learning.EARLY)
    figures = meter.measure(lora)
    assert not figures.failures, figures
    early = meter.error_share(lora.with_stem(f"{lora.stem}-step{learning.EARLY:08d}"))
    assert early <= learning.MAX_EARLY_ERROR


@pytest.mark.parametrize("error", learning.ERRORS, ids=lambda error: error.__name__)
def test_a_planted_error_breaks_the_bound_of_the_error(meter, error):
    steps = learning.ERRORS[error]
    lora = learning.train_with(error, meter, seed=2, **({"max_train_steps": steps} if steps else {}))
    assert meter.error_share(lora) > (learning.MAX_EARLY_ERROR if steps else learning.MAX_ERROR)


def test_captions_tell_the_small_model_of_flux_what_is_in_an_image(tmp_path):
    assert learning.CaptionMeter(tmp_path, "flux").share() <= learning.MAX_CAPTION_SHARE["flux"]


def test_captions_tell_that_of_sdxl_what_is_in_an_image_unless_another_layer_is_read(tmp_path):
    meter = learning.CaptionMeter(tmp_path, "sdxl")
    assert meter.share() <= learning.MAX_CAPTION_SHARE["sdxl"]
    for layer in (-1, 0):
        with learning.wrong_layer(layer):
            assert meter.share() > learning.MAX_CAPTION_SHARE["sdxl"], layer


@pytest.mark.parametrize("family", learning.MAX_CAPTION_SHARE)
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
