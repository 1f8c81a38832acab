"""Frozen matrices as 8-bit integers."""

import copy

import pytest
import torch
from torch import nn

from library.config.problems import ConfigError
from library.memory.quantization import fp8_storage, int8, int8_matmul
from library.methods.adapters import AdapterSpec, LoraConv2d, LoraLinear
from tests import training

CPU = torch.device("cpu")
SPEC = AdapterSpec(rank=4, alpha=4.0)


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Linear(24, 40), torch.randn(2, 5, 24)),
        (nn.Conv2d(8, 12, 3, padding=1), torch.randn(2, 8, 6, 6)),
        (LoraLinear.around(nn.Linear(24, 40), SPEC), torch.randn(2, 5, 24)),
        (LoraConv2d.around(nn.Conv2d(8, 12, 3, padding=1), SPEC), torch.randn(2, 8, 6, 6)),
    ],
)
def test_every_kind_of_layer_answers_nearly_the_same_and_lets_gradients_through(layer, x):
    layer.weight.requires_grad_(False)
    exact, quantized, names = copy.deepcopy(layer), layer, [*layer.state_dict()]
    int8.quantize_int8_(quantized, CPU)
    assert quantized.weight.dtype == torch.int8 and [*quantized.state_dict()] == names
    x, again = x.clone().requires_grad_(True), x.clone().requires_grad_(True)
    wanted, actual = exact(x), quantized(again)
    assert (actual - wanted).norm() / wanted.norm() < 0.01  # fp8 is off by about 0.03
    wanted.square().sum().backward(), actual.square().sum().backward()
    assert (again.grad - x.grad).norm() / x.grad.norm() < 0.02


@pytest.mark.parametrize("script", training.LORAS)
def test_trainings_learn_nearly_the_same_compiled_and_swapped_too(demo, squares, tmp_path, monkeypatch, script):
    """Of one size, as graphs of any size take several times as long; weights in 8 bits have them in
    `test_precision.py`."""
    options = {"train_data_dir": squares, "max_train_steps": 3, "mixed_precision": "bf16"}
    options |= {"network_args": training.ONE_ADAPTER} if "resnet" not in training.FEW[script] else {}
    options |= training.STEADY.get(script, {})
    few = {"compile_blocks": training.FEW[script]}

    def losses(name, **more):
        config = training.config_of(demo, script, **options, **more, output_dir=tmp_path / name)
        done = training.train(config)
        norms[name] = done.numbers("grad_norm")[1]
        return done.losses

    norms = {}
    wide, eight_bit = losses("wide"), losses("kept", int8_base=True)
    assert eight_bit != wide and eight_bit == pytest.approx(wide, rel=0.01)
    # Of others there are the same products of linear layers as of FLUX.1, and of the U-Net convolutions as well.
    backend = "aot_eager" if script.startswith(("flux_train", "sdxl")) else "eager"
    compiled = {"compile": True, "compile_backend": backend, "compile_fullgraph": True}
    everything = {"int8_base": True, "blocks_to_swap": 2, **compiled, **few}
    if script.startswith("flux_train"):  # as products, whose backward pass is traced, are there for all
        assert losses("all", **everything | {"compile_backend": "eager"}) == pytest.approx(eight_bit, rel=0.01)
    monkeypatch.setattr(int8_matmul, "supports_int8", lambda device: True)
    multiplied = losses("products", int8_compute=True, **everything)
    assert multiplied != eight_bit and multiplied == pytest.approx(wide, rel=0.02)
    # Losses would not tell were gradients nine times too large: the optimizer divides by their size.
    assert norms == pytest.approx(dict.fromkeys(norms, norms["wide"]), rel=0.05)


def test_only_what_is_frozen_and_only_once(demo):
    config = training.config_of(demo, training.LORAS[0], int8_base=True)
    block = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    block[0].requires_grad_(False)
    fp8_storage.store_blocks([[block]], config, CPU)
    fp8_storage.store_blocks([[block]], config, CPU)
    assert block[0].weight.dtype == torch.int8 and block[1].weight.dtype == torch.float32


def test_int8_and_fp8_exclude_each_other(demo):
    with pytest.raises(ConfigError, match="int8_base and fp8_base.* exclude each other"):
        training.config_of(demo, training.LORAS[0], mixed_precision="bf16", int8_base=True, fp8_base=True)
