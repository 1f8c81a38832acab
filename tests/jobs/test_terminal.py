"""The progress of a command in a shell: one line for a phase, not one for each image."""

import io
import sys

from library.config.problems import Message
from library.jobs.work import progress_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def written(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    report = progress_line()
    for done in range(1, 101):
        report(Message("comparing images"), done, 100)
    report(Message("loading the model"), 0, 1)
    report(Message("cat"), 1, 3)
    return stream.getvalue()


def test_a_file_gets_a_line_for_each_phase(monkeypatch):
    lines = written(io.StringIO(), monkeypatch).splitlines()
    assert lines == ["comparing images (100)", "loading the model", "cat (3)"]


def test_a_terminal_shows_one_line_that_is_rewritten(monkeypatch):
    lines = written(Terminal(), monkeypatch).split("\n")
    assert len(lines) == 3 and lines[0].startswith("\rcomparing images 1 / 100\rcomparing images 2 / 100\r")
    assert [line.rsplit("\r", 1)[-1] for line in lines] == [
        "comparing images 100 / 100",
        "loading the model",
        "cat 1 / 3",
    ]
