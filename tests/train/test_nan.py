"""Losses and gradients that are no numbers: the training ends, says where, and spoils nothing."""

import pytest
import torch

from library.compiler import torch_private
from library.config.formats import to_toml
from library.config.problems import ConfigError
from library.data.loading import Batches
from library.runs import reader
from library.train.step.updates import NonFiniteGuard, Updates
from tests.training import LORAS, SCRIPTS, config_of, listing, ranks, runs_in, train

NAN, INF = float("nan"), float("inf")


CPU = torch.device("cpu")


def stepped(guard_waits, numbers, **options):
    """Weights and optimizer before and after a step that the guard saw."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(3, 3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights, lr=0.1, **options)
    guard = NonFiniteGuard(optimizer, CPU, scaled=False)
    guard.waits = guard_waits
    for gradients in [[torch.tensor(1.0)], [torch.tensor(n) for n in numbers]]:
        before = [w.detach().clone() for w in weights], [s["exp_avg"].clone() for s in optimizer.state.values()]
        for w in weights:
            w.grad = torch.full_like(w, gradients[0].item())
        if guard.should_step(*gradients):
            optimizer.step()
    return before, ([w.detach() for w in weights], [s["exp_avg"] for s in optimizer.state.values()]), optimizer


@pytest.mark.parametrize("numbers", [(NAN, 1.0), (INF, 1.0), (1.0, NAN), (1.0, -INF)])
@pytest.mark.parametrize("waits", [True, False])
def test_a_step_without_numbers_changes_nothing(waits, numbers):
    """Once as on a CPU; once as on a GPU, where the fused optimizer is told by a flag on the device."""
    before, after, optimizer = stepped(waits, numbers, fused=not waits)
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    assert all(state["step"] == 1 for state in optimizer.state.values())


@pytest.mark.parametrize("waits", [True, False])
def test_a_good_step_is_taken(waits):
    before, after, _ = stepped(waits, (1.0, 2.0), fused=not waits)
    assert not torch.equal(before[0][0], after[0][0])


def test_a_scaler_is_left_to_look_for_itself():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    assert NonFiniteGuard(optimizer, CPU, scaled=True).should_step(torch.tensor(INF))


@pytest.mark.parametrize("number", [NAN, 1.0])
def test_beside_a_gpu_weights_on_the_host_are_stepped_by_what_the_host_knows(number):
    """Not by a flag on the device: the fused optimizer would read its copy on the host before it has arrived."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([weight], fused=True)
    guard = NonFiniteGuard(optimizer, torch.device("cuda"), scaled=False, on_host=True)
    assert guard.should_step(torch.tensor(number)) is (number == 1.0)
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("grows", [False, True])
def test_a_scaler_of_weights_on_the_host_hands_no_flag_to_the_optimizer(grows):
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.AdamW([weight], fused=True, lr=0.5)
    NonFiniteGuard(optimizer, torch.device("cuda"), scaled=True, on_host=True)
    scaler = torch_private.GradScaler("cpu", half=True, on_host=True, init_scale=8.0)
    scaler.scale((weight * (INF if grows else 0.25)).sum().float()).backward()
    scaler.unscale_(optimizer)
    assert grows or weight.grad.tolist() == [0.25, 0.25]
    scaler.step(optimizer)
    assert torch.equal(weight.detach(), torch.ones_like(weight)) is grows and not hasattr(optimizer, "found_inf")


# ---- whole trainings


@pytest.fixture
def spoilt(monkeypatch):
    """From some epoch on, an image has latents that are no numbers."""

    def spoil(name, epoch, number=NAN):
        make = Batches.make

        def made(self, draw):
            batch = make(self, draw)
            if draw.epoch >= epoch and any(path.endswith(name) for path in batch.paths):
                batch.latents[0, 0, 0, 0] = number
            return batch

        monkeypatch.setattr(Batches, "make", made)

    yield spoil
    monkeypatch.undo()


def config(demo, squares, folder, script="flux_train_network", **values):
    """Four pictures, each twice: four steps of two pictures an epoch."""
    values = {"max_train_steps": 10, "save_every_n_steps": 1, "save_state": True, "output_name": "m"} | values
    return config_of(demo, script, train_data_dir=squares, output_dir=folder, **values)


def test_a_nan_names_step_and_images_and_keeps_the_last_good_files(demo, squares, tmp_path, spoilt):
    spoilt("2.png", epoch=2)
    with pytest.raises(ConfigError) as raised:
        train(config(demo, squares, tmp_path))
    run, words = reader.run_at(next(iter(runs_in(tmp_path)))), str(raised.value)
    step = int(words.split("the loss of step ")[1].split()[0])
    assert 5 <= step <= 8 and "is NaN" in words and "2.png" in words and "\n" not in words
    assert run.state == "failed" and str(run.error) == words
    steps = [event for event in reader.read_events(run.folder) if event["kind"] == "step"]
    assert steps[-1]["step"] == step and steps[-1]["loss"] is None  # JSON knows no NaN
    good = [f"m-step{n:08d}" for n in range(1, step)]
    files = {name for name in listing(tmp_path) if "/" not in name}
    assert files == {"runs", *(f"{name}.safetensors" for name in good), *(f"{name}-state" for name in good)}
    assert words.endswith(f"resume from {tmp_path / good[-1]}-state")


def test_from_the_last_state_it_goes_on_as_if_nothing_had_been(demo, squares, tmp_path, spoilt, monkeypatch):
    straight = train(config(demo, squares, tmp_path / "straight"))
    spoilt("2.png", epoch=2)
    with pytest.raises(ConfigError) as raised:
        train(config(demo, squares, tmp_path / "out"))
    state = str(raised.value).split("resume from ")[1]
    monkeypatch.undo()
    again = train(config(demo, squares, tmp_path / "out", resume=state))
    assert all(torch.equal(tensor, again.tensors()[name]) for name, tensor in straight.tensors().items())


@pytest.mark.parametrize("script", SCRIPTS)
def test_nothing_is_saved_of_a_step_that_failed(demo, squares, tmp_path, spoilt, script):
    """Also where reading the numbers is late: the first look is at the end, when the file is due."""
    spoilt("0.png", epoch=1, number=INF)
    with pytest.raises(ConfigError, match=r"0\.png"):
        train(config(demo, squares, tmp_path, script, max_train_steps=4, save_every_n_steps=None, save_state=False))
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize("script", LORAS)
def test_gradients_without_numbers_end_it_as_well(demo, squares, tmp_path, monkeypatch, script):
    clip = Updates.clip
    monkeypatch.setattr(Updates, "clip", lambda self, step: spoil_gradient(self) or clip(self, step))
    with pytest.raises(ConfigError, match="the gradient of step 1 is NaN: lower the learning rate"):
        train(config(demo, squares, tmp_path, script))


def spoil_gradient(updates):
    updates._parameters[0].grad.view(-1)[0] = NAN


@pytest.mark.parametrize("script", ["sdxl_train", "flux_train_network"])
def test_weights_that_are_no_numbers_are_not_saved(demo, squares, tmp_path, monkeypatch, script):
    """The losses so far were numbers; an update was too large."""

    def stepped(self, *watched, step=Updates.step):
        norms = step(self, *watched)
        with torch.no_grad():
            self._parameters[-1].view(-1)[0] = INF
        return norms

    monkeypatch.setattr(Updates, "step", stepped)
    with pytest.raises(ConfigError, match="after step 1 the weights hold NaN or infinity: lower the learning rate"):
        train(config(demo, squares, tmp_path, script))
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


TWO = """
import sys
from library.data.loading import Batches
from library.families import config_class
make = Batches.make
def made(self, draw):
    batch = make(self, draw)
    if self.place[0] == 1 and draw.index == 1:
        batch.latents[:] = float("nan")
        print("spoilt", *batch.paths, flush=True)
    return batch
Batches.make = made
from library.cli import train_script
sys.exit(train_script.main(config_class("flux_train_network"), ["--config_file", sys.argv[1]]))
"""


def test_an_image_of_the_second_process_is_named_by_the_first(demo, squares, tmp_path):
    (tmp_path / "run.toml").write_text(to_toml(config(demo, squares, tmp_path / "out")), encoding="utf-8")
    (tmp_path / "two.py").write_text(TWO, encoding="utf-8")
    first, second = ranks([tmp_path / "two.py", tmp_path / "run.toml"])
    words = first.communicate(timeout=200)[0]
    second.kill()  # as a launcher does
    spoken = second.communicate(timeout=200)[0]
    assert first.returncode
    run = reader.run_at(next(iter(runs_in(tmp_path / "out"))))
    spoilt = next(line for line in spoken.splitlines() if line.startswith("spoilt")).split()[1:]
    assert run.state == "failed" and "the loss of step 2 is NaN" in str(run.error), words
    assert all(path in str(run.error) for path in spoilt)
