"""Processes of a training that tell each other what keeps them from a step. Here each is a thread."""

import datetime
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import DistStoreError, TCPStore

from library.compiler import torch_private
from library.config.problems import ConfigError
from library.distributed.messages import Messages
from library.train import errors
from library.train.step.clock import Clock
from library.train.step.stepper import Stepper
from library.train.stop_requests import ControlRequests


@pytest.fixture
def messages(monkeypatch):
    """Those of each process of several."""
    timeout = datetime.timedelta(seconds=60)
    hosts = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)]

    def make(ranks, timeout_of_step=60.0):
        messages = []
        for rank in range(ranks):
            own = TCPStore("127.0.0.1", hosts[0].port, is_master=False)
            monkeypatch.setattr(torch_private, "process_store", lambda own=own: own)
            messages.append(Messages(rank, ranks, timeout_of_step))
        return messages

    make.end = hosts.clear  # of the process that has the store
    return make


def together(*calls):
    """What each call answers in a thread of its own."""
    answers: dict[int, Any] = {}

    def run(number):
        answers[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [answers[number] for number in range(len(calls))]


class Data:
    """Batches of an epoch, of which one cannot be read; `index` is the number of those that were given."""

    def __init__(self, count, gone=None):
        self.count, self.gone, self.epoch, self.index = count, gone, 1, 0

    def __iter__(self):
        while self.index < self.count:
            if self.index == self.gone:
                raise ConfigError("{path} is missing", path="4.png")
            self.index += 1
            yield self.index
        self.epoch, self.index = self.epoch + 1, 0

    def set_epoch(self, epoch):
        self.epoch, self.index = epoch, self.index if epoch == self.epoch else 0

    def state_dict(self):
        return {"epoch": self.epoch, "index": self.index}

    def load_state_dict(self, known):
        self.epoch, self.index = known["epoch"], known["index"]


@pytest.mark.parametrize(("size", "gone", "steps"), [(1, 2, 2), (2, 3, 1), (2, 4, 2), (1, None, 12)])
def test_of_what_one_cannot_read_no_process_begins_a_step(messages, size, gone, steps):
    """All are where the last step of all ended, and know why."""

    def process(own, data):
        world: Any = SimpleNamespace(ranks=3, device=torch.device("cpu"), messages=own)
        given: Any = data
        clock = Clock(total=2 * (6 // size), per_epoch=6 // size, epochs=2)
        stepper = Stepper(given, clock, SimpleNamespace(), world, ControlRequests(), size)  # type: ignore[arg-type]
        taken = sum(1 for _ in stepper)
        return taken, clock.step, data.index, str(stepper.read_error or "")

    every = messages(3)
    answers = together(*(lambda n=n: process(every[n], Data(6, gone if n == 1 else None)) for n in range(3)))
    if gone is None:
        assert {answer[:2] for answer in answers} == {(12, 12)} and not any(answer[3] for answer in answers)
    else:
        assert answers == [(steps, steps, steps * size, "4.png is missing")] * 3


def test_a_process_that_does_not_come_to_a_step_is_waited_for_as_long_as_was_reported(messages):
    first, _ = messages(2, timeout_of_step=0.01)
    with pytest.raises(DistStoreError, match=f"^({'|'.join(errors.TIMEOUT_SIGNS)})"):
        first.first_problem("")


def test_the_first_report_of_a_failure_is_kept_for_all(messages):
    first, second, third = messages(3)
    assert first.reported_failure() == ""
    second.report_failure("the GPU ran out of memory")
    third.report_failure("RuntimeError: connection lost")
    assert first.reported_failure() == "process 1 of this training has ended: the GPU ran out of memory"


def test_nobody_waits_for_a_store_that_is_gone(messages):
    first, second = messages(2)
    second.report_failure("the GPU ran out of memory")
    messages.end()
    second.report_failure("once more")
    assert first.reported_failure() == ""
