"""Lines about work that takes long."""

from types import SimpleNamespace

import pytest

from library.train import journal
from library.train.journal import Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [100.0]
    monkeypatch.setattr(journal, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_remaining_time_is_reported_at_intervals(clock):
    said = []
    tell = Progress(said.append)
    for done in range(0, 101, 4):
        tell("caching latents", done, 100)
        clock[0] += 1
    assert said == [
        "caching latents: 0 of 100",
        "caching latents: 20 of 100, 0:00:20 left",
        "caching latents: 40 of 100, 0:00:15 left",
        "caching latents: 60 of 100, 0:00:10 left",
        "caching latents: 80 of 100, 0:00:05 left",
        "caching latents: 100 of 100",
    ]
    tell("saving")
    assert said[-1] == "saving"


def test_what_is_quickly_done_is_not_worth_a_word(clock):
    said = []
    tell = Progress(said.append, min_seconds=2.0)
    for done in (1, 2):
        tell("reading image sizes", done, 2)
    assert not said
    for done in range(256, 100_000, 9_000):
        tell("checking images", done, 100_000)
        clock[0] += 1.5
    assert said[0] == "checking images: 18256 of 100000, 0:00:14 left" and len(said) == 3
