"""Which files a run may show, export and delete, when its record names whatever it likes."""

import json

import pytest

from library.files import STATE_FACTS
from library.runs import deleting, layout
from library.runs.reader import RecordedRun
from library.runs.written_files import sample_file, written_file

GOOD = ("cat.safetensors", "cat.ckpt", "embedding.pt", "sample/cat_1.png", "sample/cat.WEBP", "state", "folder")
BAD = (
    *("", ".", "..", "runs", "runs/cat-1", "runs/cat-1/run.json", "../secret.safetensors", "/etc/passwd", "notes.txt"),
    *("photos", "photos/../../secret.safetensors", "gone.png", "a\0b.png", "x" * 5000 + ".png", 7, None, ["cat.ckpt"]),
)


@pytest.fixture
def run(tmp_path):
    home = tmp_path / "results"
    for name in ("cat.safetensors", "cat.ckpt", "embedding.pt", "sample/cat_1.png", "sample/cat.WEBP", "notes.txt"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(b"of the run")
    for folder, member in (("state", STATE_FACTS), ("folder", "model_index.json"), ("photos", "holiday.jpg")):
        (home / folder).mkdir()
        (home / folder / member).write_text("{}")
    (tmp_path / "secret.safetensors").write_bytes(b"of somebody else")
    folder = home / "runs" / "cat-1"
    folder.mkdir(parents=True)
    facts = {"id": "cat-1", "state": "finished", "folder": str(home), "output_dir": str(home)}
    (folder / layout.RUN).write_text(json.dumps(facts))
    return RecordedRun(folder, facts)


def test_files_of_a_training_are_those_of_its_kinds_below_its_output_folder(run):
    for name in GOOD:
        assert written_file(run, {"file": name}) == (run.folder.parent.parent / name).resolve(), name
    for name in BAD:
        assert written_file(run, {"file": name}) is None, name
    assert sample_file(run, {"file": "sample/cat_1.png"}) and not sample_file(run, {"file": "cat.ckpt"})
    assert not sample_file(run, {"file": "state"})


def test_a_record_cannot_have_other_files_deleted(run):
    events = [{"kind": kind, "file": name} for kind in deleting.KINDS for name in (*GOOD, *BAD)]
    (run.folder / layout.PROGRESS).write_text("".join(json.dumps(event) + "\n" for event in events))
    deletion = deleting.plan_deletion(run, with_files=True)
    said = str(deletion.sentence())
    assert f"the record of {run.name}, started " in said and str(run.folder) in said
    deleting.delete_run(deletion)
    home = run.folder.parent.parent
    assert not run.folder.exists() and not any((home / name).exists() for name in GOOD)
    assert (home / "notes.txt").exists() and (home / "photos" / "holiday.jpg").exists()
    assert (home.parent / "secret.safetensors").exists()
