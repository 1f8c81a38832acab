"""An assistant LoRA is in every prediction of steps, and in none of pictures, however weights are kept."""

import pytest
import torch
from safetensors.torch import save_file

from library import families
from library.bench import subjects
from library.memory.prepare import prepare_denoiser
from library.methods import targets

CPU, STRENGTH = torch.device("cpu"), 0.5
EIGHT_BITS = {"mixed_precision": "bf16", "blocks_to_swap": 2}
WAYS = {
    "lycoris": {"network_module": "lycoris.kohya", "network_args": ("algo=lokr",)},
    "lycoris, bypassing": {"network_module": "lycoris.kohya", "network_args": ("algo=loha", "bypass_mode=True")},
    "some layers": {"network_args": ("network_reg_dims=^(?!.*single_blocks).*=0",)},
    "checkpointing": {"gradient_checkpointing": True, "network_dropout": 0.0},
    "fp8": {"fp8_base": True, **EIGHT_BITS},
    "int8": {"int8_base": True, **EIGHT_BITS},
    "int8 products": {"int8_base": True, "int8_compute": True, "mixed_precision": "bf16"},
    "4 bits": {"base_bits": 4, "mixed_precision": "bf16"},
}


def prepared(family, **options):
    """Return a tiny model as a training prepares it, and what predicts with it."""
    subject = subjects.FamilySubject(families.lora_script(family), {"mixed_precision": "no"}, "tiny")
    config = subject.config(options)
    torch.manual_seed(0)
    trainable = subject.make(config, CPU)
    denoiser = trainable.components.denoiser
    prepare_denoiser(denoiser, trainable.family, config, CPU, ())
    trainable.method.train()
    # At 64 pixels the last level of SD 1.5 has a single pixel, and its norms divide by almost nothing.
    predict = subject.predict(trainable, 128 if family == "sd15" else 64, CPU)

    def results():
        with torch.autocast("cpu", torch.bfloat16, enabled=config.precision.mixed_precision == "bf16"):
            output = predict(denoiser)
        output.square().mean().backward()
        gradients = [p.grad.clone() for p in trainable.method.parameters() if p.grad is not None]
        for parameter in trainable.method.parameters():
            parameter.grad = None
        return output.detach(), torch.cat([gradient.flatten() for gradient in gradients])

    return trainable, results


@pytest.fixture
def assistant(tmp_path):
    """A function: a family -> the options that add a LoRA on all layers of its blocks, and those that merge it."""

    def options(name):
        trainable, _ = prepared(name)
        family, chance, tensors = trainable.family, torch.Generator().manual_seed(0), {}
        blocks = tuple(family.block_classes)
        for target in targets.find_target_layers(
            trainable.components.denoiser, "denoiser", family.adapter_name, blocks
        ):
            if target.inside and "lora_" not in target.path:
                rows, columns, *kernel = target.layer.weight.shape
                down, up = (2, columns, *kernel), (rows, 2, *(1 for _ in kernel))
                tensors[f"{target.name}.lora_down.weight"] = torch.randn(down, generator=chance) * 0.1
                tensors[f"{target.name}.lora_up.weight"] = torch.randn(up, generator=chance) * 0.1
                tensors[f"{target.name}.alpha"] = torch.tensor(1.0)
        path = tmp_path / "assistant.safetensors"
        save_file(tensors, path)
        merging = {"base_weights": (str(path),), "base_weights_multiplier": (STRENGTH,)}
        return {"assistant_lora": f"{path}:{STRENGTH}"}, merging

    return options


def compare(name, assistant, tolerance, **options):
    adding, merging = assistant(name)
    plain, merged = prepared(name, **options)[1](), prepared(name, **options, **merging)[1]()
    trainable, results = prepared(name, **options, **adding)
    for on, expected in zip(results(), merged, strict=True):
        assert float((on - expected).norm() / expected.norm()) < tolerance
    assert not torch.allclose(plain[0], merged[0], rtol=0.01)
    with trainable.method.assistant.off():
        assert all(torch.equal(off, expected) for off, expected in zip(results(), plain, strict=True))
    assert not any("assistant" in key for key in (*trainable.method.state_dict(), *trainable.method.snapshot()))
    assert not any("assistant" in key for key in trainable.components.denoiser.state_dict())


@pytest.mark.parametrize("name", families.FAMILIES)
def test_an_assistant_equals_a_merged_lora_in_steps_and_none_when_off(name, assistant):
    compare(name, assistant, 1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_an_assistant_works_beside_any_adapter_and_any_weights(way, assistant):
    if "lycoris" in way:
        pytest.importorskip("lycoris")
    if "4 bits" in way:
        pytest.importorskip("bitsandbytes")
    exact = "mixed_precision" not in WAYS[way]
    compare("flux", assistant, 1e-4 if exact else 0.25, **WAYS[way])  # merging rounds every weight once more
