"""The averages and the speed that a run reports."""

from types import SimpleNamespace

import torch

from library.train.step import step_metrics as module
from library.train.step.step_metrics import Meter


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
        meter.push({"step": step}, {"loss": torch.tensor(0.0)}, compiled=step == 6)
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
