"""The formulas of adapters against the package's forward pass in training, layer by layer."""

import pytest
import torch
from torch import nn

from library.adapter_files.changes import LayerChange
from library.adapter_files.names import TENSOR_ROLES
from library.memory.quantization import int8
from library.methods.applied import own_weight

kohya = pytest.importorskip("lycoris.kohya")
LAYERS = {"linear": lambda: nn.Linear(16, 32), "conv": lambda: nn.Conv2d(8, 16, 3, padding=1, stride=2)}
EVERY = {
    "locon": {},
    "locon tucker": {"use_tucker": True},
    "locon scalar": {"use_scalar": True},
    "locon dora": {"dora_wd": True},
    "locon dora inputs": {"dora_wd": True, "wd_on_output": False},
    "locon dora tucker": {"dora_wd": True, "use_tucker": True},
    "loha": {},
    "loha tucker": {"use_tucker": True},
    "loha dora": {"dora_wd": True},
    "lokr": {"factor": 4},
    "lokr tucker": {"factor": 4, "use_tucker": True},
    "lokr both": {"decompose_both": True, "factor": 8},
    "lokr whole": {"full_matrix": True, "factor": 4},
    "lokr dora": {"factor": 2, "dora_wd": True},
    "diag-oft": {},
    "diag-oft constraint": {"constraint": 1e-3},
    "diag-oft rescaled": {"rescaled": True},
    "boft": {},
    "boft constraint": {"constraint": 1e-3},
    "boft rescaled": {"rescaled": True},
    "glora": {},
    "ia3": {},
    "ia3 inputs": {"train_on_input": True},
    "full": {},
}
TURNING = ("dora", "rescaled")  # where the package does not leave the layer as it is at strength 0


class Transformer2DModel(nn.Module):
    """The package finds it by its name."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", EVERY)
def test_a_change_is_that_of_the_forward_pass(name, layer):
    torch.manual_seed(0)
    root = nn.Sequential(Transformer2DModel(LAYERS[layer]()))
    original = root[0].layer
    weight, bias = original.weight.detach().clone(), original.bias.detach().clone()
    settings = {"algo": name.split()[0], "conv_dim": 2, "conv_alpha": 1.0, **EVERY[name]}
    network = kohya.create_network(1.0, 2, 1.0, None, None, root, **settings)
    (adapter,) = network.loras
    network.apply_to([], root, False, True)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    x = torch.randn(2, 3, 16) if layer == "linear" else torch.randn(2, 8, 6, 6)
    change = LayerChange(
        {TENSOR_ROLES[key]: tensor for key, tensor in adapter.custom_state_dict().items()}
        if adapter.custom_state_dict()
        else {TENSOR_ROLES[key]: tensor for key, tensor in adapter.state_dict().items()}
    ).ready()
    assert change.fits(tuple(weight.shape)) and not change.fits(tuple(size + 1 for size in weight.shape))
    assert not change.is_dead and not change.missing
    for strength in (1.0,) if any(word in name for word in TURNING) else (1.0, 0.4):
        adapter.multiplier = strength
        with torch.no_grad():
            wanted = root[0].layer(x)
            changed = weight + change.delta(weight, strength)
            added = change.bias(strength)
            new_bias = bias if added is None else bias + added
            actual = (
                nn.functional.linear(x, changed, new_bias)
                if layer == "linear"
                else nn.functional.conv2d(x, changed, new_bias, 2, 1)
            )
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(weight + change.delta(weight, 0.0), weight)


@pytest.mark.parametrize("name", ["locon tucker", "loha", "lokr", "lokr tucker", "loha tucker"])
def test_products_know_their_shape_and_their_factors(name):
    torch.manual_seed(0)
    root = nn.Sequential(Transformer2DModel(nn.Conv2d(32, 48, 3)))
    settings = {"algo": name.split()[0], "conv_dim": 2, "conv_alpha": 1.0, **EVERY[name]}
    (adapter,) = kohya.create_network(1.0, 2, 1.0, None, None, root, **settings).loras
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_()
    change = LayerChange({TENSOR_ROLES[key]: tensor for key, tensor in adapter.custom_state_dict().items()})
    shape = change.shape()
    assert shape in ((48, 32, 3, 3), (48, 288))
    whole = change.ready().delta(torch.empty(shape, device="meta"))
    if factors := change.exact_factors():
        torch.testing.assert_close(factors[0] @ factors[1], whole.flatten(1))
    assert (factors is not None) == (name in ("locon tucker", "loha"))


@pytest.mark.parametrize("stored", ["float32", "float8", "int8", "int8 rotated"])
def test_the_weight_of_a_layer_is_known_however_it_is_stored(stored):
    torch.manual_seed(0)
    layer, x = nn.Linear(256, 48), torch.randn(2, 256)
    original = layer.weight.detach().clone()
    layer.requires_grad_(False)
    if stored == "float8":
        layer.weight.data = layer.weight.data.to(torch.float8_e4m3fn)
    elif stored != "float32":
        is_rotated = stored == "int8 rotated"
        int8.quantize_int8_(layer, torch.device("cpu"), is_rotated, is_rotated)
        assert is_rotated == ("rotation" in layer._buffers)
    weight = own_weight(layer, x)
    assert weight.dtype == torch.float32
    torch.testing.assert_close(
        weight, original, rtol=0.07 if stored == "float8" else 0, atol=2e-3 * (stored != "float32")
    )
