"""No change can destroy an original: everything can be taken back, in any state of interruption."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from library.config.problems import ConfigError
from library.curation import trash
from library.curation.trash import Change, history, undo


def tree(root):
    """Every file outside of the trash with what is in it."""
    return {
        p.relative_to(root).as_posix(): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file() and ".trash" not in p.parts
    }


@pytest.fixture
def root(tmp_path):
    data = tmp_path / "data"
    (data / "10_cat").mkdir(parents=True)
    for i in range(4):
        (data / "10_cat" / f"{i}.png").write_bytes(bytes([i]) * 9)
        (data / "10_cat" / f"{i}.txt").write_text(f"cat, {i}")
    (data / "10_cat" / "odd.txt").write_bytes(b"caf\xe9\r\n")
    return data


def test_many_steps_are_taken_back_in_turn(root):
    start = tree(root)
    with Change(root, "words") as change:
        assert (
            change.write(
                {
                    root / "10_cat" / "0.txt": "dog",
                    root / "10_cat" / "new.txt": "x",
                    root / "10_cat" / "1.txt": "cat, 1",
                }
            )
            == 2
        )
    first_tree = tree(root)
    with Change(root, "gone") as change:
        change.remove([root / "10_cat" / "2.png", root / "10_cat" / "2.txt", root / "10_cat" / "odd.txt"])
    two = tree(root)
    with Change(root, "other name") as change:
        change.move([(root / "10_cat", root / "5_cat")])
    assert "10_cat/2.png" not in two and "5_cat/0.txt" in tree(root)
    assert [past.title for past in history(root)] == ["other name", "gone", "words"]
    for title, before in (("other name", two), ("gone", first_tree), ("words", start)):
        assert undo(root).title == title and tree(root) == before
    with pytest.raises(ConfigError, match="nothing to undo"):
        undo(root)
    assert history(root) == []


def test_what_was_altered_since_is_left_alone(root):
    with Change(root, "words") as change:
        change.write({root / "10_cat" / f"{i}.txt": "dog" for i in range(3)})
    (root / "10_cat" / "1.txt").write_text("by hand")
    done = undo(root)
    assert done.count == 2 and done.left == ("10_cat/1.txt",)
    assert (root / "10_cat" / "1.txt").read_text() == "by hand" and (root / "10_cat" / "0.txt").read_text() == "cat, 0"


def test_a_removed_image_does_not_come_back_over_a_new_one(root):
    with Change(root, "gone") as change:
        change.remove([root / "10_cat" / "2.png"])
    (root / "10_cat" / "2.png").write_bytes(b"new")
    assert undo(root).left == ("10_cat/2.png",)
    assert (root / "10_cat" / "2.png").read_bytes() == b"new"
    assert [p.read_bytes() for p in (root / ".trash").rglob("2.png")] == [bytes([2]) * 9]


def test_what_fails_half_way_is_taken_back(root, monkeypatch):
    start, real, calls = tree(root), os.rename, []

    def rename(old, new):
        calls.append(old)
        if len(calls) == 3:
            raise OSError(5, "the disk is tired")
        real(old, new)

    monkeypatch.setattr(trash.os, "rename", rename)
    with pytest.raises(OSError, match="tired"), Change(root, "half") as change:
        change.remove([root / "10_cat" / f"{i}.png" for i in range(4)])
    assert tree(root) == start and history(root) == []


@pytest.mark.parametrize("reached", [0, 1, 2, 3])
def test_a_killed_change_can_be_taken_back(root, reached):
    """As after kill -9: the journal is there, and some of what it says was done."""
    start = tree(root)
    change = Change(root, "killed")
    change.__enter__()
    names = [root / "10_cat" / f"{i}.txt" for i in range(3)]
    change._journal({"write": change._name(p), "before": p.read_text(), "after": "dog"} for p in names)
    for path in names[:reached]:
        path.write_text("dog")
    with open(change.folder / "journal.jsonl", "a") as file:
        file.write('{"write": "10_cat/3.t')  # torn
    about = json.loads((change.folder / "operation.json").read_text())
    with pytest.raises(ConfigError, match="still running"):
        undo(root)
    (change.folder / "operation.json").write_text(json.dumps({**about, "process_start": 1.0, "since_boot": 1.0}))
    assert undo(root).count == reached
    assert tree(root) == start


def test_copies_are_taken_back_without_being_destroyed(root, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.png").write_bytes(b"a")
    start = tree(root)
    with Change(root, "copied") as change:
        change.copy([(source / "a.png", root / "3_dog" / "a.png")])
    assert (root / "3_dog" / "a.png").read_bytes() == b"a"
    undo(root)
    assert tree(root) == start and not (root / "3_dog").exists() and (source / "a.png").exists()
    assert [p.read_bytes() for p in (root / ".trash").rglob("a.png")] == [b"a"]


def test_a_name_may_change_its_case_where_the_disk_ignores_that(root, monkeypatch):
    """On Windows and macOS the new name is there already: it is the file itself."""
    (root / "Cat.txt").write_text("x")
    there, taken = os.path.lexists, root / "cat.txt"
    monkeypatch.setattr(trash.os.path, "lexists", lambda path: there(path) or path == taken)
    monkeypatch.setattr(trash.os.path, "samefile", lambda first, second: True)
    with Change(root, "Renamed") as change:
        change.move([(root / "Cat.txt", taken)])
    assert taken.read_text() == "x"
    taken = root / "Cat.txt"
    undo(root, history(root)[0].id)
    assert (root / "Cat.txt").read_text() == "x"


def test_a_file_is_never_replaced_by_a_link_to_it_whose_name_differs_in_case(root):
    (root / "Cat.txt").write_text("x")
    (root / "cat.txt").symlink_to("Cat.txt")
    for old, new in (("cat.txt", "Cat.txt"), ("Cat.txt", "cat.txt")):
        with pytest.raises(ConfigError, match="is there already"), Change(root, "Renamed") as change:
            change.move([(root / old, root / new)])
    assert (root / "Cat.txt").read_text() == "x" and (root / "cat.txt").is_symlink()


def test_nothing_is_overwritten(root):
    start = tree(root)
    for old, new in (("0.png", "1.png"), ("gone.png", "x.png")):
        with pytest.raises(ConfigError), Change(root, "move") as change:
            change.move([(root / "10_cat" / old, root / "10_cat" / new)])
    with pytest.raises(ConfigError, match="the same name"), Change(root, "move") as change:
        change.move([(root / "10_cat" / "0.png", root / "x.png"), (root / "10_cat" / "1.png", root / "x.png")])
    with pytest.raises(ConfigError), Change(root, "copy") as change:
        change.copy([(root / "10_cat" / "0.png", root / "10_cat" / "1.png")])
    assert tree(root) == start


@pytest.mark.parametrize(
    "name",
    [
        "../../secret.txt",
        "/etc/passwd",
        "a/../secret.txt",
        "",
        ".",
        None,
        7,
        "link/secret.txt",
        ".trash/x/operation.json",
    ],
)
@pytest.mark.parametrize("kind", ["write", "move", "copy"])
def test_a_journal_from_elsewhere_leads_nowhere(root, kind, name):
    """A downloaded data set may bring a trash of its own."""
    secret = root.parent / "secret.txt"
    secret.write_text("mine")
    if os.name != "nt":
        (root / "link").symlink_to(root.parent)
    folder = root / ".trash" / "2026-01-01" / "000000-1-aa"
    folder.mkdir(parents=True)
    (folder / "operation.json").write_text(json.dumps({"title": "t", "when": 1.0, "state": "done", "count": 1}))
    line = {
        "write": {"write": name, "before": "theirs", "after": "mine"},
        "move": {"move": "x.txt", "to": name},
        "copy": {"copy": name},
    }[kind]
    (folder / "journal.jsonl").write_text(json.dumps(line) + "\n")
    start = tree(root)
    undo(root)
    assert secret.read_text() == "mine" and tree(root) == start


ODD = ("null", "true", "-1", "1e999", "NaN", "1" + "0" * 400, '""', '"\\u0000"', "[]", "{}", "[" * 3000 + "]" * 3000)
ODD_ABOUT = [
    {"title": '"t"', "when": "1.0", "state": '"done"', "count": "1", key: odd}
    for key in ("title", "when", "state", "count", "pid", "host", "boot", "process_start")
    for odd in ODD
]
ODD_STEPS = [
    {kind: odd, "to": odd, "before": odd, "after": odd, "sum": odd}
    for kind in ("write", "move", "copy", "x")
    for odd in ODD
]
ODD_STEPS += [{"write": '"10_cat/0.txt"', "before": odd, "after": '"cat, 0"'} for odd in ("true", "-1", "[]", "{}")]


@pytest.mark.parametrize(
    ("about", "step"), [*((about, {}) for about in ODD_ABOUT), *(({}, step) for step in ODD_STEPS)]
)
def test_a_data_set_with_a_strange_trash_opens_and_undoes_nothing_else(root, about, step):
    folder = root / ".trash" / "2026-01-01" / "000000-1-aa"
    folder.mkdir(parents=True)
    for file, values in (("operation.json", about or ODD_ABOUT[0] | {"title": '"t"'}), ("journal.jsonl", step)):
        line = ", ".join(f'"{key}": {value}' for key, value in values.items())
        (folder / file).write_text(f"{{{line}}}\n")
    start = tree(root)
    json.dumps([(past.title, past.when, past.state, past.count) for past in history(root)], allow_nan=False)
    with contextlib.suppress(ConfigError):
        trash.changed_texts(root, "2026-01-01/000000-1-aa")
        undo(root)
    assert tree(root) == start


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need rights on Windows")
def test_a_trash_that_is_a_link_is_refused(root):
    (root / ".trash").symlink_to(root.parent)
    with pytest.raises(ConfigError, match="is a link"), Change(root, "x") as change:
        change.write({root / "a.txt": "x"})


def test_no_change_outside_of_the_folder(root):
    for path in (root.parent / "x.txt", root / ".." / "x.txt", root / ".trash" / "x.txt"):
        with pytest.raises(ConfigError, match="not inside"), Change(root, "x") as change:
            change.write({path: "x"})
    assert not (root.parent / "x.txt").exists() and history(root) == []


METHODS = {
    "write": lambda change, here: change.write({here / "0.txt": "dog", here / "new.txt": "x"}),
    "move": lambda change, here: change.move([(here / "0.png", here / "deeper" / "0.png")]),
    "remove": lambda change, here: change.remove([here / "0.png"]),
    "put": lambda change, here: change.put({here / "0.png": b"x", here / "new.png": b"y"}),
    "copy": lambda change, here: change.copy([(here / "0.png", here / "copy.png")]),
}


@pytest.mark.parametrize("method", [name for name in vars(Change) if not name.startswith("_")])
@pytest.mark.parametrize("way", ["relative", "from inside", "link", "two ways"])
def test_a_folder_may_be_named_in_any_way(root, monkeypatch, method, way):
    start = tree(root)
    monkeypatch.chdir(root if way == "from inside" else root.parent)
    if way in ("link", "two ways"):
        (root.parent / "link").symlink_to(root, target_is_directory=True)
    opened = Path({"relative": "data", "from inside": "."}.get(way, root.parent / "link"))
    with Change(opened, method) as change:
        METHODS[method](change, (root if way == "two ways" else opened) / "10_cat")
    assert tree(root) != start and [past.title for past in history(opened)] == [method]
    assert undo(opened).left == () and tree(root) == start


KILLED = """
import sys, pathlib
from library.curation.trash import Change
root = pathlib.Path(sys.argv[1])
with Change(root, "many words") as change:
    print("ready", flush=True)
    change.write({path: path.read_text() + ", more" for path in sorted(root.glob("10_cat/*.txt"))})
    change.remove(sorted(root.glob("10_cat/*.png")))
    print("done", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("pause", [0.0, 0.01, 0.05])
def test_what_was_there_survives_a_kill_at_any_moment(tmp_path, pause):
    data = tmp_path / "data"
    (data / "10_cat").mkdir(parents=True)
    for i in range(300):
        (data / "10_cat" / f"{i}.png").write_bytes(b"x")
        (data / "10_cat" / f"{i}.txt").write_text(f"cat, {i}")
    start = tree(data)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", KILLED, str(data)], **pipes) as process:
        assert process.stdout.readline().strip() == b"ready"
        time.sleep(pause)
        process.kill()
    if history(data):
        undo(data)
    assert tree(data) == start
