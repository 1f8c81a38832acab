"""A training on a large GPU keeps to `gpu_memory_limit`, and takes more only where it could not continue otherwise."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from library.check import estimate
from library.compiler import cudagraph, gpu_memory
from library.compiler.plan import CompilePlan
from library.config.building import build_config
from library.distributed.world import training_device
from library.families import config_class
from library.train.compiling import background_compile
from library.train.compiling.precompile import Precompiler
from library.train.compiling.trial_passes import TrialPasses
from tests.training import LORAS, config_of, demo, squares, train  # noqa: F401 - fixtures, also without a conftest

CUDA, GIB = torch.device("cuda", 0), 2**30


class Gpu:
    """A GPU of 80 GiB as PyTorch shows it."""

    def __init__(self, monkeypatch):
        self.total, self.reserved, self.allocated, self.peak, self.fractions = 80 * GIB, 0, 0, 0, [1.0]
        replaced = {
            "mem_get_info": lambda *_: (self.total - self.reserved, self.total),
            "memory_reserved": lambda *_: self.reserved,
            "memory_allocated": lambda *_: self.allocated,
            "max_memory_allocated": lambda *_: self.peak,
            "set_per_process_memory_fraction": self.allow,
            "empty_cache": lambda: None,
        }
        for name, stand_in in replaced.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def allow(self, share, device):
        assert device.index is not None  # PyTorch refuses a GPU without its number here, and nowhere else
        self.fractions.append(share)

    @property
    def allowed(self):
        return self.fractions[-1] * self.total


@pytest.fixture
def gpu(monkeypatch):
    yield Gpu(monkeypatch)
    gpu_memory._take_all()


@pytest.mark.parametrize("named, used", {"cuda": "cuda:1", "cuda:3": "cuda:3", "cpu:0": "cpu", "cpu": "cpu"}.items())
def test_a_training_knows_its_gpu_by_number(monkeypatch, named, used):
    """As accelerate gives one process a device without a number, which the limit of its memory needs."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert training_device(torch.device(named)) == torch.device(used)


@pytest.mark.gpu
@pytest.mark.parametrize("script", LORAS)
def test_a_real_training_within_a_limit(demo, squares, tmp_path, script):  # noqa: F811
    values = {"mixed_precision": "bf16", "max_train_steps": 2, "output_dir": tmp_path, "train_data_dir": squares}
    run = train(config_of(demo, script, gpu_memory_limit=8, **values))
    assert len(run.losses) == 2 and torch.cuda.get_per_process_memory_fraction(0) == 1.0


@pytest.mark.gpu
def test_steps_that_need_more_than_the_limit_are_recorded_once_it_is_lifted(demo, squares, tmp_path, caplog):  # noqa: F811
    values = {
        "resolution": "512",
        "max_bucket_reso": 512,
        "train_batch_size": 8,
        "train_data_dir": squares,
        "output_dir": tmp_path,
    }
    caplog.set_level("INFO")
    values |= {"output_dir": tmp_path, "cuda_graphs": "true", "gpu_memory_limit": 1}
    run = train(config_of(demo, LORAS[0], max_train_steps=4, **values))
    assert "the limit is lifted" in caplog.text and len(run.losses) == 4
    assert "Recorded CUDA graphs" in caplog.text.partition("the limit is lifted")[2]


def test_the_allocator_gets_what_a_smaller_gpu_would_leave_it(gpu):
    with gpu_memory.held_to(24, CUDA):
        assert gpu.allowed == pytest.approx(24 * GIB - gpu_memory.CONTEXT_BYTES)
        gpu.reserved, gpu.peak = 20 * GIB, 15 * GIB
        assert gpu_memory.free_memory(CUDA) == pytest.approx(3.2 * GIB)
        assert gpu_memory.free_at_peak(CUDA) == pytest.approx(8.2 * GIB)
    assert gpu.allowed == gpu.total and gpu_memory.free_memory(CUDA) == 60 * GIB
    for gib, device in ((None, CUDA), (24, torch.device("cpu"))):
        with gpu_memory.held_to(gib, device):
            assert not gpu_memory.is_held()
    with gpu_memory.held_to(96, CUDA):
        assert gpu.allowed == gpu.total and gpu_memory.free_memory(CUDA) == 60 * GIB


def test_whole_models_are_held_in_what_is_recorded_alone(gpu):
    with gpu_memory.held_to(24, CUDA, by_allocator=False):
        assert gpu.allowed == gpu.total and gpu_memory.free_memory(CUDA) < 24 * GIB


@pytest.fixture
def record_sizes(gpu, monkeypatch):
    """Records sizes of so many rows, one after the other, on the pretended GPU. One row takes 2 GiB; a size that has
    room in the largest recorded before it takes none."""
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: torch.zeros(1))
    largest = [0]

    def empty_pool():
        gpu.reserved, largest[0] = 0, 0
        return "pool"

    class Pretended:
        addresses, before, seconds, pace = [], 1.0, 0.5, ""

        def __init__(self, _call, flattened, *_):
            self.elements = rows = flattened.elements
            gpu.reserved += 2 * GIB * rows * (rows > largest[0])
            largest[0] = max(largest[0], rows)

        def capture(self, *_):
            return ""

        def time(self):
            return self.seconds

    monkeypatch.setattr(cudagraph, "GraphMemory", empty_pool)
    monkeypatch.setattr(cudagraph, "Recording", Pretended)
    model = torch.nn.Linear(8, 8)

    def record(reserve, *sizes):
        recorder = cudagraph.GraphedModel(model, CompilePlan(), reserve)
        calls = [cudagraph.Call.of((torch.zeros(rows),), {}) for rows in sizes]
        made = [recorder.recordings.get(call.key) or recorder.record(lambda: None, call) for call in calls]
        return [recording is not None for recording in made], recorder

    return record


@pytest.mark.parametrize("reserve", [None, 0])
def test_recording_stops_at_the_limit_and_says_so(gpu, record_sizes, reserve, caplog):
    """Whether it was requested or tried by itself; without a limit the same sizes are all recorded."""
    caplog.set_level("INFO")
    assert record_sizes(reserve, 3, 4, 12)[0] == [True] * 3
    with gpu_memory.held_to(20, CUDA):
        made, recorder = record_sizes(reserve, 3, 4, 12)
        assert made == [True, True, False] and recorder.size_limit == 1
        assert "do not fit into the GPU's memory beside those of other image sizes" in caplog.text
    with gpu_memory.held_to(5, CUDA):
        made, recorder = record_sizes(reserve, 3)
        assert not made[0] and recorder.why_not == cudagraph.BEYOND_LIMIT in caplog.text


@pytest.mark.parametrize("reserve", [None, 0])
def test_smaller_sizes_share_the_memory_of_the_largest_in_whatever_order_they_come(gpu, record_sizes, reserve, caplog):
    with gpu_memory.held_to(20, CUDA):
        for sizes in ((8, 3, 4), (3, 4, 8), (4, 8, 3)):
            made, recorder = record_sizes(reserve, *sizes, *sizes)
            assert all(made) and len(recorder.recordings) == 3 and gpu.reserved == 16 * GIB
    assert "do not fit" not in caplog.text


def out_of_memory_while_held(calls):
    def call(*_):
        calls.append(gpu_memory.is_held())
        if gpu_memory.is_held():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return "done"

    return call


def test_a_step_a_pass_or_a_sample_that_needs_more_takes_it_and_is_recorded_again(gpu, monkeypatch, caplog):
    calls: list[bool] = []
    denoiser = torch.nn.Linear(1, 1)
    recorder = cudagraph.GraphedModel(denoiser, CompilePlan())
    vars(denoiser)["_recorder"] = recorder

    @contextlib.contextmanager
    def held_without_recordings(**settings):
        recorder.lacks_memory = True
        recorder.give_up("the GPU's memory is too small")
        with gpu_memory.held_to(24, CUDA, **settings):
            yield

    with held_without_recordings():
        assert cudagraph.with_room(denoiser, out_of_memory_while_held(calls)) == "done" and not recorder.why_not
    with held_without_recordings():
        loss: Any = SimpleNamespace(components=SimpleNamespace(denoiser=denoiser))
        passes = TrialPasses(None, loss, CUDA, lambda: None)  # type: ignore[bad-argument-type]
        monkeypatch.setattr(TrialPasses, "run_within_limit", out_of_memory_while_held(calls))
        passes.run((1, 8, 8))
        assert not recorder.why_not
    assert calls == [True, False] * 2 and gpu.allowed == gpu.total
    assert caplog.text.count("need more GPU memory than gpu_memory_limit") == 2
    config: Any = SimpleNamespace(compile=None, optim=SimpleNamespace(stepped_early=""))
    world: Any = SimpleNamespace(device=CUDA)
    precompiler = Precompiler(config, world, None, CompilePlan(), None)  # type: ignore[bad-argument-type]
    error = torch.OutOfMemoryError("CUDA out of memory.")
    with held_without_recordings():
        assert precompiler.recover(error, denoiser) and not gpu_memory.is_held() and not recorder.why_not
        assert not precompiler.recover(error, denoiser), "there is nothing more to take"
    recorder.recordings["a size"] = Any  # freed first, and made again where the limit was the reason
    with gpu_memory.held_to(24, CUDA):
        assert precompiler.recover(error, denoiser) and recorder.why_not and gpu_memory.is_held()
        assert precompiler.recover(error, denoiser) and not recorder.why_not and not gpu_memory.is_held()
    config.optim.stepped_early = "fused_backward_pass"
    with held_without_recordings(by_allocator=False):
        assert not precompiler.recover(error, denoiser) and gpu_memory.is_held() and recorder.why_not


def test_an_optimizer_that_will_not_fit_lifts_the_limit_before_the_first_step(gpu):
    gpu.allocated = 20 * GIB
    with gpu_memory.held_to(24, CUDA):
        assert not gpu_memory.lift_for(3 * GIB) and gpu_memory.is_held()
        assert gpu_memory.lift_for(4 * GIB) and not gpu_memory.is_held()
    assert not gpu_memory.lift_for(100 * GIB), "nothing is held"


def test_a_process_beside_the_run_counts_within_the_limit(gpu, monkeypatch):
    config = build_config(config_class("sdxl_train_network"), {"compile": True}, notes=[])
    world: Any = SimpleNamespace(device=CUDA, ranks=1)
    run = background_compile.BackgroundCompiler(config, world, None, CompilePlan(), None, None)  # type: ignore[bad-argument-type]
    gpu.reserved = 22 * GIB
    monkeypatch.setattr(background_compile.estimate, "bytes_to_compile", lambda calls, denoiser: 2 * GIB)
    assert run._room(torch.nn.Linear(1, 1))[0] == ""
    with gpu_memory.held_to(24, CUDA):
        assert "the training leaves 0.7 GiB" in run._room(torch.nn.Linear(1, 1))[0]


@pytest.mark.parametrize(("memory", "told"), [(80.0, True), (24.0, False), (None, False)])
def test_the_check_says_what_a_larger_gpu_has_besides(memory, told):
    config = build_config(config_class("flux_train_network"), {"gpu_memory_limit": 24}, notes=[])
    sentence = "gpu_memory_limit: uses at most 24 of 80 GB; without it, training uses more if that is faster"
    assert str(estimate.unused_memory(config, memory)) == (sentence if told else "")
