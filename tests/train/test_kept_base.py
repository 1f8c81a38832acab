"""Images that keep the base model's prediction (`diff_output_preservation`)."""

import pytest
import torch

from tests import training


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
