"""Images that keep the base model's prediction (`diff_output_preservation`)."""

import pytest
import torch

from tests import training


@pytest.mark.parametrize("script", training.LORA_OF_EACH_KIND)
def test_an_adapter_that_has_learned_nothing_has_nothing_to_give_back(demo, squares, tmp_path, script):
    """It predicts what the base model does, so images that keep that have no loss, and all others have one."""
    losses = {}
    for preserves in (True, False):
        toml = tmp_path / f"{preserves}.toml"
        text = f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{next(squares.iterdir())}'\n"
        line = f"custom_attributes.diff_output_preservation = {str(preserves).lower()}\n"
        toml.write_text(text + line, encoding="utf-8")
        values = {"dataset_config": toml, "train_data_dir": None, "max_train_steps": 1, "mixed_precision": "no"}
        config = training.config_of(demo, script, **values, output_dir=tmp_path / str(preserves))
        (losses[preserves],) = training.train(config).losses
    assert losses[True] == pytest.approx(0, abs=1e-9) and losses[False] > 0.01


@pytest.mark.parametrize("script", training.LORA_OF_EACH_KIND)
def test_what_is_learned_from_them_does_not_depend_on_checkpoints(demo, squares, tmp_path, script):
    """Their prediction without adapters is a pass of its own, from which blocks must not recompute."""
    toml = tmp_path / "d.toml"
    text = f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{next(squares.iterdir())}'\n"
    toml.write_text(text + "custom_attributes.diff_output_preservation = true\n", encoding="utf-8")
    values = {"dataset_config": toml, "train_data_dir": None, "max_train_steps": 2, "mixed_precision": "no"}
    first = training.config_of(demo, script, train_data_dir=squares, max_train_steps=1, output_dir=tmp_path / "first")
    values["network_weights"] = training.train(first).file  # a LoRA that changes the prediction

    def learned(name, **more):
        config = training.config_of(demo, script, **values, **more, output_dir=tmp_path / name)
        return training.train(config)

    whole, recomputed = learned("whole"), learned("recomputed", gradient_checkpointing=True)
    assert whole.losses[0] > 0 and recomputed.losses == pytest.approx(whole.losses, rel=1e-4)
    for name, tensor in whole.tensors().items():
        torch.testing.assert_close(recomputed.tensors()[name], tensor, rtol=1e-3, atol=1e-6)
