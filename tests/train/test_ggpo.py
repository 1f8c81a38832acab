"""GGPO: noise that follows the weights and the gradients."""

import pytest
import torch
from torch import nn

from library.config.problems import ConfigError
from library.methods import ggpo
from library.methods.adapters import AdapterSpec, LoraLinear, SplitLoraLinear
from tests import training

FLUX, ARGS = "flux_train_network", ["ggpo_sigma=0.03", "ggpo_beta=0.01"]


def adapted(kind=LoraLinear, **more):
    torch.manual_seed(0)
    layer = kind.around(
        nn.Linear(12, 30).requires_grad_(False), AdapterSpec(rank=3, alpha=6.0, noise=(0.03, 0.01), **more)
    )
    for p in (layer.lora_down.weight, *layer.lora_up.parameters()):
        nn.init.normal_(p)
    return layer


@pytest.mark.parametrize(("kind", "more"), [(LoraLinear, {}), (SplitLoraLinear, {"split": (10, 10, 10)})])
def test_rows_are_scaled_by_the_lengths_of_the_matrices_that_are_never_formed(kind, more):
    layer = adapted(kind, **more)
    layer(torch.randn(2, 5, 12)).square().sum().backward()
    layer.note_gradients()
    up, down = layer._merged_up(), layer.lora_down.weight
    ups = [*layer.lora_up] if more else [layer.lora_up]
    up_gradient = torch.block_diag(*(part.weight.grad for part in ups))
    weight, gradient = 2.0 * up @ down, 2.0 * (up @ down.grad + up_gradient @ down)
    base = layer.weight.norm(dim=1).mean()
    lengths = (base**2 + weight.norm(dim=1) ** 2).sqrt()
    torch.testing.assert_close(layer.ggpo_rows, (0.03 * lengths + 0.01 * gradient.norm(dim=1) ** 2) / 30**0.5)


def test_the_mean_length_of_the_gradients_rows_is_that_of_the_matrices_that_are_never_formed(monkeypatch):
    monkeypatch.setattr(ggpo, "MAX_STACKED", 2 * 3 * (12 + 30))  # two at a time
    layers, means = [], []
    for n in range(5):
        layer = LoraLinear.around(
            nn.Linear(12, 30 - 10 * (n == 4)).requires_grad_(False), AdapterSpec(rank=3, alpha=n + 1.0)
        )
        nn.init.normal_(layer.lora_up.weight)
        layer(torch.randn(2, 5, 12)).square().sum().backward()
        up, down = layer.lora_up.weight, layer.lora_down.weight
        gradient = (n + 1.0) / 3 * (up @ down.grad + up.grad @ down)
        means.append(gradient.norm(dim=1).mean())
        layers.append(layer)
    unlearned = LoraLinear.around(nn.Linear(12, 30), AdapterSpec(rank=3, alpha=1.0))
    torch.testing.assert_close(ggpo.mean_gradient([*layers, unlearned]), torch.stack(means).mean())
    assert ggpo.mean_gradient([unlearned]) is None


def test_noise_is_there_in_training_only_and_as_large_as_its_rows():
    layer, x = adapted(), torch.randn(4000, 12)
    quiet = layer(x)  # nothing is known of gradients before the first step
    layer.ggpo_rows.copy_(torch.arange(30.0))
    off = torch.stack([layer(x) - quiet for _ in range(40)])
    spread = off.square().mean((0, 1)).sqrt() / x.square().sum(1).mean().sqrt()
    torch.testing.assert_close(spread, torch.arange(30.0), rtol=0.2, atol=1e-6)
    layer.eval()
    assert torch.equal(layer(x), quiet)
    layer.train()
    layer.set_multiplier(0.0)  # the base model alone
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_casting_keeps_what_is_remembered_exact():
    layer = adapted().to(torch.bfloat16)
    assert layer.ggpo_rows.dtype == layer.ggpo_base.dtype == torch.float32


def test_trainings_are_disturbed_from_the_second_step_and_resume_exactly(demo, squares, tmp_path):
    def outcome(name, steps, **more):
        options = {"train_data_dir": squares, "max_train_steps": steps, "save_state_on_train_end": True, **more}
        return training.train(training.config_of(demo, FLUX, **options, output_dir=tmp_path / name))

    plain = outcome("plain", 4)
    whole = outcome("whole", 4, network_args=ARGS, save_state=True, save_every_n_steps=3)
    assert whole.losses[0] == plain.losses[0] and whole.losses[2:] != plain.losses[2:]
    (state,) = (tmp_path / "whole").glob("*-step00000003-state")
    continued = outcome("rest", 4, network_args=ARGS, resume=state)
    assert continued.losses == whole.losses[3:]
    # Backward passes are traced of the quicker kind.
    how = {"compile_backend": "aot_eager", "compile_blocks": "double:all=eager,single:all", "compile_fullgraph": True}
    compiled = outcome("compiled", 4, network_args=ARGS, compile=True, **how)
    assert compiled.losses == pytest.approx(whole.losses, rel=0.05)  # other random numbers, the same size


def test_ggpo_needs_bf16(demo):
    with pytest.raises(ConfigError, match="ggpo_sigma and ggpo_beta need mixed_precision = bf16"):
        from library.families import network_args

        network_args.read_network_args(training.config_of(demo, FLUX, mixed_precision="fp16", network_args=ARGS))


def test_gradients_that_are_not_there_change_nothing():
    layer = adapted()
    layer.note_gradients()
    assert not layer.ggpo_rows.any()
    assert ggpo.gradients_of(layer.lora_down, [layer.lora_up]) is None
