"""The moving average of the weights: its numbers, its files, and that it continues exactly."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from library.config.building import build_config
from library.config.problems import ConfigError
from library.families.sdxl.options import SdxlTrain
from library.optim import optimizers
from library.optim.ema import ExponentialMovingAverage
from tests import training

CPU = torch.device("cpu")


DECAY = 0.5  # so low that it soon counts, and not only the faster decay of the first updates


def average(parameters, **values):
    return ExponentialMovingAverage(parameters, build_config(SdxlTrain, {"ema_decay": DECAY, **values}, notes=[]), CPU)


def expected(weights, decay=DECAY, every=1):
    """The average over weights by step, the first being those before training, in float64."""
    value = weights[0].double()
    for step in range(every, len(weights), every):
        number = step // every
        share = min(decay**every, (1 + number) / (10 + number))
        value = share * value + (1 - share) * weights[step].double()
    return value


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["gpu", "cpu"])
def test_the_average_follows_its_formula(every, dtype, where):
    torch.manual_seed(0)
    weights = [torch.randn(3, 2).to(dtype) for _ in range(20)]
    p = nn.Parameter(weights[0].clone())
    mean_weights = average([p, nn.Parameter(torch.zeros(2))], ema_every_n_steps=every, ema_device=where)
    for step, value in enumerate(weights[1:], start=1):
        p.data.copy_(value)
        mean_weights.update(step)
    assert mean_weights.values[0].dtype == torch.float32
    torch.testing.assert_close(mean_weights.values[0], expected(weights, every=every).float())


def test_the_networks_hold_it_for_a_while():
    p = nn.Parameter(torch.randn(4, 4, 2, 2).to(memory_format=torch.channels_last).bfloat16())
    before = p.detach().clone()
    ema = average([p])
    ema.values[0] += 1
    with pytest.raises(KeyboardInterrupt), ema.applied():
        assert torch.equal(p, ema.values[0].bfloat16())
        raise KeyboardInterrupt
    assert torch.equal(p, before)


def test_a_saved_average_must_fit():
    ema = average([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))])
    other = average([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))])
    ema.load_state_dict(other.state_dict())
    assert ema.values[1].sum() == 0
    with pytest.raises(ConfigError, match="resume"):
        ema.load_state_dict(average([nn.Parameter(torch.ones(3))]).state_dict())


def test_only_the_process_that_saves_keeps_one():
    method = SimpleNamespace(shards=None, parameters=lambda: [nn.Parameter(torch.ones(2))])
    on = build_config(SdxlTrain, {"ema_decay": 0.5}, notes=[])
    off = build_config(SdxlTrain, {}, notes=[])
    assert ExponentialMovingAverage.wanted(method, on, CPU, True)
    assert not ExponentialMovingAverage.wanted(method, on, CPU, False)
    assert not ExponentialMovingAverage.wanted(method, off, CPU, True)


def test_what_does_not_go_together_is_reported():
    def config(**values):
        return build_config(SdxlTrain, values, notes=[])

    assert any(
        "averages by itself" in str(p)
        for p in optimizers.find_optimizer_problems(config(optimizer_type="AdamWScheduleFree", ema_decay=0.9))
    )
    assert any("ema_device" in str(note) for note in optimizers.optimizer_notes(config(ema_device="cpu")))
    with pytest.raises(ConfigError, match="ema_decay"):
        config(ema_decay=1.0)


@pytest.mark.parametrize(
    ("demo", "script"), [("deep", "flux_train_network"), ("shallow", "sdxl_train")], indirect=["demo"]
)
def test_files_beside_the_files(demo, squares, tmp_path, script):
    """The averaged file is the average over the files of all steps; what is trained does not change by it."""
    values = {"train_data_dir": squares, "max_train_steps": 4, "save_every_n_steps": 1}
    more = {"output_dir": tmp_path / "a", "ema_decay": 0.8, "save_last_n_steps": 2}
    config = training.config_of(demo, script, **values, **more)
    done = training.train(config)
    name = done.file.stem
    files = sorted(p.name.removeprefix(name) for p in (tmp_path / "a").glob("*.safetensors"))
    suffixes = ["-step00000002", "-step00000003", "-step00000004", ""]
    assert files == sorted(f"{step}{ema}.safetensors" for step in suffixes for ema in ("", "-ema"))
    config = training.config_of(demo, script, **values, output_dir=tmp_path / "b")
    plain = training.train(config)
    assert plain.losses == done.losses
    steps = [load_file(tmp_path / "b" / f"{name}-step{i:08d}.safetensors") for i in range(1, 5)]
    tensors = load_file(tmp_path / "a" / f"{name}-ema.safetensors")
    assert tensors.keys() == steps[-1].keys()
    moving = [key for key in tensors if not torch.equal(steps[0][key], steps[-1][key])]
    assert len(moving) > 50
    source = load_file(training.config_of(demo, script).model.pretrained_model_name_or_path)
    for key in moving if script == "sdxl_train" else [k for k in moving if "lora_up" in k]:
        # Before the first step: an adapter's second half is zero; a model's weights are those of its file.
        first = torch.zeros_like(tensors[key]) if "lora_up" in key else source[key].float()
        value = expected([first, *(step[key] for step in steps)], decay=0.8)
        torch.testing.assert_close(tensors[key].double(), value, rtol=1e-5, atol=1e-7)


def test_no_average_is_saved_before_its_first_update(demo, squares, tmp_path):
    options = {"train_data_dir": squares, "max_train_steps": 3, "save_every_n_steps": 1, "output_name": "m"}
    config = training.config_of(
        demo, "flux_train_network", **options, ema_decay=0.8, ema_every_n_steps=2, output_dir=tmp_path / "out"
    )
    done = training.train(config)
    averages = sorted(path.name for path in (tmp_path / "out").glob("*-ema.safetensors"))
    assert averages == ["m-ema.safetensors", "m-step00000002-ema.safetensors", "m-step00000003-ema.safetensors"]
    said = [str(event["text"]) for event in done.events("warning")]
    assert sum("m-step00000001-ema.safetensors is not saved" in text for text in said) == 1


FUSED = {
    "full_bf16": True,
    "mixed_precision": "bf16",
    "optimizer_type": "Adafactor",
    "optimizer_args": ["relative_step=False", "scale_parameter=False"],
    "fused_backward_pass": True,
}


@pytest.mark.parametrize(
    ("script", "values"), [("flux_train", {}), ("flux_train", FUSED)], ids=["plain", "fused and rounded"]
)
def test_an_average_resumes_bit_for_bit(demo, squares, tmp_path, script, values):
    options = {"train_data_dir": squares, "ema_decay": 0.8, "ema_every_n_steps": 2, "max_train_steps": 5, **values}
    straight = training.train(training.config_of(demo, script, **options, output_dir=tmp_path / "a"))
    more = {"output_dir": tmp_path / "b", "max_train_steps": 3, "save_state": True}
    first = training.train(training.config_of(demo, script, **options | more))
    state = tmp_path / "b" / f"{first.file.stem}-state"
    second = training.train(training.config_of(demo, script, **options, output_dir=tmp_path / "c", resume=state))
    for ending in ("", "-ema"):
        a, c = (load_file(d.file.with_stem(d.file.stem + ending)) for d in (straight, second))
        assert all(torch.equal(a[key], c[key]) for key in a)
    assert second.losses == straight.losses[3:]
