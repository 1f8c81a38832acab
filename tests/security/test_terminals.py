"""Names from strangers reach a terminal as text: it obeys no escape sequence in one, and none turns what follows it."""

import json
import time
from pathlib import Path

import pytest

from library.cli import queue, shown
from library.cli.main import main
from library.config.problems import ConfigError, Message, Problem, one_line, printable_text
from library.data.folders import some
from library.runs import layout, notes, registry

# How a name would change the window's title, colour a line, delete it, write over it, or turn it round.
HOSTILE = (
    "\x1b]0;zorb\x07",
    "\x1b[31m",
    "\x9b2K",
    "\rzorb",
    "\b\b",
    "\x7f",
    "\u202ezorb",
    "\u2066zorb",
    "\x00",
    "\x85",
)
HARMLESS = ("a\nb", "a\tb", "a\r\nb", "é", "猫", "\U0001f408\u200d⬛", "مرحبا", "\u200e", "\xa0")


def assert_shown(text):
    assert not [sign for sign in text if sign not in "\n\t" and (ord(sign) < 32 or 0x7F <= ord(sign) < 0xA0)], repr(
        text
    )
    assert not {*text} & {"\u202e", "\u2066"}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_message_has_a_sign_that_a_terminal_obeys(hostile):
    name = f"a{hostile}b"
    nested = Message("{inner}", inner=Message("{name}", name=name))
    problem = Problem(name, "is {name}", place=f"in {name}: ", name=name)
    for message in (nested, problem, ConfigError("{name}", name=name), ConfigError(problem)):
        assert_shown(str(message))
    assert str(nested) == printable_text(name)


@pytest.mark.parametrize("text", HARMLESS)
def test_text_of_any_language_stays(text):
    assert printable_text(text) == text == str(Message("{text}", text=text))


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_command_about_runs_prints_such_a_sign(tmp_path, monkeypatch, capsys, hostile):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    name = f"a{hostile}b"
    for run in ("cat-1", "cat-2"):
        folder = tmp_path / "out/runs" / run
        folder.mkdir(parents=True)
        facts = dict.fromkeys(("title", "output_name", "error", "preset"), name)
        config = {"run": {"training_comment": f"{name} {run}"}}
        times = {"started": time.time(), "ended": time.time()}
        layout.store(
            folder / layout.RUN,
            {**facts, **times, "id": run, "state": "failed", "script": "sdxl_train_network", "config": config},
        )
        (folder / layout.PROGRESS).write_text(json.dumps({"kind": "saved", "file": name, "step": 1}) + "\n")
        (folder / notes.NOTE).write_text(name)
        registry.add_pointer(folder)
    for line in (
        ["list"],
        ["show", "cat-1"],
        ["compare", "cat-1", "cat-2"],
        ["show", name],
        ["rm", "cat-1", "--dry-run"],
    ):
        try:
            main(["runs", *line])
        except SystemExit as usage:
            assert usage.code
        captured = capsys.readouterr()
        assert_shown(captured.out + captured.err)


LINE_ENDS = ("\n", "\r\n", "\r")


@pytest.mark.parametrize("end", LINE_ENDS)
def test_no_name_imitates_a_line(capsys, end):
    name = f"a{end}FIX output_dir: none"
    for text in (one_line(name), str(Message("{path}", path=Path(name))), str(some([name]))):
        assert len(text.splitlines()) == 1 and "FIX" in text
    shown.print_table(("name", "state"), [(name, "done")])
    queue._say(False, f"{name} is in the queue")
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_sentence_about_the_queue_has_such_a_sign(capsys, hostile):
    queue._say(False, f"a{hostile}b is in the queue")
    assert_shown(capsys.readouterr().out)
