"""The live panel as HTML, rendered from a run's record."""

import html
import re
import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from kohya_gui.i18n.sentences import data
from library.config.json_types import JsonObject, JsonValue, as_float
from library.config.problems import Message, MessageLike, counted, join_messages, without_flags
from library.runs import explain, layout, machine, reader, stop
from library.runs.dates import duration_in_words, local_time
from library.runs.gpu_log import SPILLED
from library.runs.lost_time import lost_time_sentence
from library.runs.queue import BY_USER, Queue
from library.runs.reader import RecordedRun, RunProgress, rates_by_name

STATES = {
    "starting": ("Starting", "busy"),
    "running": ("Running", "busy"),
    "stopping": ("Stopping", "busy"),
    "finished": ("Finished", "good"),
    "stopped": ("Stopped", "calm"),
    "failed": ("Failed", "bad"),
    "interrupted": ("Interrupted", "bad"),
}
STATE_WHILE_STOPPING = {
    "": "",
    "after_step": "{doing} · stops after this step",
    "now": "{doing} · saves and stops",
    "kill": "{doing} · is killed",
}
STOPS_AT_ONCE = "{doing} · stops"  # before the first step
PAUSED = "The queue is paused: {why} {trainings} left."
EMPTY = (
    '<div class="empty"><p><b>No training yet.</b></p>'
    "<p>A training shows here while it runs, whether it was started with Train or in a shell.</p>"
    '<ol class="first-steps"><li><button type="button" data-step="model">Choose a model</button></li>'
    '<li><button type="button" data-step="images">Add images</button></li>'
    '<li><button type="button" data-step="look">Look at them</button></li>'
    '<li><button type="button" data-step="train">Start the training</button></li></ol>'
    '<p class="demo"><button type="button" class="try-demo">Try it with the demo</button> '
    "<span>Fills in the form with a small model and images of a character that it has never seen.</span></p></div>"
)
# The panel before its first request; if runs exist, it stays hidden, as tall as a run.
UNREAD = EMPTY.replace('"empty"', '"empty unread"')
RUNS_TO_COME = (
    "<style>.live .empty.unread { visibility: hidden } @media (max-width: 880px) "
    "{ .live .empty.unread { box-sizing: border-box; height: 31px; overflow: hidden } }</style>"
)
SILENCE_SHOWN_FROM = 300.0  # seconds without an event, after which the panel reports no progress
FULL_SHARE = 0.95  # the share of memory or disk in use from which it is marked


def run_list_html(runs: Iterable[tuple[MessageLike, str]], picked: str) -> str:
    """Return the list of runs to choose from, if there is more than one: (label, id), newest first."""
    entries = [("Newest run", ""), *runs]
    options = "".join(
        f'<option value="{html.escape(run)}"{" selected" * (run == picked)}{data(label)}>'
        f"{html.escape(str(label))}</option>"
        for label, run in entries
    )
    return f'<select class="runs" aria-label="Run">{options}</select>' if len(entries) > 2 else ""


def run_head_html(run: RecordedRun, progress: RunProgress, now: float) -> str:
    """Return state and progress of a run, with the cause of a failure."""
    word, mood = STATES.get(run.state, (run.state, "calm"))
    name = html.escape(run.name)
    kind = html.escape(str(run.facts.get("title") or run.facts.get("script") or ""))
    return (
        f'<div class="run {mood}" data-run="{html.escape(run.id)}" data-state="{html.escape(run.state)}">'
        f'<div class="who"><span class="state">{html.escape(str(word))}</span><b>{name}</b><small>{kind}</small>'
        f"{_link(run)}</div>"
        f"{_deletion_warning(run)}{_failure(run)}{_spill_warning(progress) if run.active else ''}"
        f"{_bar_html(run, progress, now)}</div>"
    )


def _link(run: RecordedRun) -> str:
    """Return the link to the run's own page, where the panel's part is shown beside a form."""
    return f'<a class="to-run" href="#runs/{html.escape(quote(run.id))}">Open this run</a>'


def waiting(queue: Queue) -> str:
    """Return a line about the queue while it has waiting entries, with a button if it waits for the user."""
    names = [entry.name for entry in queue.waiting]
    if not names:
        return ""
    if not queue.paused and not queue.halted:
        template = "Next in the queue: {name}, and {more} more" if len(names) > 1 else "Next in the queue: {name}"
        sentence = Message(template, name=names[0], more=len(names) - 1)
        return f'<p class="next"{data(sentence)}>{html.escape(str(sentence))}</p>'
    why = "The queue is halted, as the computer or its process ended. {trainings} left."
    if queue.paused:
        why = "The queue is paused. {trainings} left." if queue.paused == BY_USER else PAUSED
    sentence = Message(why, trainings=counted(len(names), "training"), why=queue.paused)
    go = '<button type="button" data-queue="resume">Continue</button>'
    return f'<div class="next halted"{data(sentence)}><p>{html.escape(str(sentence))}</p>{go}</div>'


def other_run_html(run: RecordedRun, other_runs: Iterable[RecordedRun]) -> str:
    """Return a line about the active run, while another one is shown that has ended."""
    other = next((other for other in other_runs if other.active and other.id != run.id), None)
    if run.active or other is None:
        return ""
    sentence = Message("Running now: {name}", name=other.name)
    look = f'<button type="button" data-look="{html.escape(other.id)}">Look at it</button>'
    return f'<div class="next halted calm"{data(sentence)}><p>{html.escape(str(sentence))}</p>{look}</div>'


def numbers(run: RecordedRun, progress: RunProgress, now: float) -> str:
    inside = _step_numbers_html(run, progress, now) + time_bar(progress.last) + _lost_time_html(run)
    return f'<div class="facts">{inside}</div>' if inside else ""


def _deletion_warning(run: RecordedRun) -> str:
    """Return the warning that the run's folder was deleted, while it is gone and afterwards."""
    where = html.escape(str(run.folder))
    if run.facts.get("lost"):
        warning = "The folder of this run was deleted. The training still works; Stop now ends it."
    elif restored := run.facts.get("restored"):
        at = time.strftime("%H:%M", local_time(restored))
        warning = Message(
            "The folder of this run was deleted while it trained. Its record was written again at {at}; "
            "files that were saved there before are lost.",
            at=at,
        )
    else:
        return ""
    return f'<div class="cause" role="alert"{data(warning)}><ul><li>{warning}</li></ul><small>{where}</small></div>'


def _failure(run: RecordedRun) -> str:
    if run.state not in ("failed", "interrupted") or not run.error:
        return ""
    advice = explain.advice(run.error)
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in str(advice).splitlines() if line.strip())
    details = "" if str(advice) == str(without_flags(run.error)) else f"<small>{html.escape(str(run.error))}</small>"
    return f'<div class="cause" role="alert"{data(advice)}><ul>{lines}</ul>{details}</div>'


def _bar_html(run: RecordedRun, progress: RunProgress, now: float) -> str:
    left, right, done, of = _doing(run, progress, now)
    if run.state == "stopping":
        template = STATE_WHILE_STOPPING[layout.stop_asked(run.folder)]
        template = template if not template or stop.has_stepped(progress) else STOPS_AT_ONCE
        left = Message(template or "{doing}", doing=left)
    if run.active and (silent := _silent(progress, now)):
        left = Message("{doing} · no progress for {time}", doing=left, time=duration_in_words(silent))
    share = min(1.0, done / of) if of else 0.0
    waiting = " waiting" if run.active and not of else ""
    spoken = join_messages([part for part in (left, right) if part])
    # Without aria-valuenow, the progress is not known.
    value = f' aria-valuenow="{share * 100:.0f}"' if not waiting else ""
    return (
        f'<div class="line"{data(left, right)}><span>{html.escape(str(left))}</span>'
        f"<span>{html.escape(str(right))}</span></div>"
        f'<div class="track{waiting}" role="progressbar" aria-label="Progress" aria-valuemin="0" aria-valuemax="100"'
        f'{value} aria-valuetext="{html.escape(str(spoken))}"{data(spoken)}>'
        f'<i style="width:{share * 100:.1f}%"></i></div>'
    )


def _silent(progress: RunProgress, now: float) -> float:
    """Return seconds since the last event, if unusually many; otherwise 0."""
    last = progress.phase or progress.last
    last_time = last.get("t")
    if not isinstance(last_time, int | float):
        return 0.0
    silent = now - last_time
    # Twenty steps count as usual, so that a slow training is not reported as hanging.
    return silent if silent > max(SILENCE_SHOWN_FROM, 20 * as_float(progress.last.get("s_it"))) else 0.0


def _doing(run: RecordedRun, progress: RunProgress, now: float) -> tuple[MessageLike, MessageLike, int, int]:
    """Return the current activity, what is left, and how much of how much is done (0 of 0 if unknown)."""
    if run.facts.get("lost"):  # its earlier progress is out of date
        return "Its progress is not known", "", 0, 0
    step, total = whole_number(progress.last.get("step")), whole_number(run.facts.get("total_steps"))
    phase = progress.phase if run.active else None
    if phase and str(phase.get("name")).startswith("compiling "):
        done, of = whole_number(phase.get("done")), whole_number(phase.get("total"))
        # DoubleStreamBlock -> double stream block
        block = re.sub("(?<=[a-z])(?=[A-Z])", " ", str(phase["name"]).removeprefix("compiling ")).lower()
        title = Message("compiling {block}", block=block).capitalized()
        return title, Message("{done} of {of}", done=done, of=of), max(0, done - 1), of
    if phase and phase.get("total") and phase.get("done") == phase.get("total") and not step:
        # Everything is loaded and encoded, and the first step compiles.
        compiling = layout.facts_section(run.facts, "compile").get("compile")
        return ("Compiling in the first step" if compiling else "Preparing the first step"), "", 0, 0
    if phase:
        done, of = whole_number(phase.get("done")), whole_number(phase.get("total"))
        phase_name = phase.get("name") or ""
        name = phase_name if isinstance(phase_name, Message) else Message(str(phase_name))
        return name.capitalized(), Message("{done} / {of}", done=done, of=of) if of else "", done, of
    if run.active and not step:
        return ("Loading Python and the trainer" if run.state == "starting" else "Preparing"), "", 0, 0
    if not step:
        return "Ended before the first step", _eta(run, progress, now), 0, 0
    return (
        (Message("Step {step} / {total}", step=step, total=total) if total else Message("Step {step}", step=step)),
        _eta(run, progress, now),
        step,
        total,
    )


def whole_number(value: JsonValue) -> int:
    return int(as_float(value))


def _eta(run: RecordedRun, progress: RunProgress, now: float) -> MessageLike:
    """Return the time left while it runs, the time it took afterwards."""
    started, eta = run.facts.get("started"), progress.last.get("eta")
    if run.active:
        if not isinstance(eta, int | float):
            return ""
        return Message("{time} left", time=duration_in_words(max(0.0, eta - (now - progress.last.get("t", now)))))
    ended = run.facts.get("ended") or run.facts.get("heartbeat")
    return Message("took {duration}", duration=duration_in_words(ended - started)) if started and ended else ""


def _step_numbers_html(run: RecordedRun, progress: RunProgress, now: float) -> str:
    last, rows = progress.last, []
    if progress.curve:
        rows.append(("Loss, smoothed", f"{progress.curve[-1][2]:.4f}", ""))
    if isinstance(last.get("loss"), int | float):
        rows.append(("Loss, last step", f"{last['loss']:.4f}", ""))
    for name, rate in shown_rates(last.get("lr")).items():
        rows.append(("Learning rate", f"{rate:.3g}", name))
    for key, title, unit in (("s_it", "Speed", "s/step"), ("grad_norm", "Gradient norm", ""), ("epoch", "Epoch", "")):
        if isinstance(last.get(key), int | float):
            rows.append((title, f"{last[key]:.3g}", unit))
    if run.active and run.facts.get("started"):
        rows.append(("Running for", duration_in_words(now - run.facts["started"]), ""))
    cells = "".join(
        f"<div{data(value)}><dt>{html.escape(title)}</dt><dd>{html.escape(str(value))} "
        f"<small>{html.escape(unit)}</small></dd></div>"
        for title, value, unit in rows
    )
    return f"<dl>{cells}</dl>" if cells else ""


def shown_rates(logged: Any) -> dict[str, float]:
    """Return at most three learning rates by name; equal ones are shown once."""
    rates = rates_by_name(logged)
    return {"": next(iter(rates.values()))} if len(set(rates.values())) == 1 else dict(list(rates.items())[:3])


STEP_TIMES = ("data_s", "transfer_s", "compute_s")  # waiting for data, copying to the GPU, computing


def time_bar(last: JsonObject) -> str:
    """Return where the time of the last step went, as a bar and in words."""
    parts = [(name, float(last[name])) for name in STEP_TIMES if isinstance(last.get(name), int | float)]
    whole = sum(seconds for _, seconds in parts)
    if len(parts) < len(STEP_TIMES) or whole <= 0:
        return ""
    bars = "".join(f'<i class="{name}" style="width:{seconds / whole:.1%}"></i>' for name, seconds in parts)
    shares = {name: f"{seconds / whole:.0%}" for name, seconds in parts}
    sentence = Message("{data_s} waiting for data, {transfer_s} copying to the GPU, {compute_s} computing", **shares)
    return (
        f'<div class="split"{data(sentence)}><h3>Time per step</h3>'
        f'<div class="track" role="img" aria-label="{sentence}">{bars}</div><p>{sentence}</p></div>'
    )


def _lost_time_html(run: RecordedRun) -> str:
    """Return what took time besides the steps."""
    sentence = lost_time_sentence(run.facts.get("lost_seconds"))
    if not sentence:
        return ""
    return f'<div class="split"{data(sentence)}><h3>Time besides steps</h3><p>{html.escape(str(sentence))}</p></div>'


def machine_usage_html(run: RecordedRun) -> str:
    """Return the use of GPUs, memory and disk, as far as this machine reports it."""
    if not run.is_here:
        return ""
    devices = {str(device) for device in run.facts.get("devices") or ()}
    rows = [_gpu(gpu) for gpu in machine.GPUS.now() if not devices or gpu.index in devices]
    memory, disk = machine.computer_memory(), machine.disk_space(run.facts.get("output_dir") or run.folder)
    rows.append(_usage_bar("CPU memory", memory["used"], memory["total"]))
    if disk:
        rows.append(
            _usage_bar(
                "Disk",
                disk["total"] - disk["free"],
                disk["total"],
                Message("{free} GB free", free=f"{disk['free']:,.0f}"),
            )
        )
    return f'<div class="facts usage">{"".join(rows)}</div>'


def _spill_warning(progress: RunProgress) -> str:
    """Return the warning that GPU memory was moved to the computer's memory, by the run's last report."""
    last = next(reversed(progress.events.get("gpu", ())), {}).get("spilled")
    if not isinstance(last, int | float):
        return ""
    warning = Message(SPILLED, size=f"{last:.1f}")
    return f'<div class="cause spilled" role="alert"{data(warning)}><ul><li>{html.escape(str(warning))}</li></ul></div>'


def _gpu(gpu: machine.GpuStatus) -> str:
    readings = ((gpu.utilization, "%"), (gpu.temperature, "°C"), (gpu.power, "W"))
    more = [
        f"{gpu.used:.1f} / {gpu.total:.1f} GB",
        *(f"{value:.0f} {unit}" for value, unit in readings if value is not None),
    ]
    return _usage_bar(Message("GPU {index}", index=gpu.index), gpu.used, gpu.total, ", ".join(more), gpu.name)


def _usage_bar(title: MessageLike, used: float, total: float, words: MessageLike = "", about: str = "") -> str:
    share = min(1.0, max(0.0, used / total)) if total else 0.0
    words = words or f"{used:.1f} / {total:.1f} GB"
    full = " full" if share > FULL_SHARE else ""
    return (
        f'<div class="used{full}" title="{html.escape(str(about))}"{data(title, words)}>'
        f"<span>{html.escape(str(title))}</span>"
        f'<div class="track"><i style="width:{share:.1%}"></i></div><span>{html.escape(str(words))}</span></div>'
    )


def log(lines: str, run: RecordedRun | None = None, longer_file: str = "") -> str:
    """Return the last lines of a log, with what ended the run; `longer_file` is the file if it holds more lines."""
    cause = _failure(run) if run else ""
    if not lines.strip():
        return f"{cause}<p>Nothing has been written yet.</p>"
    note = Message("Only the last lines are shown; all are in {file}.", file=longer_file)
    shown = f'<p class="quiet"{data(note)}>{html.escape(str(note))}</p>' if longer_file else ""
    return f"{cause}{shown}<pre>{html.escape(lines)}</pre>"


def log_of(run: RecordedRun, lines: int = 200, size: int = 65536) -> str:
    end = reader.log_end(run.folder, lines, size)
    return log(end.text, run, end.longer_file)
