"""The queue: order, devices, failures, two workers at once, and what survives when processes or the computer end."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from library.config.formats import toml_value
from library.config.problems import ConfigError
from library.runs import (
    forecast,
    gpu_slots,
    keys,
    layout,
    locking,
    process,
    queue,
    queue_rows,
    reader,
    resume,
    start,
    stop,
    worker,
)
from library.runs.record import Record

ROOT = Path(__file__).resolve().parents[2]

# A worker whose trainings pretend: each writes its record, for as many seconds as its TOML says, or until a file is
# there that another makes, and may fail.
WORKER = """
import sys
from library.runs import start, worker
start.launch_command = lambda path, script, **how: ([sys.executable, "-c", {child!r}, str(path)], dict())
worker.PERIOD = 0.1
sys.exit(worker.main())
"""
CHILD = """
import os, sys, time, tomllib
from library.runs.record import Record
toml = tomllib.load(open(sys.argv[1], "rb"))
with Record.start({}, "flux_train_network", toml["output_dir"], toml["output_name"]) as record:
    record.note(seen=os.environ.get("CUDA_VISIBLE_DEVICES"), token=os.environ.get("HF_TOKEN"))
    if toml.get("makes"):
        open(toml["makes"], "w").close()
    for _ in range(2400):
        if os.path.exists(toml.get("waits_for", ".")):
            break
        time.sleep(0.05)
    for step in range(1, int(toml.get("seconds", 0) * 20) + 2):
        record.step({"step": step, "loss": 0.1})
        if toml.get("fails"):
            raise RuntimeError("CUDA out of memory")
        if record.stop_requested():
            break
        time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(queue, "RUNNER", [sys.executable, "-c", WORKER.format(child=textwrap.dedent(CHILD))])
    yield tmp_path / "home"
    for entry in queue.read_queue().entries:
        if entry.waits:
            queue.remove_entry(entry.id)
    for run in reader.runs():
        stop.request(run.id, "kill")
    until(lambda: not queue.read_queue().worker)


def job(tmp_path, name, how=None, secrets=None, **toml):
    values = {"output_dir": str(tmp_path / "out"), "output_name": name, **toml}
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    return start.TrainingJob(
        "flux_train_network", "FLUX.1 LoRA", name, str(tmp_path / "out"), text, how or {}, secrets or {}
    )


def until(true, seconds=300.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, queue.read_queue()
        time.sleep(0.05)


def states():
    return [queue.state_of(entry)[0] for entry in queue.read_queue().entries]


def runs_of(*names):
    runs = {run.facts["output_name"]: run for run in reader.runs()}
    return [runs[name] for name in names]


def test_three_of_which_the_second_fails(tmp_path):
    keys.store_keys({"huggingface_token": "canary-token"})
    for name, more in (("one", {}), ("two", {"fails": True}), ("three", {})):
        queue.add_to_queue(job(tmp_path, name, secrets={"HF_TOKEN": "canary-of-the-form"}, **more))
    until(lambda: not queue.read_queue().worker and not queue.read_queue().waiting)
    assert states() == ["finished", "failed", "finished"]
    first, two, three = runs_of("one", "two", "three")
    assert first.facts["ended"] <= two.facts["started"] and two.facts["ended"] <= three.facts["started"]
    assert first.facts["token"] == "canary-token" and first.facts["devices"] == ["cpu"]
    for file in tmp_path.rglob("*"):  # handed over by the environment, and kept in no other file
        assert not file.is_file() or file.name in ("run.json", "keys.json") or b"canary" not in file.read_bytes(), file
    queue.clear()
    assert queue.read_queue().entries == [] and list(queue.queue_folder().glob("*.toml")) == []


def test_after_a_failure_it_waits_where_that_is_wanted_and_goes_on_when_told(tmp_path):
    queue.after_failure(False)
    queue.add_to_queue(job(tmp_path, "one", fails=True))
    queue.add_to_queue(job(tmp_path, "two"))
    until(lambda: queue.read_queue().paused)
    assert str(queue.read_queue().paused) == "one has failed." and states() == ["failed", "waiting"]
    queue.go_on()
    until(lambda: states() == ["failed", "finished"])


def test_a_training_that_fails_while_the_worker_looks_starts_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "work", lambda: None)
    monkeypatch.setattr(start, "begin_job", lambda job: pytest.fail(f"{job.name} was started"))
    queue.after_failure(False)
    first = queue.add_to_queue(job(tmp_path, "one"))
    queue.add_to_queue(job(tmp_path, "two"))
    record = Record.start({}, "flux_train_network", str(tmp_path / "out"), "one")
    with queue.changing() as entries:
        entries.find(first.id).run = record.id
    note = worker.record_end

    def noted(found, entry):
        note(found, entry)
        if entry.id == first.id:
            with contextlib.suppress(RuntimeError), record:
                raise RuntimeError

    monkeypatch.setattr(worker, "record_end", noted)
    assert worker.advance() and states() == ["failed", "waiting"]
    monkeypatch.setattr(worker, "record_end", note)
    assert not worker.advance() and queue.read_queue().paused


def test_after_the_computer_was_started_anew_the_queue_waits(tmp_path, home):
    queue.add_to_queue(job(tmp_path, "one", seconds=60))
    until(lambda: states() == ["running"])
    entry = queue.add_to_queue(job(tmp_path, "two"))
    (run,) = runs_of("one")
    ended = [psutil.Process(pid) for pid in (queue.read_queue().worker["pid"], run.facts["pid"])]
    for killed in ended:  # a power cut
        killed.kill()
    psutil.wait_procs(ended, timeout=60)
    until(lambda: states() == ["interrupted", "waiting"])
    entries = queue.read_queue()
    assert entries.halted and not entries.is_worked
    queue.add_to_queue(job(tmp_path, "three"))  # adding does not set off what waited before
    time.sleep(0.3)
    assert states() == ["interrupted", "waiting", "waiting"] and queue.read_queue().halted
    queue.go_on()
    until(lambda: states() == ["interrupted", "finished", "finished"])
    assert queue.read_queue().find(entry.id).ended == "finished"


def test_a_training_goes_on_without_its_worker_and_is_found_by_the_next(tmp_path):
    queue.add_to_queue(job(tmp_path, "one", waits_for=str(tmp_path / "seen")))
    until(lambda: states() == ["running"])
    queue.add_to_queue(job(tmp_path, "two"))
    psutil.Process(queue.read_queue().worker["pid"]).kill()
    until(lambda: queue.read_queue().halted)
    assert states() == ["running", "waiting"]
    queue.go_on()
    until(lambda: queue.read_queue().worker)
    assert states() == ["running", "waiting"]  # one device
    (tmp_path / "seen").touch()
    until(lambda: states() == ["finished", "finished"])


def test_of_many_workers_one_works(tmp_path):
    queue.add_to_queue(job(tmp_path, "one", seconds=1))
    for _ in range(4):
        start.detached(queue.RUNNER, tmp_path / "worker.txt", os.environ, str(ROOT))
    queue.add_to_queue(job(tmp_path, "two"))
    until(lambda: states() == ["finished", "finished"])
    assert len(reader.runs()) == 2  # neither was started twice


def test_browsers_that_change_it_at_once_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "work", lambda: None)

    def browser(number):
        for i in range(5):
            entry = queue.add_to_queue(job(tmp_path, f"{number}-{i}"))
            queue.move(entry.id, -1)
            if i == 4:
                queue.remove_entry(entry.id)

    threads = [threading.Thread(target=browser, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = [entry.name for entry in queue.read_queue().entries]
    assert sorted(left) == sorted(f"{n}-{i}" for n in range(4) for i in range(4))


def test_order_names_and_entries_that_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "work", lambda: None)
    first, two, three = (queue.add_to_queue(job(tmp_path, name)) for name in ("one", "two", "three"))
    queue.move(three.id, -1)
    queue.move(first.id, -1)
    queue.move(two.id, 1)
    assert [entry.name for entry in queue.read_queue().entries] == ["one", "three", "two"]
    assert [
        entry.name for entry in [queue.add_to_queue(job(tmp_path, "zero"), first=True), queue.read_queue().entries[0]]
    ] == [
        "zero",
        "zero",
    ]
    with pytest.raises(ConfigError, match="choose another name"):
        queue.add_to_queue(job(tmp_path, "two"))
    queue.remove_entry(two.id)
    for act in (lambda: queue.remove_entry(two.id), lambda: queue.move(two.id, 1), lambda: queue.move("../x", 1)):
        with pytest.raises(ConfigError, match="not in the queue any more"):
            act()


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"entries": [7, {"id": "../x"}, {}], "worker": 3, "paused": null}']
)
def test_a_broken_file_is_an_empty_queue(tmp_path, content):
    queue.queue_folder().mkdir(parents=True)
    (queue.queue_folder() / "queue.json").write_text(content)
    assert queue.read_queue() == queue.Queue()


@pytest.mark.parametrize(
    "change",
    [
        {"script": None},
        {"name": 5},
        {"output": ["a"]},
        {"how": "x"},
        {"added": "soon"},
        {"added": float("nan")},
        {"steps": {}},
        {"was_at": "last"},
        {"run": 3},
        {"error": [1]},
    ],
)
def test_an_entry_that_somebody_broke_is_left_out_and_the_others_stay(tmp_path, change):
    good, other = (queue.add_to_queue(job(tmp_path, name)) for name in ("one", "two"))
    path = queue.queue_folder() / "queue.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    stored["entries"][1] = {n: v for n, v in (stored["entries"][1] | change).items() if v is not None}
    stored |= {"called": "x", "paused": 7, "removed": 1}
    path.write_text(json.dumps(stored), encoding="utf-8")
    assert [entry.id for entry in queue.read_queue().entries] == [good.id]
    assert [row.id for row in queue_rows.queue_rows(queue.read_queue())] == [good.id]


def test_each_gpu_is_one_device(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")
    assert gpu_slots.devices() == ("0", "1", "3")
    (tmp_path / "run.json").write_text('{"lanes": ["1"]}', encoding="utf-8")  # as an older version wrote it
    busy = [layout.load_facts(tmp_path / "run.json")]
    assert (
        gpu_slots.free_devices(busy) == ("0", "3", "cpu") and gpu_slots.free_devices([{}]) == ()
    )  # one from a shell may use them all
    free = gpu_slots.free_devices(busy)
    assert gpu_slots.choose_devices({}, free) == ("0",) and gpu_slots.choose_devices({"cpu": True}, free) == ("cpu",)
    assert gpu_slots.choose_devices({"cpu": "false", "gpu_ids": ""}, free) == ("0",)  # as a text by HTTP
    assert gpu_slots.choose_devices({"gpu_ids": "1"}, free) == () and gpu_slots.choose_devices(
        {"gpu_ids": "3, 0"}, free
    ) == ("3", "0")
    assert (
        gpu_slots.choose_devices({"num_processes": 2}, free) == ("0", "3")
        and gpu_slots.choose_devices({"gpu_ids": "all"}, free) == ()
    )
    with pytest.raises(ConfigError, match="no GPU 7 here"):
        gpu_slots.choose_devices({"gpu_ids": "7"}, free)
    assert (
        gpu_slots.device_environment(("0", "3"))["CUDA_VISIBLE_DEVICES"] == "0,3"
        and gpu_slots.device_environment(("cpu",)) == {}
    )
    assert gpu_slots.options_for_devices({"num_processes": 2}, ("0", "3"))["main_process_port"] == 0


def test_two_devices_work_at_once_and_who_waits_for_certain_gpus_keeps_them(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    queue.pause()
    met = [str(tmp_path / name) for name in ("two is there", "three is there")]
    for name, how, more in (
        ("one", {"gpu_ids": "1"}, {}),
        ("both", {"gpu_ids": "0,1"}, {}),
        ("two", {}, {"makes": met[0], "waits_for": met[1]}),
        ("three", {"gpu_ids": "1"}, {"makes": met[1], "waits_for": met[0]}),
    ):
        queue.add_to_queue(job(tmp_path, name, how, **more))
    queue.go_on()
    until(lambda: states().count("finished") == 4)
    first, both, two, three = runs_of("one", "both", "two", "three")
    assert [run.facts["seen"] for run in (first, both, three)] == ["1", "0,1", "1"]
    assert both.facts["started"] >= first.facts["ended"] and three.facts["started"] >= both.facts["ended"]
    assert two.facts["started"] >= both.facts["ended"] and two.facts["started"] < three.facts["ended"]
    assert {two.facts["seen"], three.facts["seen"]} == {"0", "1"}


def test_what_cannot_begin_has_failed_with_its_sentence(tmp_path):
    (tmp_path / "out").write_text("a file in the way")
    entry = queue.add_to_queue(job(tmp_path, "one"))
    until(lambda: states() == ["failed"])
    assert "output_dir" in str(queue.state_of(queue.read_queue().find(entry.id))[1])


def test_two_that_write_the_same_files_do_not_run_together(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    folder = tmp_path / "out" / "runs" / "one-1"
    facts = {"state": "running", **process.identity(), "devices": ["0"], "output_dir": str(tmp_path / "out")}
    layout.store(folder / "run.json", {**facts, "output_name": "one"})
    from library.runs import registry

    registry.add_pointer(folder)
    with pytest.raises(ConfigError, match="choose another name"):
        start.begin_job(job(tmp_path, "one"))
    (folder / "run.json").unlink()


def test_a_lock_is_one_process_only_and_ends_with_it(tmp_path):
    code = "import sys, time\nfrom library.runs import locking\nfrom pathlib import Path\n"
    code += "with locking.hold_lock(Path(sys.argv[1]), 0) as mine:\n    print(mine, flush=True)\n    time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "a.lock")], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline().strip() == "True"
    with locking.hold_lock(tmp_path / "a.lock", 0.1) as mine:
        assert not mine
    other.kill()
    other.wait()
    with locking.hold_lock(tmp_path / "a.lock", 5) as mine:
        assert mine
    assert worker.PERIOD < 1


def test_an_entry_keeps_its_own_files_and_copies_get_names_of_their_own(tmp_path):
    queue.pause()
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a fox", encoding="utf-8")
    first = queue.add_to_queue(job(tmp_path, "fox", sample_prompts=str(prompts)))
    prompts.write_text("a dog", encoding="utf-8")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "fox-2-step00000100.safetensors").touch()
    copy = queue.duplicate(first.id)
    again = queue.duplicate(first.id)
    assert [copy.name, again.name] == ["fox-3", "fox-4"] and 'output_name = "fox-3"' in queue.job_of_entry(copy).toml
    assert [entry.name for entry in queue.read_queue().waiting] == ["fox", "fox-4", "fox-3"]
    queue.remove_entry(first.id)
    queue.remove_entry(again.id)
    assert queue.restore(first.id).name == "fox" and queue.read_queue().waiting[0].id == first.id
    with pytest.raises(ConfigError, match="not in the queue any more"):
        queue.restore(copy.id)
    queue.go_on()
    until(lambda: states() == ["finished", "finished"])
    for run in runs_of("fox", "fox-3"):
        own = run.folder / "sample_prompts.txt"
        assert own.read_text(encoding="utf-8") == "a fox" and toml_value(str(own)) in resume.run_toml(run)
    queue.clear()
    assert [path.name for path in queue.queue_folder().iterdir() if path.is_dir()] == [again.id]  # can be restored


def test_rows_say_when_entries_start_on_which_gpu_and_what_differs(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(queue, "work", lambda: None)
    monkeypatch.setattr(forecast, "now", lambda: 1000.0)
    minute = queue.Estimate(60, 1.0, 12.5)
    for name, how, estimate, more in (
        ("one", {}, minute, {"seed": 1}),
        ("two", {"gpu_ids": "0"}, minute, {"seed": 2, "network_dim": 4}),
        ("both", {"num_processes": 2}, minute, {}),
        ("unknown", {}, None, {}),
        ("last", {"gpu_ids": "1"}, minute, {}),
    ):
        queue.add_to_queue(job(tmp_path, name, how, **more), estimate=estimate)
    with queue.changing() as waiting:
        waiting.worker = process.identity()
    rows = {row.name: row for row in queue_rows.queue_rows(queue.read_queue())}
    assert {name: (row.start, row.end, row.gpus) for name, row in rows.items()} == {
        "one": (1000.0, 1060.0, ("0",)),
        "two": (1060.0, 1120.0, ("0",)),
        "both": (1120.0, 1180.0, ("0", "1")),
        "unknown": (1180.0, None, ("0",)),
        "last": (1180.0, 1240.0, ("1",)),
    }
    assert rows["one"].memory == 12.5 and rows["unknown"].memory is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # without a GPU there is no memory of it to speak of
    assert {row.memory for row in queue_rows.queue_rows(queue.read_queue())} == {None}
    two = rows["two"]
    assert (two.total_steps, two.memory, two.names_gpus, two.compared_with) == (60, 12.5, True, "one")
    assert [(d.option, d.before, d.value) for d in two.differences] == [("seed", "1", "2"), ("network_dim", None, "4")]
    queue.pause()
    assert {row.start for row in queue_rows.queue_rows(queue.read_queue())} == {None}
    with queue.changing() as waiting:
        waiting.worker = {}
