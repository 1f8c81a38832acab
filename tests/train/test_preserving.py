"""`preserve_weight`: beside its captions a network learns to leave the base model's predictions for another prompt."""

import shutil

import pytest

from library.config.building import build_config
from library.config.problems import ConfigError
from library.families import config_class
from library.train.step.loss import LossFunction
from tests.training import FULL_OF_EACH_KIND, LORAS, ONE_ADAPTER, config_of, train

FLUX = "flux_train_network"
KEPT = {"preserve_weight": 2.0, "preserve_prompt": "a cat", "learning_rate": 1e-2, "max_train_steps": 3}
LYCORIS = {"network_module": "lycoris.kohya", "network_args": ("algo=lokr", "factor=2")}


@pytest.fixture
def passes(monkeypatch):
    """The captions and the predictions of all passes, and the usual loss of each step."""
    predicted, usual = [], []
    predict_of, usual_of = LossFunction._predict, LossFunction._caption_loss

    def predict(self, batch, *inputs):
        prediction = predict_of(self, batch, *inputs)
        predicted.append((batch.captions, prediction.detach()))
        return prediction

    def usual_loss(self, *inputs):
        loss = usual_of(self, *inputs)
        usual.append(loss.detach())
        return loss

    monkeypatch.setattr(LossFunction, "_predict", predict)
    monkeypatch.setattr(LossFunction, "_caption_loss", usual_loss)
    return predicted, usual


@pytest.mark.parametrize("script", LORAS)
def test_every_family_adds_what_its_network_changes_for_the_preserved_prompt(demo, squares, passes, tmp_path, script):
    run = train(config_of(demo, script, train_data_dir=squares, output_dir=tmp_path, **KEPT))
    predicted, usual = passes
    assert len(predicted) == 9  # of a step: its captions, then the preserved prompt without the network and with it
    changes = []
    for step, loss in enumerate(run.losses):
        (own, _), (asked, base), (kept, answer) = predicted[3 * step : 3 * step + 3]
        assert {*asked, *kept} == {"a cat"} and "a cat" not in own
        changes.append(float((answer - base).float().square().mean()))
        assert loss == pytest.approx(float(usual[step]) + 2 * changes[-1], rel=1e-5)
    assert changes[0] == 0 < changes[2]  # a network begins with no change


@pytest.fixture(scope="module")
def plain(demo, squares, tmp_path_factory):
    """The losses of FLUX.1 without any of the options below."""
    return train(
        config_of(demo, FLUX, train_data_dir=squares, output_dir=tmp_path_factory.mktemp("plain"), **KEPT)
    ).losses


@pytest.mark.parametrize(
    "options",
    [
        {"cache_text_encoder_outputs": False, "cache_latents": False},
        {"gradient_checkpointing": True, "blocks_to_swap": 1},
        {"cache_text_encoder_outputs_to_disk": False},
    ],
    ids=["not cached", "swapped", "cached in memory"],
)
def test_what_saves_memory_leaves_the_losses_as_they_are(demo, squares, plain, tmp_path, options):
    folder = shutil.copytree(squares, tmp_path / "images")
    config = config_of(demo, FLUX, train_data_dir=folder, output_dir=tmp_path / "run", **KEPT | options)
    assert train(config).losses == pytest.approx(plain, rel=1e-4)


def test_one_file_of_a_folder_has_the_encoded_prompt(plain, squares):
    assert len([*squares.rglob("preserved_flux_te*")]) == 1


@pytest.mark.parametrize("network", [{"network_args": ONE_ADAPTER}, LYCORIS], ids=["LoRA", "LyCORIS"])
def test_compiled_the_further_passes_need_no_graph_more(demo, squares, tmp_path, network):
    options = {"train_data_dir": squares, "gradient_checkpointing": True, **KEPT, **network}
    eager = train(config_of(demo, FLUX, output_dir=tmp_path / "eager", **options))
    compiling = {"compile": True, "compile_backend": "eager", "compile_blocks": "single:all"}
    compiled = train(config_of(demo, FLUX, output_dir=tmp_path / "compiled", **options, **compiling))
    told = compiled.facts["compile"]
    assert told["graphs"] == told["predicted"] and told["graphs"] and not told["recompiles"], told
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-4)


@pytest.mark.parametrize(
    "script", [*FULL_OF_EACH_KIND, "sdxl_train_textual_inversion", "sdxl_train_control_net_lllite"]
)
def test_only_a_network_beside_the_model_can_be_left_out(script):
    kind = config_class(script)
    build_config(kind, {"preserve_weight": 0.0, "preserve_prompt": ""}, notes=[])
    with pytest.raises(ConfigError, match="preserve_weight cannot be used here: only a LoRA or LyCORIS network"):
        build_config(kind, {"preserve_weight": 1.0}, notes=[])
