"""The share of a GPU's matrix rate that a training reached, told at its end."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from library.measuring import timing
from library.measuring.model_stats import model_stats
from library.measuring.operations import operations_of_image
from library.train import loop, utilization
from library.train.step.step_metrics import Meter
from tests.training import config_of

CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in: a function that says how the GPU is called."""
    return lambda name: monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


def test_operations_are_the_mean_over_the_batches_of_an_epoch(demo):
    config = config_of(demo, "flux_train_network", gradient_accumulation_steps=3)
    small, wide = (operations_of_image(config, model_stats(config), size) for size in ((64, 64), (128, 64)))
    kinds = Counter({(2, 8, 8): 3, (1, 8, 16): 1})
    assert utilization.step_operations(config, kinds) == pytest.approx(3 * (3 * 2 * small + wide) / 4)
    again = config_of(demo, "flux_train_network", gradient_checkpointing=True)
    assert utilization.step_operations(again, Counter({(1, 8, 8): 1})) == pytest.approx(1.5 * small)


def test_the_rate_is_that_of_the_data_sheet_or_measured(gpu, monkeypatch):
    gpu("NVIDIA H200")
    reached = utilization.utilization(197.8e12, 0.5, CUDA)
    assert reached == {"tflops": 395.6, "gpu_tflops": 989, "share": 0.4}
    assert utilization.utilization_sentence(reached) == (
        "The steps reached 40% of this GPU's bf16 matrix rate (about 396 of 989 TFLOP/s)."
    )
    gpu("NVIDIA Unheard 9")
    monkeypatch.setattr(timing, "matmul_rate", lambda device, dtype: {"tflops": 100.0})
    assert utilization.utilization(1e13, 0.5, CUDA)["share"] == 0.2

    def full(device, dtype):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(timing, "matmul_rate", full)
    assert utilization.utilization(1e13, 0.5, CUDA) == {}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_utilization_is_reported_and_recorded_on_a_gpu(demo, gpu, device):
    gpu("NVIDIA H200")
    config, said, noted = config_of(demo, "sdxl_train_network"), [], {}
    meter = Meter(total=8, per_epoch=8, warm_steps=4, warm_seconds=2.0)
    meter._times.append(0.5)
    training = SimpleNamespace(
        config=config,
        clock=SimpleNamespace(step=8),
        world=SimpleNamespace(device=torch.device(device), main=True),
        batches=SimpleNamespace(kinds=lambda: Counter({(1, 8, 8): 1})),
        step_log=SimpleNamespace(meter=meter),
        journal=SimpleNamespace(say=said.append, note=lambda **facts: noted.update(facts)),
    )
    loop.log_utilization(training)
    assert len(said) == len(noted) == (device == "cuda")
    if said:
        reached = utilization.step_operations(config, training.batches.kinds()) / 0.5 / 1e12
        assert noted["utilization"]["tflops"] == round(reached, 1) and "of 989 TFLOP/s" in said[0]
