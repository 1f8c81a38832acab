"""Files are there whole or not at all."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from kohya_gui.form import typed_paths
from library import files
from library.check import report
from library.compiler import cache
from library.config.building import build_config
from library.config.problems import ConfigError
from library.config.schema import options_of
from library.data.preflight import Check
from library.doctor import disk
from library.families import config_class
from library.files import UnwritableError, free_space, need_space, write_atomic
from library.outputs import paths as output_paths
from library.outputs.paths import find_output_problems
from library.runs import layout
from tests.source import ROOT


def test_bytes_text_and_functions(tmp_path):
    assert write_atomic(tmp_path / "new" / "a.bin", b"\x00\xff").read_bytes() == b"\x00\xff"
    assert write_atomic(tmp_path / "a.txt", "ü\r\nx\n").read_bytes() == "ü\r\nx\n".encode()
    seen = []

    def fill(path):
        seen.append(path)
        Path(path).write_bytes(b"model")

    write_atomic(str(tmp_path / "a.safetensors"), fill)
    assert (tmp_path / "a.safetensors").read_bytes() == b"model"
    assert (seen[0].parent, seen[0].suffix) == (tmp_path, ".safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "a.txt", "new"]


def test_a_name_as_long_as_the_disk_allows_can_be_written(tmp_path):
    for name in ("a" * 251 + ".npz", "絵" * 83 + ".npz"):
        assert write_atomic(tmp_path / name, b"latents").read_bytes() == b"latents"
    with pytest.raises(ConfigError, match="the name is too long for this disk"):
        write_atomic(tmp_path / ("a" * 252 + ".npz"), b"latents")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_temporary_name_cuts_no_path_of_windows_short(tmp_path, monkeypatch):
    """An image whose cache may have a path of 259 characters, as most Windows allow, gets its cache."""
    monkeypatch.setattr(files, "WINDOWS", True)
    temporary_names = []

    def fill(temporary):
        temporary_names.append(temporary.name)
        assert len(str(temporary)) < 260
        temporary.write_bytes(b"latents")

    name = "n" * (259 - len(str(tmp_path / "x")) - 3) + ".npz"
    assert len(str(write_atomic(tmp_path / name, fill))) == 259
    assert files.UNFINISHED.fullmatch(temporary_names[0])
    monkeypatch.setattr(files, "LONGEST_ON_WINDOWS", 10)  # as if the folder left no room
    write_atomic(tmp_path / "名.npz", fill)
    assert files.UNFINISHED.fullmatch(temporary_names[1])


@pytest.mark.parametrize("existing", [True, False])
def test_failure_leaves_what_was_there(tmp_path, existing):
    path = tmp_path / "a.npz"
    if existing:
        path.write_bytes(b"old")

    def fails(temporary):
        temporary.write_bytes(b"half")
        raise RuntimeError("NaN")

    with pytest.raises(RuntimeError, match="NaN"):
        write_atomic(path, fails)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"] * existing


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full: cannot write"),
        (PermissionError(errno.EACCES, "denied"), "no permission; choose another folder"),
        (OSError(errno.EFBIG, "File too large"), "the file is too large for this disk"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "the disk is full: cannot write"),
        (SafetensorError("I/O error: File too large (os error 27)"), "the file is too large for this disk"),
        (SafetensorError("I/O error: Read-only file system (os error 30)"), "no permission; choose another folder"),
        (RuntimeError("[enforce fail at inline_container.cc:672]"), "the disk did not take all of it"),
    ],
)
def test_disk_errors_are_sentences(tmp_path, error, words):
    def fails(temporary):
        raise error

    with pytest.raises(ConfigError, match=words) as e:
        write_atomic(tmp_path / "a.bin", fails)
    assert str(tmp_path / "a.bin") in str(e.value) and isinstance(e.value, UnwritableError)


@pytest.mark.parametrize("error", [OSError("encoder error -2"), OSError("7 requested and 3 written"), RuntimeError()])
def test_an_error_without_reason_on_a_full_disk_is_one_of_the_disk(tmp_path, monkeypatch, error):
    def fails(temporary):
        raise error

    with pytest.raises(type(error)):
        write_atomic(tmp_path / "a.bin", fails)
    monkeypatch.setattr(files, "free_space", lambda place: 0)
    with pytest.raises(UnwritableError, match=r"the disk is full: cannot write .*a\.bin"):
        write_atomic(tmp_path / "a.bin", fails)


@pytest.mark.skipif(os.name == "nt", reason="Windows limits no file sizes")
def test_whatever_writes_a_file_has_a_sentence_for_a_disk_that_takes_only_a_part(tmp_path):
    """One process for all writers, as the limit of a file's size holds for its whole process."""
    code = "import sys; from tests.config import limited_writers; limited_writers.main(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said) > 7 and all(kind == "UnwritableError" for kind in said.values()), said
    assert not list(tmp_path.iterdir())


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "a").write_text("x")
    with pytest.raises(ConfigError, match="a file has the name of its folder"):
        write_atomic(tmp_path / "a" / "b.txt", "x")


def test_free_space_of_a_folder_to_be(tmp_path):
    assert free_space(tmp_path / "not" / "yet") > 0
    need_space(tmp_path / "a.bin", 10)
    with pytest.raises(ConfigError, match=r"not enough disk space for .*: 1000000 GB needed"):
        need_space(tmp_path / "a.bin", 10**15)


def test_renaming_waits_for_readers_on_windows(tmp_path, monkeypatch):
    tries = []
    real = os.replace

    def busy(a, b):
        tries.append(a)
        if len(tries) < 3:
            raise PermissionError(errno.EACCES, "in use")
        real(a, b)

    monkeypatch.setattr(files, "WINDOWS", True)
    monkeypatch.setattr(files.os, "replace", busy)
    write_atomic(tmp_path / "a.txt", "x")
    assert len(tries) == 3


@pytest.mark.parametrize("work", ["replace", "move", "remove", "remove_folder"])
def test_all_that_changes_names_waits_for_readers_on_windows(tmp_path, monkeypatch, work):
    """As a virus scanner reads what is new, and ComfyUI maps what it shows."""
    tries: list[str] = []

    def busy(real, *names):
        tries.append("")
        if len(tries) < 3:
            raise PermissionError(errno.EACCES, "in use")
        return real(*names)

    monkeypatch.setattr(files, "WINDOWS", True)
    monkeypatch.setattr(files.time, "sleep", lambda seconds: None)
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir() if work == "remove_folder" else old.write_text("x")
    for name in ("rename", "replace", "unlink"):
        monkeypatch.setattr(files.os, name, partial(busy, getattr(os, name)))
    getattr(files, work)(*([old, new] if work in ("replace", "move") else [old]))
    assert len(tries) == 3 and not old.exists() and new.exists() == (work in ("replace", "move"))


@pytest.mark.parametrize("number", [32, 33, 145, 1224])
def test_all_that_passes_on_windows_is_waited_for(monkeypatch, number):
    """Python takes only the first two for missing rights."""
    monkeypatch.setattr(files, "WINDOWS", True)
    monkeypatch.setattr(files.time, "sleep", lambda seconds: None)
    errors = [windows_error(errno.EACCES if number < 100 else errno.EINVAL, number)] * 2

    def action():
        if errors:
            raise errors.pop()
        return "done"

    assert files.patiently(action) == "done"
    with pytest.raises(OSError, match="of Windows"):
        files.patiently(lambda: (_ for _ in ()).throw(windows_error(errno.EINVAL, 87)))


def test_a_state_that_a_program_holds_on_windows_stays_whole(tmp_path, monkeypatch, caplog):
    """Else a part of it would stay under its name, and be resumed."""
    state = tmp_path / "m-step00000002-state"
    state.mkdir()
    (state / "train_state.json").write_text("{}")

    def held(old, new):
        raise windows_error(errno.EACCES, 32)

    monkeypatch.setattr(files, "WINDOWS", True)
    monkeypatch.setattr(files.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(files.os, "replace", held)
    output_paths.remove_outdated(state)
    assert [path.name for path in tmp_path.rglob("*")] == [state.name, "train_state.json"]
    assert "could not be removed" in caplog.text


def windows_error(number: int, windows_number: int) -> OSError:
    error = OSError(number, "of Windows")
    error.winerror = windows_number  # pyrefly: ignore[missing-attribute]
    return error


def test_a_reader_of_facts_waits_until_they_are_replaced_on_windows(tmp_path, monkeypatch):
    layout.store(tmp_path / "run.json", {"state": "running"})
    real, tries = layout.read_regular, []

    def busy(path, max_bytes):
        tries.append(path)
        if len(tries) < 3:
            raise PermissionError(errno.EACCES, "being replaced")
        return real(path, max_bytes)

    monkeypatch.setattr(layout, "read_regular", busy)
    monkeypatch.setattr(files, "WINDOWS", False)
    assert layout.load_facts(tmp_path / "run.json") == {}  # elsewhere a file without rights is not waited for
    monkeypatch.setattr(files, "WINDOWS", True)
    assert layout.load_facts(tmp_path / "run.json") == {"state": "running"}


@pytest.mark.parametrize(
    ("number", "name", "words"),
    [
        (5, "there.bin", "another program has it open"),
        (32, "new.bin", "another program has it open"),
        (1224, "there.bin", "another program has it open"),
        (5, "new.bin", "no permission"),
        (123, "a?.bin", r"Windows allows none of"),
        (112, "new.bin", "the disk is full"),
        (3, "new.bin", "its folder cannot be made"),
        (2, "new.bin", "controlled folder access"),
        (2, "missing/new.bin", "its folder cannot be made"),
        (5, "read-only.bin", "no permission"),
        (87, "con.bin", "reserves this name for a device"),
        (5, "NUL", "reserves this name for a device"),
        (3, "n" * 230 + ".bin", "Windows cuts paths at 260 characters"),
        (3, "n" * 252 + ".bin", "the name is too long for this disk"),
        (123, "🐱" * 126 + ".bin", "the name is too long for this disk"),
    ],
)
def test_errors_of_windows_are_sentences(tmp_path, monkeypatch, number, name, words):
    """Python gives the nearest number of POSIX, EINVAL if there is none, and Windows' own beside it."""
    posix = {5: errno.EACCES, 32: errno.EACCES, 112: errno.ENOSPC, 2: errno.ENOENT, 3: errno.ENOENT}
    error = windows_error(posix.get(number, errno.EINVAL), number)
    for there in ("there.bin", "read-only.bin"):
        (tmp_path / there).write_bytes(b"mapped")
    monkeypatch.setattr(files.os, "access", lambda path, mode: "read-only" not in str(path))
    with pytest.raises(UnwritableError, match=words), files.clear_errors(tmp_path / name):
        raise error


def test_a_drive_that_is_not_there(tmp_path, monkeypatch):
    """Elsewhere there is at least a root."""
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    folder = tmp_path / "lora"
    assert files.nearest_existing(folder) is None and files.blocking_path(folder) == Path(folder.anchor)
    with pytest.raises(UnwritableError, match="its folder cannot be made"):
        need_space(folder / "a.bin", 10)
    config = build_config(config_class("flux_train_network"), {"output_dir": str(folder), "output_name": "cat"})
    assert [str(p) for p in find_output_problems(config)] == [
        f"output_dir: there is no {folder.anchor} here; choose a folder on another disk"
    ]
    option = options_of(type(config))["output_dir"]
    assert f"there is no {folder.anchor} here" in str(typed_paths._unwritable(option, folder))
    assert str(cache._why_unusable(folder, torch.device("cuda"))) == f"there is no {folder.anchor} here"
    assert "disk" not in {finding.topic for finding in report._collect_findings(config, Check([], []), "", None)}
    found = disk.check_folders()  # which used to look for ever
    assert found.verdict == "bad" and "there is no" in str(found.text)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a signal that cannot be caught")
def test_a_killed_process_leaves_no_torn_file(tmp_path):
    code = (
        "import sys; from library.files import write_atomic\n"
        "i = 0\n"
        "while True:\n"
        "    i = (i + 1) % 10\n"
        "    write_atomic(sys.argv[1], str(i).encode() * 4_000_000)\n"
    )
    path = tmp_path / "a.bin"
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", code, str(path)])
        while not path.exists():
            time.sleep(0.01)
        time.sleep(0.2)
        process.kill()
        process.wait()
        content = path.read_bytes()
        assert len(content) == 4_000_000
        assert len(set(content)) == 1
