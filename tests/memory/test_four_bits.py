"""Frozen matrices in 4 bits."""

import copy

import pytest
import torch
from torch import nn

from library.compiler.subclass import FOUR_BIT, behaviours_of
from library.config.problems import ConfigError
from library.memory.quantization import nf4
from library.methods.adapters import AdapterSpec, LoraLinear
from tests import training

CPU = torch.device("cpu")


def test_a_layer_answers_nearly_the_same_and_compiles_as_one_graph():
    torch.manual_seed(0)
    layer = LoraLinear.around(nn.Linear(96, 160), AdapterSpec(rank=4, alpha=4.0))
    layer.weight.requires_grad_(False)
    exact, quantized, names = copy.deepcopy(layer), layer, [*layer.state_dict()]
    nf4.quantize_nf4_(quantized, CPU)
    assert behaviours_of(quantized) == {FOUR_BIT}
    assert quantized.weight.shape == (160, 48) and [*quantized.state_dict()] == names
    stored = sum(getattr(quantized, name).nbytes for name in nf4.BUFFERS[:2]) + quantized.weight.nbytes
    assert stored == pytest.approx(160 * 96 * nf4.BYTES, rel=0.01)
    x = torch.randn(2, 5, 96)
    inputs = [x.clone().requires_grad_(True) for _ in range(3)]
    compiled = torch.compile(quantized, fullgraph=True, backend="aot_eager")
    wanted, actual, again = exact(inputs[0]), quantized(inputs[1]), compiled(inputs[2])
    assert (actual - wanted).norm() / wanted.norm() < 0.12 and torch.equal(actual, again)
    for output in (wanted, actual, again):
        output.square().sum().backward()
    assert (inputs[1].grad - inputs[0].grad).norm() / inputs[0].grad.norm() < 0.2
    assert torch.equal(inputs[1].grad, inputs[2].grad)


@pytest.mark.parametrize("script", training.LORAS)
def test_every_family_learns_nearly_the_same(demo, squares, tmp_path, script):
    options = {"train_data_dir": squares, "max_train_steps": 2, "mixed_precision": "bf16"}

    def losses(name, **more):
        config = training.config_of(demo, script, **options, **more, output_dir=tmp_path / name)
        return training.train(config).losses

    wide, few = losses("wide"), losses("few", base_bits=4)
    assert few != wide and few == pytest.approx(wide, rel=0.05)
    if script.startswith(("flux_train", "sdxl")):  # the U-Net's convolutions are in int8
        compiled = {"compile": True, "compile_backend": "aot_eager", "compile_fullgraph": True}
        swapped = {"blocks_to_swap": 2, "compile_blocks": training.FEW[script]}
        assert losses("all", base_bits=4, **compiled, **swapped) == pytest.approx(few, rel=0.01)


def test_four_bits_are_for_the_frozen_model_of_a_network(demo):
    with pytest.raises(
        ConfigError, match="base_bits cannot be used here: 4 bits work only for the frozen model of a LoRA"
    ):
        training.config_of(demo, training.FULL_OF_EACH_KIND[0], base_bits=4)
    with pytest.raises(ConfigError, match="fp8_base and base_bits exclude each other"):
        training.config_of(demo, training.LORAS[0], mixed_precision="bf16", base_bits=4, fp8_base=True)
    for name in ("fp8_compute", "int8_compute", "auto_compute"):  # not a base in 8 bits, which base_bits excludes
        values = {"mixed_precision": "bf16", "base_bits": 4, name: True}
        with pytest.raises(ConfigError) as raised:
            training.config_of(demo, training.LORAS[0], **values)
        (problem,) = raised.value.problems
        assert dict(problem.fix) == {name: False}
        training.config_of(demo, training.LORAS[0], **values | problem.fix)
    lycoris = {"network_module": "lycoris.kohya", "network_args": ["algo=lokr"]}
    with pytest.raises(ConfigError, match="base_bits cannot be used with network_module .*bypass_mode=True"):
        training.config_of(demo, training.LORAS[0], base_bits=4, **lycoris)
    training.config_of(demo, training.LORAS[0], base_bits=4, **lycoris | {"network_args": ["bypass_mode=true"]})
    for algo in ("full", "dylora"):  # no advice that the next check would refuse
        with pytest.raises(ConfigError, match=f"base_bits cannot be used with algo={algo}, which needs whole weights"):
            training.config_of(
                demo, training.LORAS[0], base_bits=4, **lycoris | {"network_args": [f"algo={algo}", "bypass_mode=True"]}
            )
