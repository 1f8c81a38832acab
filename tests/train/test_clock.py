"""How long a run is and what is due when."""

from types import SimpleNamespace

import pytest

from library.train.step.clock import Clock, windows


def config(**steps):
    return SimpleNamespace(
        steps=SimpleNamespace(
            moved=False, **{"gradient_accumulation_steps": 1, "max_train_epochs": None, "max_train_steps": 10} | steps
        )
    )


@pytest.mark.parametrize(
    ("steps", "batches", "total", "per_epoch", "epochs"),
    [
        ({"max_train_steps": 10}, 4, 10, 4, 3),
        ({"max_train_steps": 8}, 4, 8, 4, 2),
        ({"max_train_epochs": 3}, 4, 12, 4, 3),
        ({"max_train_epochs": 3, "gradient_accumulation_steps": 3}, 4, 6, 2, 3),
        ({"max_train_steps": 5, "gradient_accumulation_steps": 8}, 3, 5, 1, 5),
    ],
)
def test_steps_and_epochs_of_a_training_follow_from_its_batches(steps, batches, total, per_epoch, epochs):
    clock = Clock.of(config(**steps), batches)
    assert (clock.total, clock.per_epoch, clock.epochs) == (total, per_epoch, epochs)


def test_epochs_count_from_one_and_end_on_their_last_step():
    clock = Clock.of(config(max_train_steps=5), 2)
    positions = []
    while not clock.done:
        clock.tick()
        positions.append((clock.step, clock.epoch, clock.epoch_ended))
    assert positions == [(1, 1, False), (2, 1, True), (3, 2, False), (4, 2, True), (5, 3, False)]


def test_due_by_step_and_by_epoch():
    clock = Clock.of(config(max_train_steps=12), 3)
    due = {}
    while not clock.done:
        clock.tick()
        due[clock.step] = list(clock.every(4, 2))
    assert {s: d for s, d in due.items() if d} == {4: ["step"], 6: ["epoch"], 8: ["step"], 12: ["step", "epoch"]}


def test_a_resumed_clock_goes_on_where_it_stood():
    clock = Clock.of(config(max_train_steps=9), 4)
    for _ in range(6):
        clock.tick()
    other = Clock.of(config(max_train_steps=9), 4)
    state = clock.state()
    other.step, other.epoch, other.in_epoch = state["current_step"], state["current_epoch"], state["step_in_epoch"]
    clock.tick()
    other.tick()
    assert clock == other


def test_windows_group_batches_and_keep_the_short_last_one():
    assert list(windows(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize(
    ("steps", "epochs", "left"),
    [
        (3, None, [3, 3, 2, 2, 1, 0]),
        (4, None, [2, 2, 2, 1, 1, 0]),
        (None, 1, [2, 2, 2, 1, 1, 0]),
        (None, None, [1] * 5 + [0]),
    ],
)
def test_what_is_due_at_intervals_and_at_the_end_is_counted(steps, epochs, left):
    moments = (0, 2, 3, 5, 7, 8)
    assert [Clock(8, 4, 2, step=step).times_left(steps, epochs) for step in moments] == left
