"""A LoRA for samples changes each layer once, whatever the training has put beside the layer."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from library.methods import targets
from library.methods.applied import AppliedLoras
from library.methods.sample_lora import SampleLora
from tests.methods.test_assistant import STRENGTH, WAYS, assistant, prepared  # noqa: F401 - a fixture

CASES = {"lora": {}, "assistant": {}, **{name: WAYS[name] for name in ("lycoris", "lycoris, bypassing")}}
FULL = {"network_module": "lycoris.kohya", "network_args": ("algo=full",)}
LEARNED = {"lora": {}, "full": FULL, **{name: WAYS[name] for name in ("lycoris", "fp8", "int8", "4 bits")}}


@pytest.mark.parametrize("way", CASES)
def test_a_lora_for_samples_changes_every_layer(way, assistant):  # noqa: F811
    if "lycoris" in way:
        pytest.importorskip("lycoris")
    adding, merging = assistant("flux")
    path = Path(adding["assistant_lora"].rpartition(":")[0])
    beside = adding if way == "assistant" else {}
    plain, expected = prepared("flux", **CASES[way])[1]()[0], prepared("flux", **CASES[way], **merging)[1]()[0]
    trainable, results = prepared("flux", **CASES[way], **beside)
    if way == "assistant":
        trainable.method.assistant.is_on = False
    with SampleLora({path: STRENGTH}, trainable.family).applied(trainable.components):
        found = results()[0]
    assert float((found - expected).norm() / (expected - plain).norm()) < 1e-3
    assert (results()[0] == plain).all()


@pytest.mark.parametrize("way", LEARNED)
def test_what_depends_on_the_weight_depends_on_that_of_the_base_model(way, tmp_path):
    """Rotations and magnitudes, as `kohya sample` computes them from the same two files."""
    pytest.importorskip("lycoris")
    if way == "4 bits":
        pytest.importorskip("bitsandbytes")
    trainable, _ = prepared("flux", **LEARNED[way])
    family, denoiser = trainable.family, trainable.components.denoiser
    found = targets.find_target_layers(denoiser, "denoiser", family.adapter_name, tuple(family.block_classes))
    target = next(one for one in found if one.inside and one.path.endswith("img_attn.proj"))
    layer, path = target.layer, tmp_path / "turned.safetensors"
    blocks = torch.randn(layer.out_features // 4, 4, 4, generator=torch.Generator().manual_seed(0))
    save_file({f"{target.name}.oft_blocks": blocks, f"{target.name}.alpha": torch.tensor(0.0)}, path)
    applied = AppliedLoras(trainable.components, family)
    applied.add(path)
    x = torch.randn(1, 3, layer.in_features, generator=torch.Generator().manual_seed(1))

    def added():
        applied.set({})
        without = layer(x)
        applied.set({path: 1.0})
        return layer(x) - without

    with torch.no_grad():
        before = added()
        for parameter in trainable.method.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        applied.set({})
        after = added()
    assert float((after - before).norm() / before.norm()) < 1e-3
