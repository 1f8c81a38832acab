"""The averages and the speed that a run reports."""

from types import SimpleNamespace

import pytest
import torch

from library.train.step import lost_seconds
from library.train.step import step_metrics as module
from library.train.step.lost_seconds import COMPILING, FIRST_STEPS, NEW_EPOCHS, RECORDING, SAVING, SAVING_STATES
from library.train.step.step_metrics import Meter, StepTimer


def lines(losses, per_epoch):
    meter = Meter(total=len(losses), per_epoch=per_epoch)
    for step, loss in enumerate(losses, start=1):
        meter.push({"step": step}, {"loss": torch.tensor(float(loss))})
    return [line for line, _ in meter.lines(wait=True)]


def test_the_average_keeps_one_slot_for_each_step_of_an_epoch():
    # 0..5 over epochs of three: 3, 4, 5 have replaced 0, 1, 2, as upstream's recorder does it.
    assert [line["avr_loss"] for line in lines(range(6), 3)] == [0.0, 0.5, 1.0, 2.0, 3.0, 4.0]


def test_speed_leaves_out_warm_up_compiling_and_pauses(monkeypatch):
    now = iter([0, 100, 200, 201, 202, 302, 303, 1000, 1001])
    # The module's own clock: other threads of this process look at time.monotonic, too.
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    meter = Meter(total=20, per_epoch=20)
    for step in range(1, 8):
        meter.push({"step": step}, {"loss": torch.tensor(0.0)}, cause=COMPILING if step == 6 else None)
    meter.pause()
    meter.push({"step": 8}, {"loss": torch.tensor(0.0)})
    meter.push({"step": 9}, {"loss": torch.tensor(0.0)})
    last, _ = meter.lines(wait=True)[-1]
    assert last["s_it"] == 1.0
    assert last["eta"] == 11.0


class Event:
    """A moment of a GPU's stream."""

    def __init__(self, seconds):
        self.seconds = seconds

    def elapsed_time(self, other):
        return (other.seconds - self.seconds) * 1000


def test_speed_is_that_of_the_device_where_the_host_runs_ahead(monkeypatch):
    """The host issues a step in 1 s, the device takes 4; saving in between takes 500, and waits for the device."""
    host = iter(range(100))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(host) + 1)))
    meter, now = Meter(total=30, per_epoch=30), 0.0
    for step in range(1, 31):
        moments = [Event(now), Event(now + 1), Event(now + 4)]
        now += 4
        meter.push({"step": step}, {"loss": torch.tensor(0.0)}, timestamps=moments)
        if step % 10 == 0:
            assert meter.lines(wait=True)[-1][0]["s_it"] == 4.0
            meter.pause()
            now += 500
    assert meter.warm_steps == 30 - module.WARM_UP - 2  # all but the first ones, and the first after each pause


class Clocks:
    """A processor's clock, and the stream of a GPU that it is ahead of; without `gpu` the processor does all work."""

    def __init__(self, monkeypatch, gpu):
        self.host = self.device = 0.0
        self.gpu = gpu
        for module_with_clock in (module, lost_seconds):
            clock = SimpleNamespace(monotonic=lambda: self.host + 1, perf_counter=lambda: self.host)
            monkeypatch.setattr(module_with_clock, "time", clock)

    def now(self):
        if not self.gpu:
            return self.host
        self.device = max(self.device, self.host)
        return Event(self.device)

    def compute(self, seconds, of_host=0.0):
        """Work of `seconds`, issued in `of_host` seconds if a GPU does it."""
        self.host += of_host if self.gpu else seconds
        self.device = max(self.device, self.host) + seconds

    def wait(self):
        self.host = max(self.host, self.device) if self.gpu else self.host


STEP = 0.35  # seconds
SAVED, STATE = 2.0, 3.0
SLOW = {1: 4.0, 2: 1.5, 3: 0.5, 7: 2.5, 25: 9.0}  # seconds more: the first steps, a new size, one that is compiled
RECORDED, NEW_EPOCH = 1.4, 0.9


@pytest.mark.parametrize("gpu", [True, False])
def test_the_printed_speed_is_an_outside_clocks_and_what_is_lost_has_a_name(gpu, monkeypatch):
    """Epochs of ten steps, of which the first is slow; a file every 20 steps, with a state; one size comes later."""
    clocks, meter = Clocks(monkeypatch, gpu), Meter(total=60, per_epoch=10)
    timer = StepTimer(torch.device("cpu"))
    monkeypatch.setattr(timer, "_now", clocks.now)
    monkeypatch.setattr(StepTimer, "_now", lambda self: clocks.now())
    outside = {0: 0.0}  # when each step was over, by a clock that waits for it
    windows = timer.waited(range(1, 61))
    for step in windows:
        is_new = step > 1 and step % 10 == 1
        recorded = RECORDED if step == 33 else 0.0
        clocks.compute(STEP + SLOW.get(step, 0.0) + NEW_EPOCH * is_new + recorded, of_host=0.05)
        meter.sizes = 1 + (step >= 7)
        cause = COMPILING if step == 25 else RECORDING if recorded else None
        moments = timer.ended()
        outside[step] = clocks.device if gpu else clocks.host
        meter.push({"step": step, "epoch": -(-step // 10)}, {"loss": torch.tensor(0.0)}, (), cause, moments)
        if step % 20 == 0:
            with meter.lost.during(SAVING):
                meter.pause()
                with meter.lost.of_steps():
                    clocks.wait()
                    meter.lines(wait=True)
                clocks.host += SAVED
                with meter.lost.during(SAVING_STATES):
                    clocks.host += STATE
    meter.lines(wait=True)
    spent = {step: outside[step] - outside[step - 1] for step in range(1, 61)}
    usual = [spent[step] for step in spent if not (step <= 3 or step % 10 == 1 or step in (7, 25, 33))]
    speed = meter.speed(60)["s_it"]
    assert speed == pytest.approx(sum(usual) / len(usual), rel=0.03) == pytest.approx(STEP, rel=0.03)
    lost = meter.lost_seconds()
    assert lost == {
        COMPILING: pytest.approx(9.0, abs=0.1),
        FIRST_STEPS: pytest.approx(4.0 + 1.5 + 0.5 + 2.5, abs=0.1),
        SAVING_STATES: pytest.approx(3 * STATE, abs=0.1),
        SAVING: pytest.approx(3 * SAVED, abs=0.1),
        NEW_EPOCHS: pytest.approx(5 * NEW_EPOCH, abs=0.1),
        RECORDING: pytest.approx(RECORDED, abs=0.1),
    }
    whole = max(clocks.host, clocks.device)
    assert 60 * speed + sum(lost.values()) == pytest.approx(whole, rel=0.03)


def test_where_an_epoch_is_one_step_all_steps_count():
    meter = Meter(total=20, per_epoch=1)
    for step in range(1, 21):
        meter.push({"step": step, "epoch": step}, {"loss": torch.tensor(0.0)})
    meter.lines(wait=True)
    assert meter.warm_steps == 20 - module.WARM_UP


def test_the_printed_speed_is_exact_to_one_percent():
    from library.train.journal import pace_of

    shown = [pace_of(seconds) for seconds in (0.0805, 0.9994, 1.004, 12.345)]
    assert shown == ["0.081", "0.999", "1.00", "12.35"]
    assert all(abs(float(pace_of(n / 1000)) - n / 1000) <= n / 1e5 for n in range(50, 5000))


def test_images_are_named_whose_batch_has_no_number():
    meter = Meter(total=3, per_epoch=3)
    for step, odd in enumerate((0.5, float("nan"), float("inf")), start=1):
        batches = [(torch.tensor(1.0), [f"{step}a.png"]), (torch.tensor(odd), [f"{step}b.png", f"{step}c.png"])]
        meter.push({"step": step}, {"loss": torch.tensor(odd)}, batches)
    assert [images for _, images in meter.lines()] == [[], ["2b.png", "2c.png"], ["3b.png", "3c.png"]]


def test_lines_up_to_a_step_are_read_and_no_later_one():
    meter = Meter(total=3, per_epoch=3)
    for step in range(1, 4):
        meter.push({"step": step}, {"loss": torch.tensor(0.0)})
    assert [line["step"] for line, _ in meter.lines_until(2)] == [1, 2]
    assert [line["step"] for line, _ in meter.lines()] == [3]
