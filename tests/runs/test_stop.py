"""What is lost by stopping a run, what is asked before, and when a run may be killed."""

import html
import os
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from kohya_gui.api.building import build_api
from kohya_gui.panel import actions
from kohya_gui.panel import html as panel
from library.config.problems import ConfigError
from library.runs import layout, process, reader, stop
from library.runs.record import Record

HOUR = 3600.0


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    with Record.start({}, "flux_train_network", tmp_path / "out", "m", "FLUX.1 LoRA") as started:
        yield started


def aged(record, seconds):
    """As if all that the run has said and was asked were so long ago."""
    import json

    path = record.folder / layout.PROGRESS
    events = [json.loads(line) for line in path.read_text().splitlines()]
    record._progress.close()
    path.write_text("".join(json.dumps({**event, "t": event["t"] - seconds}) + "\n" for event in events))
    record._progress = path.open("a", encoding="utf-8", buffering=1)
    record.note(started=record.facts["started"] - seconds)
    if (record.folder / layout.STOP).exists():
        os.utime(record.folder / layout.STOP, (time.time() - seconds,) * 2)
    reader.progress.cache_clear()
    return reader.run_at(record.folder)


@pytest.fixture(scope="module")
def page():
    return TestClient(build_api([]))


@pytest.fixture
def press(record, page):
    """Stop the run as its buttons do: what the answer says, or the question."""

    def stop_it(how, **more):
        answer = page.post(f"/api/v1/runs/{record.id}/stop", json={"how": how, **more})
        assert (answer.status_code == 409) == ("error" in answer.json())
        return answer.json().get("error") or answer.json()["said"]

    return stop_it


def state(record, step):
    folder = Path(record.facts["output_dir"]) / f"m-step{step:08d}-state"
    folder.mkdir(parents=True)
    (folder / "train_state.json").write_text(f'{{"current_step": {step}}}')
    record.event("saved", file=str(folder), step=step)


def test_an_hour_of_loading_and_caching_is_asked_about(record, press):
    record.phase("caching latents", 3, 12)
    run = aged(record, HOUR)
    assert stop.lost_now(run)[0] == "start" and stop.lost_now(run)[1] == pytest.approx(HOUR, rel=0.01)
    assert "60 min of loading" in press("now") and not layout.stop_asked(record.folder)
    press("after_step")
    press("now", sure=True)
    assert layout.stop_asked(record.folder) == "now"


@pytest.mark.parametrize("how", ["after_step", "now", "sample", "save"])
def test_before_the_first_step_nothing_is_said_to_be_learned_or_finished(record, page, press, how):
    def answer():
        if how in layout.STOPS:
            return press(how)
        return page.post(f"/api/v1/runs/{record.id}/{how}", json={}).json()["said"]

    record.phase("caching latents", 3, 12)
    said = answer()
    assert "learned" not in said and "this step" not in said
    run = reader.run_at(record.folder)
    if how in layout.STOPS:
        assert "Caches on disk stay" in said or "caches on disk stay" in said
        shown = panel.run_head_html(run, reader.progress(run.folder).update(), time.time())
        assert said in html.unescape(actions.buttons(run, [run])) and "saves" not in shown and "this step" not in shown
    record.step({"step": 1, "loss": 0.1})
    assert answer() == stop.ANSWERS[how]


def test_a_kill_before_the_first_step_loses_nothing_learned(record, press):
    record.phase("caching latents", 3, 12)
    stop.request(record.id, "now")
    aged(record, stop.HANG_TIMEOUT + 5)
    assert press("kill").startswith("No step is done yet, so nothing that it has learned is lost")


def test_a_step_that_is_finished_anyway_is_not_asked_about(record, press):
    record.step({"step": 5, "loss": 0.1, "s_it": 200.0})
    assert stop.lost_now(aged(record, HOUR)) == ("", 0.0)
    assert press("now") == stop.ANSWERS["now"]


def test_batches_that_are_dropped_and_samples_are_asked_about(record, press):
    record.note(config={"steps": {"gradient_accumulation_steps": 64}}, hardware={"processes": 1})
    record.step({"step": 5, "loss": 0.1})
    assert stop.lost_now(reader.run_at(record.folder))[0] == "step"
    assert press("after_step") == stop.ANSWERS["after_step"]
    aged(record, 600)
    assert press("now").startswith("10 min of work on this step are lost; what was learned before is saved")
    record.phase("generating samples", 1, 12)
    aged(record, 0)
    assert "samples or validation are lost" in press("now")
    record.phase("saving the state")
    aged(record, 0)
    assert press("now") == stop.ANSWERS["now"]  # a save is waited for


def test_less_is_not_asked_for_after_more(record):
    stop.request(record.id, "now")
    stop.request(record.id, "after_step")
    assert layout.stop_asked(record.folder) == "now" and record.stop_requested() == "now"


def test_a_kill_is_for_what_hangs_and_says_what_is_lost(record, press, monkeypatch):
    killed = []
    monkeypatch.setattr(process, "kill", lambda roots: killed.append(roots) or True)
    record.step({"step": 7, "loss": 0.1})
    aged(record, HOUR)
    run = reader.run_at(record.folder)
    assert not stop.hangs(run) and "Kill" not in actions.buttons(run, [run])
    assert "let it save and stop" in press("kill", sure=True)
    stop.request(record.id, "now")
    assert not stop.hangs(reader.run_at(record.folder))
    run = aged(record, stop.HANG_TIMEOUT + 5)
    assert stop.hangs(run) and ">Kill<" in actions.buttons(run, [run]) and "Stop now" not in actions.buttons(run, [run])
    assert "No state was saved: all that was learned in 62 min is lost" in press("kill")
    state(record, 4)
    run = aged(record, stop.HANG_TIMEOUT + 5)
    assert "after step 4 is lost, 2 min of work" in press("kill") and killed == []
    assert press("kill", sure=True) == "It was killed." and len(killed) == 1
    assert reader.run_at(record.folder).state == "stopped"


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_is_being_written_is_a_sign_of_work(record, is_folder):
    stop.request(record.id, "now")
    run = aged(record, HOUR)
    assert stop.hangs(run)
    output = Path(record.facts["output_dir"])
    half = output / f".m-state.{os.getpid()}-0123456789ab.tmp"
    if is_folder:
        half.mkdir()
        (half / "model.safetensors").write_bytes(b"x")
        os.utime(half, (time.time() - HOUR,) * 2)
    else:
        half = half.with_suffix(".tmp.safetensors")
        half.write_bytes(b"x")
    assert not stop.hangs(run)


def test_long_steps_have_more_time(record):
    record.step({"step": 7, "loss": 0.1, "s_it": 32.0})
    stop.request(record.id, "now")
    assert not stop.hangs(aged(record, 600)) and stop.hangs(aged(record, 700))


def test_a_run_elsewhere_cannot_be_killed_from_here(record):
    record.note(host="another")
    with pytest.raises(ConfigError, match="another computer"):
        stop.request(record.id, "kill")
    stop.request(record.id, "now")
    assert layout.stop_asked(record.folder) == "now"
