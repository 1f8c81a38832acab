"""Records of runs from strangers: whatever lies in a run's folder, the page that lists it waits for nothing, fails at
nothing, and stays small.
"""

import ast
import json
import os
import time
import zipfile

import pytest

from library.config.outside_files import read_regular
from library.files import STATE_FACTS
from library.runs import (
    bundle,
    export,
    file_contents,
    job_files,
    layout,
    lineage,
    notes,
    overview,
    queue,
    queue_rows,
    reader,
    registry,
    restoring,
    resume,
    series,
)
from tests import source

FILES = (
    *(layout.RUN, layout.PROGRESS, layout.LOG, layout.TOML, layout.STOP, layout.LAUNCHER, notes.NOTE, STATE_FACTS),
    *("sample_prompts.txt", "dataset_config.toml"),
)
READERS = {
    "the list of runs": lambda run: overview.summary(reader.run_at(run.folder)),
    "what a run does": lambda run: reader.run_at(run.folder).state,
    "its events": lambda run: reader.read_events(run.folder),
    "its progress": lambda run: reader.RunProgress(run.folder).update(),
    "its curves": lambda run: series.RunSeries(run.folder).update(),
    "its log": lambda run: reader.log_end(run.folder),
    "its note": lambda run: notes.read_note(run.folder),
    "the run before it": lambda run: lineage.parent_run(run.folder),
    "the step of a state": lambda run: lineage.step_of(run.folder),
    "its settings": lambda run: (resume.run_toml(run), queue_rows.run_values(run), queue_rows.run_contents(run)),
    "its files": lambda run: [file_contents.content_of(run.folder / name) for name in FILES],
    "its export": lambda run: export.export_run(run).close(),
    "its bundle": bundle.bundle_run,
    "the copy of its folder": lambda run: restoring.FolderCopy(run.folder).close(),
    "a request to stop": lambda run: layout.stop_asked(run.folder),
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))


@pytest.fixture
def run(tmp_path):
    """A run that has ended, with a file for everything that is read of one."""
    folder = tmp_path / "out" / "runs" / "cat-1"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text("")
    facts = {"id": "cat-1", "state": "finished", "script": "sdxl_train_network", "started": time.time()}
    layout.store(folder / layout.RUN, {**facts, "config": {"steps": {"resume": str(folder)}}})
    registry.add_pointer(folder)
    return reader.run_at(folder)


def write(run, *events):
    (run.folder / layout.PROGRESS).write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return run


# ---- pipes, devices and folders


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", FILES)
def test_no_reader_waits_for_what_is_no_file(run, name, kind):
    (run.folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(run.folder / name)
    elif kind == "device":
        (run.folder / name).symlink_to("/dev/zero")
    else:
        (run.folder / name).mkdir()
    for read in READERS.values():
        read(run)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_queue_whose_files_are_pipes_is_read(tmp_path):
    entry = queue.QueueEntry("20260101-000000-abcdef", "sdxl_train_network", "LoRA", "cat", str(tmp_path))
    queue.queue_folder().mkdir(parents=True)
    layout.store(queue.queue_folder() / "queue.json", {"entries": [vars(entry)]})
    os.mkfifo(queue.queue_folder() / f"{entry.id}.toml")
    (queue.queue_folder() / entry.id).mkdir()
    os.mkfifo(queue.queue_folder() / entry.id / "sample_prompts.txt")
    assert [each.id for each in queue.read_queue().entries] == [entry.id]
    assert queue_rows.entry_contents(entry) == {} == job_files.copied_files(queue.queue_folder() / entry.id)
    with pytest.raises(ValueError, match="The config of cat is gone"):
        queue.job_of_entry(entry)
    (queue.queue_folder() / "queue.json").unlink()
    os.mkfifo(queue.queue_folder() / "queue.json")
    assert queue.read_queue().entries == []


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
@pytest.mark.parametrize("name", export.FILES)
def test_no_export_holds_what_a_link_leads_to(run, tmp_path, name):
    (tmp_path / "key").write_text("private")
    (run.folder / name).unlink()
    (run.folder / name).symlink_to(tmp_path / "key")
    with export.export_run(run) as packed, zipfile.ZipFile(packed) as archive:
        assert name not in archive.namelist() and len(archive.namelist()) == len(export.FILES) - 1


# ---- content


CONTENTS = {
    "empty": b"",
    "binary": bytes(range(256)),
    "deep": b"[" * 200_000,
    "deep objects": b'{"kind":' * 100_000,
    "a list": b"[1, 2]\n",
    "a number": b"1\n",
    "huge numbers": b'{"kind": "step", "step": ' + b"9" * 5000 + b', "loss": 1e999, "t": -1e400, "lr": 1e999}\n',
    "other types": b'{"kind": ["step"], "step": {}, "loss": [], "t": {}, "lr": [1], "file": 3}\n',
    "messages": b'{"kind": "phase", "name": "x", "texts": [{"at": ["name"], "text": "x", "template": "{a}"}]}\n',
    "half a character": b'{"kind": "warning", "text": "\\ud800", "name": "\\udfff", "output_name": "\\ud800"}\n',
    "half a byte": b'{"kind": "sample", "file": "\\udc80.png", "prompt": "\xff"}\n',
    "NUL": b'{"kind": "saved", "file": "a\\u0000b-state", "folder": "\\u0000", "output_dir": "\\u0000"}\n',
    "a name too long": b'{"kind": "saved", "file": "' + b"a" * 100_000 + b'-state"}\n',
    "no end": b'{"kind": "step", "step": 1, "loss": 1',
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", CONTENTS)
def test_no_reader_fails_at_what_a_file_holds(run, name, content):
    (run.folder / name).write_bytes(CONTENTS[content])
    for read in READERS.values():
        read(reader.run_at(run.folder))


# ---- size


def test_a_record_too_large_to_be_one_is_not_read(run, monkeypatch):
    monkeypatch.setattr(layout, "MAX_RECORD", 100)
    layout.store(run.folder / layout.RUN, {**run.facts, "state": "failed"})
    with pytest.raises(OSError, match="too large"):
        read_regular(run.folder / layout.RUN, layout.MAX_RECORD)
    assert overview.summary(reader.run_at(run.folder)).damaged


def test_a_line_too_long_to_be_an_event_is_skipped_and_read_no_second_time(run):
    first, last = {"kind": "saved", "file": "a"}, {"kind": "saved", "file": "b"}
    write(run, first, {"kind": "saved", "file": "x" * layout.MAX_EVENT}, last)
    *events, (_, end) = reader.new_events(run.folder)
    assert [event for event, _ in events] == [first, last]
    assert end == (run.folder / layout.PROGRESS).stat().st_size
    with (run.folder / layout.PROGRESS).open("a") as file:
        file.write("x" * 2 * layout.MAX_EVENT)  # its end is not yet written
    assert [*reader.new_events(run.folder, end)] == [({}, end)]


def test_events_that_are_kept_have_a_limit_in_bytes_and_in_kinds(run, monkeypatch):
    monkeypatch.setattr(reader, "MAX_HELD_BYTES", 10_000)
    write(run, *({"kind": "sample", "number": n, "prompt": "x" * 900} for n in range(100)))
    [samples] = reader.RunProgress(run.folder).update().events.values()
    assert [event["number"] for event in samples] == [*range(90, 100)]
    write(run, *({"kind": f"kind {n}"} for n in range(1000)))
    assert len(reader.RunProgress(run.folder).update().events) == reader.MAX_KINDS


def test_curves_have_a_limit_in_names(run):
    write(
        run,
        *({"kind": "step", "step": n, "loss": 1, "lr": {f"{n} {m}": 1 / (m + 1) for m in range(9)}} for n in range(60)),
    )
    assert len(series.RunSeries(run.folder).update().steps.values) == series.MAX_COLUMNS
    rates = {**{str(n): 1.0 for n in range(10_000)}, "x" * 10_000: 1.0}
    assert len(reader.rates_by_name(rates)) == reader.MAX_RATES
    assert reader.rates_by_name({"x" * 10_000: 1.0, "unet": 0.5}) == {"unet": 0.5}


# ---- every reader


OWN_FILES = {
    "library.runs.explain": "a table of this program",
    "library.runs.launcher": "the user's answers to `accelerate config`",
    "library.runs.process": "a file of the kernel",
    "library.runs.record": "files that the training itself writes, in a folder that it has made",
}


def opens_to_read(call):
    """Whether a call opens a file by itself, to read it."""
    called = ast.unparse(call.func)
    modes = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    writes = any(isinstance(mode, str) and {*mode} & {*"awx"} for mode in modes)
    is_opener = called == "open" or called.endswith(".open") and called != "os.open" and "build_opener" not in called
    return called.endswith((".read_text", ".read_bytes")) or (is_opener and not writes)


def test_no_module_reads_a_record_past_the_opener():
    """`open_regular` and the readers on top of it are the only ones that open a file of a run to read it."""
    modules = {source.module(path): path for path in source.files()}
    wrong = [
        f"{name}:{node.lineno}"
        for name, path in modules.items()
        if name.startswith("library.runs") and name not in OWN_FILES
        for node in source.nodes(path)
        if isinstance(node, ast.Call) and opens_to_read(node)
    ]
    assert not wrong
