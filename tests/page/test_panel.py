"""The live panel's HTML: a run's state, and that no text of a run is interpreted as HTML."""

import sys
import time
from pathlib import Path

import pytest

from kohya_gui.form import messages
from kohya_gui.lab import lab
from kohya_gui.panel import actions, charts, history, html
from kohya_gui.tools import commands
from library.config.problems import Message, Problem
from library.importers.result import TO_FIX
from library.jobs.jobs import BackgroundJob
from library.runs import layout, process
from library.runs.queue import Queue, QueueEntry
from library.runs.reader import RecordedRun, RunProgress


def shown(tmp_path, events=(), **facts):
    run = RecordedRun(tmp_path / "cat-1", {"state": "running", "title": "FLUX.1 LoRA", "output_name": "cat", **facts})
    progress = RunProgress(tmp_path / "cat-1")
    for event in events:
        progress._take(event)
    now = time.time()
    return (
        html.run_head_html(run, progress, now)
        + html.numbers(run, progress, now)
        + (html.machine_usage_html(run) if run.active else "")
        + history.history_html(run, progress)
        + charts.chart(progress.curve)
        + charts.rate_chart(progress.line.rates)
    )


def step(number, **more):
    return {"kind": "step", "t": time.time(), "step": number, "loss": 0.5 / number, "lr": {"unet": 1e-4}, **more}


def test_steps_time_left_and_speed(tmp_path):
    page = shown(tmp_path, [step(1), step(120, eta=1930, s_it=1.3, epoch=2)], total_steps=1600)
    for words in ("Step 120 / 1600", "32 min left", "1.3 <small>s/step", "0.0001", 'aria-valuenow="8"'):
        assert words in page


def test_notes_are_folded_unless_one_has_to_be_fixed():
    notes = [Message("{key} is now {option}", key="dit", option="model"), "ignored: sdpa"]
    assert "<details><summary>" in messages.good("Loaded.", notes)
    named = Problem("fp8_base", "has no effect"), Problem("", "{path} is empty", path="cat.toml")
    note_html = messages.good("Started.", [*named, Problem("", "no GPU was found")])
    assert all(f"<li>{note}</li>" in note_html for note in (*named, "No GPU was found"))
    assert "<details open><summary>" in messages.good(
        "Loaded.", [Message(TO_FIX, problem="fp8_base needs bf16"), *notes]
    )


@pytest.mark.parametrize(
    ("rate", "label", "full"), [(8.54e-5, "8.5e-5", "8.54e-05"), (4.97e-4, "5.0e-4", "0.000497"), (5e-4, "0.0005", "")]
)
def test_a_small_learning_rate_has_room_beside_its_axis(tmp_path, rate, label, full):
    page = shown(tmp_path, [step(1, lr={"unet": rate}), step(2, lr={"unet": rate})])
    assert f"<span>{label}</span>" in page and full in page  # in full in the table below


def test_phases_before_the_first_step(tmp_path):
    page = shown(tmp_path, [{"kind": "phase", "name": "caching latents", "done": 312, "total": 1000}], total_steps=1600)
    assert "Caching latents" in page and "312 / 1000" in page and "width:31.2%" in page


def test_the_long_first_step_is_not_a_mystery(tmp_path):
    events = [{"kind": "phase", "name": "caching captions", "done": 12, "total": 12}]
    assert "Preparing the first step" in shown(tmp_path, events)
    assert "Compiling in the first step" in shown(tmp_path, events, config={"compile": {"compile": True}})
    assert "Preparing" in shown(tmp_path)


@pytest.mark.parametrize(
    ("paused", "worker", "words"),
    [
        ("by you", {}, "The queue is paused. 2 trainings left."),
        ("fox has failed.", {}, "The queue is paused: fox has failed. 2 trainings left."),
        ("", {}, "The queue is halted, as the computer or its process ended. 2 trainings left."),
        ("", process.identity(), "Next in the queue: a&lt;b, and 1 more"),
    ],
)
def test_a_line_says_how_the_queue_stands(paused, worker, words):
    entries = [QueueEntry(name, "flux_train", "", name, "/out") for name in ("a<b", "c")]
    page = html.waiting(Queue(entries, paused=paused, worker=worker))
    assert words in page and ("Continue" in page) == (not worker) and html.waiting(Queue()) == ""


def test_a_run_that_hangs_says_so(tmp_path):
    assert "no progress for 10 min" in shown(tmp_path, [step(7, t=time.time() - 600, s_it=1.0)])
    assert "nothing new" not in shown(tmp_path, [step(7, t=time.time() - 600, s_it=60.0)])  # slow steps are no silence
    assert "nothing new" not in shown(tmp_path, [step(7, t=time.time() - 600, s_it=1.0)], state="finished")


def test_the_log_has_the_cause_on_top(tmp_path):
    run = RecordedRun(tmp_path, {"state": "failed", "error": "RuntimeError: CUDA out of memory."})
    page = html.log("step 7\nRuntimeError: CUDA out of memory.", run)
    assert page.index("Lower the batch size") < page.index("<pre>")


@pytest.mark.parametrize("lines", [3, 300])
def test_every_log_says_whether_its_first_lines_are_missing(tmp_path, lines):
    (tmp_path / layout.LOG).write_text("line\n" * lines, encoding="utf-8")
    run, job = RecordedRun(tmp_path, {"state": "failed"}), BackgroundJob(tmp_path, {"state": "failed", "kind": "tools"})
    note = str(Message("Only the last lines are shown; all are in {file}.", file=tmp_path / layout.LOG))
    assert (note in html.log_of(run)) == (lines > 200)
    for shown_job in (commands.job_status(job), lab.view(job)):
        assert bool(shown_job["longer_log"]) == (lines > 200)


def test_compiling_says_what_and_how_much_of_it(tmp_path):
    page = shown(tmp_path, [{"kind": "phase", "name": "compiling DoubleStreamBlock", "done": 2, "total": 2}])
    assert "Compiling double stream block" in page and "2 of 2" in page and 'aria-valuenow="50"' in page


def test_where_a_steps_time_goes_and_how_busy_the_machine_is(tmp_path, monkeypatch):
    gpus = [html.machine.GpuStatus(index, "NVIDIA RTX 4090", 18.2, 24.0, 97, 71, 320.5) for index in "01"]
    monkeypatch.setattr(html.machine.GPUS, "now", lambda: gpus)
    events = [step(1, data_s=0.25, transfer_s=0.0, compute_s=0.75)]
    page = shown(tmp_path, events, devices=["0"], output_dir=str(tmp_path))
    for words in (
        "25% waiting for data, 0% copying to the GPU, 75% computing",
        "18.2 / 24.0 GB, 97 %, 71 °C, 320 W",
        "GB free",
    ):
        assert words in page
    assert "GPU 0" in page and "GPU 1" not in page and "waiting for data" not in shown(tmp_path, [step(1)])


def test_what_took_time_besides_the_steps_is_shown_by_name(tmp_path):
    lost = [{"cause": Message("new epochs"), "seconds": 2.72}, {"cause": Message("saving"), "seconds": 1.0}]
    page = shown(tmp_path, [step(1)], lost_seconds=lost)
    assert "Time besides steps" in page and "3.7 s went to other work since the first step" in page
    assert "new epochs 2.7 s, saving 1.0 s" in page
    for damaged in ([], [1], [{"cause": "x"}], {"a": 1}, None):
        assert "Time besides steps" not in shown(tmp_path, [step(1)], lost_seconds=damaged)


def gpu(at, *used, **more):
    gpus = [
        {"index": str(i), "used": gib, "total": 24.0, "utilization": 97, "temperature": 71}
        for i, gib in enumerate(used)
    ]
    return {"kind": "gpu", "t": 1.7e9 + at, "gpus": gpus, **more}


def test_memory_load_temperature_and_power_of_gpus_are_curves(tmp_path):
    svg = charts.gpu_charts([gpu(0, 4.0, 2.0), gpu(10, 12.0, 2.0), {"kind": "gpu"}, gpu(20, 18.0, 2.5)])
    assert [title in svg for title in ("GPU memory", "GPU load", "Temperature", "GPU power")] == [1, 1, 1, 0]
    assert svg.count("<polyline") == 6 and "now 18 GB, 2.5 GB" in svg and "<span>24</span>" in svg
    assert "0.0,125.0 300.0,75.0 600.0,37.5" in svg  # shares of 24 GB, in a chart 150 units high
    assert charts.gpu_charts([]) == charts.gpu_charts([gpu(0, 4.0)]) == ""
    full = [gpu(0, 23.9, spilled=1.5), step(1)]
    assert "1.5 GiB of this training are in CPU memory" in shown(tmp_path, full)
    assert "are in CPU memory" not in shown(tmp_path, [*full, gpu(10, 20.0)])


def test_a_file_that_does_not_load_stands_out(tmp_path):
    page = shown(
        tmp_path, [{"kind": "saved", "file": "/o/cat.safetensors", "bytes": 5e6, "ok": False, "text": "3 <b> odd"}]
    )
    assert "cat.safetensors <small>(5.0 MB)" in page and '<span class="wrong"' in page and "✗ 3 &lt;b&gt; odd" in page


def test_the_ledger_warnings_and_files(tmp_path):
    events = [
        {"kind": "compile", "block": "SingleStreamBlock", "forward": True, "seconds": 9.71, "reason": ""},
        {"kind": "compile", "block": "SingleStreamBlock", "forward": True, "seconds": 3.0, "reason": "a new size"},
        {"kind": "warning", "text": "2 images have no caption"},
        {"kind": "saved", "file": str(tmp_path / "cat-step00000400.safetensors")},
    ]
    (tmp_path / "cat-step00000400.safetensors").write_bytes(b"x" * 2_500_000)
    page = shown(tmp_path, events)
    for words in (
        "forward graph in 9.7 s",
        "recompiled because: a new size",
        "2 images have no caption",
        "00400.safetensors</a> <small>(2.5 MB)",
        'href="own/run-file?run=cat-1&amp;file=cat-step00000400.safetensors" download=',
        "2 graphs in 13 s, 1 recompiled",
    ):
        assert words in page


def test_the_cause_of_a_failure_and_its_cure(tmp_path):
    page = shown(tmp_path, state="failed", error="OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    assert 'role="alert"' in page and "swap blocks" in page and "Tried to allocate" in page


def test_several_lines_of_an_error_stay_several(tmp_path):
    assert shown(tmp_path, state="failed", error="ae: missing\nclip_l: missing").count("<li>") == 2


def test_nothing_of_a_run_is_taken_for_html(tmp_path):
    evil = "<img src=x onerror=alert(1)>"
    events = [
        {"kind": kind, "text": evil, "block": evil, "file": evil, "name": evil, "reason": evil}
        for kind in ("phase", "compile", "warning", "saved", "sample")
    ]
    page = shown(
        tmp_path, [step(1, lr={evil: 1.0, "b": 2.0}), step(2), *events], output_name=evil, title=evil, error=evil
    )
    page += shown(tmp_path, state=f'failed"{evil}', error=evil) + html.log(evil)
    page += messages.good(evil, [evil]) + messages.list_problems(
        [Problem("", f"{evil} is wrong"), Problem("seed", evil)], {"seed": ("Seed", "lora-seed")}
    )
    page += messages.command_html(evil, evil, (Path(evil), evil, False), [evil])
    assert "<img" not in page


@pytest.mark.parametrize(
    "events",
    [
        [{"kind": "step"}],
        [{"kind": "step", "step": None, "loss": None, "lr": None}],
        [{"kind": "phase"}],
        [{"kind": "compile"}],
        [{"kind": "step", "step": 1, "loss": "x", "lr": "x", "eta": "x"}],
        [{"kind": "saved"}],
        [{}],
        [{"kind": "step", "step": 3, "loss": 0.0}] * 3,
        [{"kind": "gpu"}, {"kind": "gpu", "spilled": "x"}],
    ],
)
def test_odd_events_do_not_break_the_panel(tmp_path, events):
    assert "cat" in shown(tmp_path, events)


def test_a_wild_loss_does_not_flatten_the_curve():
    curve = [(n, 1000.0 if n == 3 else 0.1 + n / 10000, 0.1) for n in range(1, 400)]
    assert "<span>0.1" in charts.chart(curve) and charts.chart(curve[:1]) == ""


def test_learning_rates_that_differ_are_lines_of_their_own():
    same = [(n, {"unet": 1e-4 / n, "text": 1e-4 / n}) for n in range(1, 5)]
    assert charts.rate_chart(same).count("<polyline") == 1
    other = [(n, {"unet": 1e-4, "<b>": 1e-5}) for n in range(1, 1000)]
    svg = charts.rate_chart(other, [500, 2000])
    assert svg.count("<polyline") == 2 and "<b>" not in svg and svg.count('class="resumed"') == 1
    assert charts.rate_chart([(1, {}), (2, {})]) == ""


def test_durations_in_words():
    assert [str(html.duration_in_words(s)) for s in (0, 45, 720, 12000)] == ["0 s", "45 s", "12 min", "3 h 20 min"]


def test_what_a_saved_file_was_compared_with_is_known_to_the_page_as_a_sentence(tmp_path):
    about = Message("it loads: all {count} tensors match what the model holds", count=3)
    run = RecordedRun(tmp_path / "cat-1", {})
    assert "{count} tensors" in history.saved(run, {"file": "cat.safetensors", "ok": True, "text": about})


def test_the_report_of_a_machine_arrives_in_utf_8(monkeypatch):
    """On Windows Python writes into pipes in an old code page."""
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")
    monkeypatch.setattr(actions, "DOCTOR", [sys.executable, "-c", "print('the folder 図')"])
    assert actions._doctor() == "the folder 図\n"
