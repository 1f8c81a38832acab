"""Reading runs: incremental, tolerant of half-written files, and never fooled by ids from a browser."""

import json
import time

import pytest

from library.runs import explain, layout, lineage, notes, overview, process, reader, registry, stop
from tests import links


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))


def make(tmp_path, name="cat-1", **facts):
    folder = tmp_path / "out" / "runs" / name
    folder.mkdir(parents=True)
    layout.store(folder / "run.json", {"id": name, "state": "running", "started": time.time(), **facts})
    registry.add_pointer(folder)
    return folder


def write(folder, *events):
    with (folder / "progress.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def events_since(folder, at=0):
    *events, (_, end) = reader.new_events(folder, at)
    return [event for event, _ in events], end


def test_events_go_on_where_the_last_look_stopped(tmp_path):
    folder = make(tmp_path)
    write(folder, {"kind": "step", "step": 1}, {"kind": "step", "step": 2})
    events, at = events_since(registry.folder_of_run("cat-1"))
    assert [event["step"] for event in events] == [1, 2]
    assert reader.read_events(registry.folder_of_run("cat-1")) == events
    with (folder / "progress.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    assert events_since(registry.folder_of_run("cat-1"), at) == ([], at)
    with (folder / "progress.jsonl").open("a") as file:
        file.write('ep": 3}\nnot json\n')
    events, at = events_since(registry.folder_of_run("cat-1"), at)
    assert [event["step"] for event in events] == [3]
    assert events_since(registry.folder_of_run("cat-1"), at) == ([], at)


def test_progress_folds_events_into_what_a_panel_shows(tmp_path):
    folder = make(tmp_path)
    progress = reader.RunProgress(folder)
    write(folder, {"kind": "phase", "name": "caching latents", "done": 3, "total": 12})
    assert progress.update().phase["done"] == 3
    write(folder, *({"kind": "step", "step": n, "loss": 1.0} for n in range(1, 6)), {"kind": "saved", "path": "a"})
    progress.update()
    assert progress.phase is None and progress.last["step"] == 5 and len(progress.events["saved"]) == 1
    assert [point[0] for point in progress.curve] == [1, 2, 3, 4, 5]
    assert progress.curve[-1][2] == pytest.approx(1.0)  # the mean of equal losses is that loss, from the start


def test_a_long_curve_is_thinned_but_spans_the_run(tmp_path):
    folder = make(tmp_path)
    write(folder, *({"kind": "step", "step": n, "loss": 0.1} for n in range(1, 20001)))
    line = reader.RunProgress(folder).update().curve
    assert len(line) <= reader.POINTS and line[0][0] == 1 and line[-1][0] > 19900


def steps(first, last, rate=1e-4):
    return ({"kind": "step", "step": n, "loss": 1 / n, "lr": {"unet": rate}} for n in range(first, last + 1))


def state(tmp_path, step):
    folder = tmp_path / "out" / f"cat-step{step:08d}-state"
    folder.mkdir(parents=True)
    (folder / "train_state.json").write_text(json.dumps({"current_step": step}))
    return str(folder)


def test_a_resumed_run_goes_on_with_the_curve_of_the_one_before(tmp_path):
    """From a state that is older than the end, told by the page or by the state alone, again and again."""
    out = {"output_dir": str(tmp_path / "out"), "output_name": "cat", "state": "stopped"}
    first = make(tmp_path, "cat-1", started=1.0, step=60, **out)
    write(first, *steps(1, 60))
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    at = state(tmp_path, 50)
    second = make(tmp_path, "cat-2", started=2.0, step=80, resumes="cat-1", config={"steps": {"resume": at}}, **out)
    loading = reader.progress(second).update()
    assert [p[0] for p in loading.curve] == list(range(1, 51)) and loading.line.resumed == [50] and not loading.last
    write(second, *steps(51, 80, 5e-5))
    progress = reader.progress(second).update()
    assert [p[0] for p in progress.curve] == list(range(1, 81)) and progress.line.resumed == [50]
    assert [row[1]["unet"] for row in progress.line.rates] == [1e-4] * 50 + [5e-5] * 30
    smooth = [p[2] for p in progress.curve]
    assert all(0 < a - b < 0.2 for a, b in zip(smooth[5:], smooth[6:], strict=False))  # no jump where it continues
    third = make(tmp_path, "cat-3", started=3.0, config={"steps": {"resume": state(tmp_path, 70)}}, **out)
    write(third, *steps(71, 75))  # started in a shell, so that only the state tells whose it is
    again = reader.progress(third).update()
    assert [p[0] for p in again.curve] == list(range(1, 76)) and again.line.resumed == [50, 70]
    anew = make(tmp_path, "cat-4", started=4.0, resumes="cat-3", config={}, **out)
    write(anew, *steps(1, 3))  # nothing had been saved, so it began at the beginning
    assert [p[0] for p in reader.progress(anew).update().curve] == [1, 2, 3]
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before


def test_a_long_curve_stays_thin_when_it_is_gone_on_with(tmp_path):
    first = make(tmp_path, "cat-1", started=1.0, state="stopped")
    write(first, *steps(1, 4000))
    second = make(tmp_path, "cat-2", started=2.0, resumes="cat-1", folder=str(tmp_path))
    (second / "run.toml").write_text('[steps]\nresume = "gone-state"\n')
    write(second, *steps(3001, 6000))
    line = reader.progress(second).update().line
    assert len(line.points) <= reader.POINTS and line.points[-1][0] > 5990 and line.resumed == [3000]
    assert [p[0] for p in line.points] == sorted({p[0] for p in line.points}) and len(line.rates) == len(line.points)
    layout.store(first / "run.json", {"id": "cat-1", "state": "stopped", "started": 9.0})  # no older one: no circle
    assert lineage.parent_run(second) is None


@pytest.mark.parametrize("run_id", ["../cat-1", "..", "", "a/b", "a\\b", "x\0y", None, 7, ["cat-1"], "C:\\x", "nope"])
def test_ids_from_outside_cannot_lead_anywhere(run_id, tmp_path):
    make(tmp_path)
    with pytest.raises(KeyError):
        reader.find_run(run_id)
    with pytest.raises(KeyError):
        stop.request(run_id, "now")


def test_a_living_process_is_a_running_run(tmp_path):
    make(tmp_path, **process.identity())
    assert reader.active().id == "cat-1"


def test_a_launcher_that_died_before_the_trainer_spoke_is_a_failure_with_its_cause(tmp_path):
    folder = make(tmp_path, state="starting")
    layout.store(folder / "launcher.json", {**process.identity(), "process_start": 1.0, "since_boot": 1.0})
    (folder / "log.txt").write_text("Traceback\nModuleNotFoundError: No module named 'peft'\n")
    run = reader.find_run("cat-1")
    assert run.state == "failed" and "peft" in str(run.error) and "set-up" in str(run.error)


def test_a_run_elsewhere_lives_by_its_heartbeat(tmp_path):
    far = {**process.identity(), "host": "another"}
    make(tmp_path, "here-1", **far, heartbeat=time.time())
    make(tmp_path, "gone-1", **far, heartbeat=time.time() - 600)
    assert reader.find_run("here-1").state == "running" and reader.find_run("gone-1").state == "interrupted"


def test_a_torn_run_file_is_not_a_running_run(tmp_path):
    folder = make(tmp_path)
    (folder / "run.json").write_text('{"state": "runn')
    assert not reader.find_run("cat-1").active


def test_a_removed_folder_disappears_from_the_list(tmp_path):
    folder = make(tmp_path)
    (folder / "run.json").unlink()
    folder.rmdir()
    assert reader.runs() == []


def test_the_tail_reads_only_the_end_and_the_last_state_of_a_bar(tmp_path):
    folder = make(tmp_path)
    (folder / "log.txt").write_text("x" * 200_000 + "\n10%\r50%\r100%\nend", encoding="utf-8")
    assert reader.tail(folder, lines=2) == "100%\nend"
    assert len(reader.tail(folder)) < 70_000


@pytest.mark.parametrize(("written", "is_whole"), [(199, True), (200, False), (1, True), (0, True)])
def test_an_end_of_a_log_knows_whether_lines_are_missing(tmp_path, written, is_whole):
    folder = make(tmp_path)
    (folder / "log.txt").write_text("line\n" * written, encoding="utf-8")
    assert (reader.log_end(folder).longer_file == "") == is_whole
    assert (reader.log_end(folder, size=100).longer_file == "") == (written < 20)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "ran out of memory"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'a b.toml'", "a b.toml does not exist"),
        ("x.py: error: \nlearning_rate: expected float, got 'abc'\n\nTraceback", "learning_rate: expected float"),
        ("library.config.problems.ConfigError: output_dir: gone\nae: gone\n\nother", "output_dir: gone\nae: gone"),
        ("RuntimeError: odd\nsubprocess.CalledProcessError: Command died", "RuntimeError: odd"),
    ],
)
def test_a_log_shows_the_cause_of_a_failure(log, words):
    assert words in str(explain.cause(log))


def test_no_cause_is_invented():
    assert explain.cause("step 1\nstep 2\nall is well") is None


@pytest.mark.parametrize("name", [layout.LOG, layout.PROGRESS, notes.NOTE, layout.STOP])
def test_file_of_a_run_that_is_a_link_is_not_read(tmp_path, name):
    folder = make(tmp_path)
    (tmp_path / "private").write_text(json.dumps({"kind": "step", "step": 7}) + "\n")
    with links.skip_without():
        (folder / name).symlink_to(tmp_path / "private")
    assert reader.tail(folder) == "" and notes.read_note(folder) == ""
    assert reader.read_events(folder) == []
    assert overview._latest_events(str(folder / layout.PROGRESS), (1, 1000, 1)) == {}
    assert layout.stop_asked(folder) in ("", "after_step")
