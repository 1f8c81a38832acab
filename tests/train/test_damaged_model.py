"""NaN in the model's own files is named as such, and not blamed on images or the learning rate."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from library.config.problems import ConfigError
from library.train.caching import make_caches
from tests.train.test_replaced_files import own_copy
from tests.training import fresh, short_captions, train  # noqa: F401


def spoil(path, part=""):
    """One number of a matrix of a part is NaN; returns the tensor's name."""
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if name.startswith(part) and tensor.dim() > 1)
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, path)
    return name


@pytest.mark.parametrize(
    ("script", "option", "part"),
    [
        ("flux_train_network", "pretrained_model_name_or_path", ""),
        ("flux_train_network", "ae", "encoder"),
        ("flux_train_network", "t5xxl", ""),
        ("sdxl_train", "pretrained_model_name_or_path", "model.diffusion_model"),
    ],
)
def test_the_file_and_its_tensor_are_named(demo, squares, tmp_path, script, option, part):
    config, copy = own_copy(demo, script, option, tmp_path, train_data_dir=squares, max_train_steps=2)
    name = spoil(copy, part)
    with pytest.raises(ConfigError) as refused:
        train(config)
    assert str(refused.value) == (
        f"{copy} is damaged: 1 tensor with NaN or infinity, first {name}; choose another file"
    )


def test_so_it_is_when_only_caches_are_made(demo, squares, tmp_path):
    config, copy = own_copy(demo, "flux_train_network", "ae", tmp_path, train_data_dir=squares)
    spoil(copy, "encoder")
    fresh()
    with pytest.raises(ConfigError, match="ae.* is damaged: .* first encoder"):
        make_caches(config, lambda *said: None)


def test_a_table_of_a_schedule_may_be_infinite(tmp_path):
    from library.families.shared.file_identity import _not_finite

    infinite = torch.full((4,), float("inf"))
    save_file({"log_one_minus_alphas": infinite, "a.weight": torch.ones(2)}, tmp_path / "a.safetensors")
    assert _not_finite(tmp_path / "a.safetensors") == []
    save_file({"a.bias": infinite, "b": torch.ones(2, 2)}, tmp_path / "b.safetensors")
    assert _not_finite(tmp_path / "b.safetensors") == ["a.bias"]
