"""The summaries of runs: from small records, from records of older versions, and from damaged ones."""

import json

import pytest

from library.config.problems import ConfigError
from library.runs import layout, notes, overview, queue, registry, start
from library.runs.record import Record


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))


def make(tmp_path, name, **facts):
    folder = tmp_path / "out" / "runs" / name
    folder.mkdir(parents=True)
    layout.store(folder / "run.json", {"id": name, "state": "finished", "started": 100.0, **facts})
    registry.add_pointer(folder)
    return folder


def test_a_summary_follows_a_training_and_its_note(tmp_path):
    with Record.start({}, "flux_train_network", tmp_path, "cat", "FLUX.1 LoRA") as record:
        record.plan(100)
        record.event("sample", step=0, number=2, file="a.png", prompt="a secret")
        record.step({"step": 7, "loss": 0.5, "avr_loss": 0.4, "s_it": 1.5, "eta": 139.5})
        record.event("validation", step=7, loss=0.3)
        record.note(devices=["0"])
        (found,) = overview.overview()
        assert (found.name, found.family, found.kind, found.state) == ("cat", "FLUX.1", "lora", "running")
        assert (found.steps_done, found.steps_total, found.speed, found.loss) == (7, 100, 1.5, 0.4)
        assert found.held_out_loss == 0.3 and found.last_sample == overview.SampleKey(0, 2)
        assert found.reported and found.time_left(found.reported + 9.5) == pytest.approx(130)
    assert "a secret" not in (record.folder / layout.RUN).read_text()
    (found,) = overview.overview()
    assert found.state == "finished" and found.time_left(0) is None and found.note == ""
    notes.write_note(record.folder, " the <b>best</b> one\r\n")
    assert overview.overview()[0].note == "the <b>best</b> one"
    notes.write_note(record.folder, "")
    assert overview.overview()[0].note == "" and not (record.folder / notes.NOTE).exists()
    with pytest.raises(ConfigError):
        notes.write_note(record.folder, "x" * (notes.MAX_NOTE_LENGTH + 1))


def test_a_run_is_shown_by_its_first_prompt_after_the_newest_step(tmp_path):
    with Record.start({}, "flux_train_network", tmp_path, "cat", "FLUX.1 LoRA") as record:
        shown = []
        for step, number in [(0, 0), (0, 1), (50, 1), (50, 2), (100, 0), (100, 1), (100, 2)]:
            record.event("sample", step=step, number=number, file="a.png", prompt="a cat")
            record.note(phase=None)
            (summary,) = overview.overview()
            shown.append((summary.last_sample.step, summary.last_sample.number))
    assert shown == [(0, 0), (0, 0), (50, 1), (50, 1), (100, 0), (100, 0), (100, 0)]


def test_a_run_of_an_older_version_is_read_from_its_last_events(tmp_path):
    folder = make(tmp_path, "old", script="gone_script", step=3, total_steps=3)
    events = [{"kind": "validation", "loss": 0.2}, {"kind": "step", "step": 3, "loss": 0.25, "s_it": float("nan")}]
    (folder / layout.PROGRESS).write_text("".join(json.dumps(event) + "\n" for event in events))
    (found,) = overview.overview()
    assert (found.loss, found.held_out_loss, found.speed, found.family) == (0.25, 0.2, None, "")


def test_damaged_records_are_rows_that_say_so(tmp_path):
    (make(tmp_path, "torn") / "run.json").write_text('{"id": "torn"')
    make(tmp_path, "odd", latest={"s_it": "fast", "sample": 3, "avr_loss": True}, devices=[{}], preset=[1])
    odd, torn = sorted(overview.overview(), key=lambda found: found.id)
    assert torn.damaged and "torn" in str(torn.error) and torn.name == "torn"
    assert not odd.damaged and odd.speed is None and odd.loss is None and odd.preset == ""


def test_a_run_knows_the_preset_that_its_settings_started_from(tmp_path):
    queue.pause()
    job = start.TrainingJob("flux_train_network", "FLUX.1 LoRA", "cat", str(tmp_path), "", preset="flux/lora-16gb")
    assert queue.job_of_entry(queue.add_to_queue(job)).preset == "flux/lora-16gb"
    make(tmp_path, "cat", preset=job.preset)
    assert overview.overview()[0].preset == "flux/lora-16gb"
