"""The live panel as HTML: functions from what a run's files say to what is seen."""

import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from library.runs import explain
from library.runs.reader import Progress, Run

STATES = {
    "starting": ("Starting", "busy"),
    "running": ("Running", "busy"),
    "stopping": ("Stopping", "busy"),
    "finished": ("Finished", "good"),
    "stopped": ("Stopped", "calm"),
    "failed": ("Failed", "bad"),
    "interrupted": ("Interrupted", "bad"),
}
EMPTY = (
    '<div class="empty"><p><b>No training yet.</b></p>'
    "<p>A training shows here while it runs, whether it was started with Train or in a shell.</p></div>"
)
WIDTH, HEIGHT, DRAWN = 600, 150, 300  # units of the chart, and points that it draws at most


def head(run: Run, progress: Progress, now: float) -> str:
    """State and progress of a run, with the cause of a failure."""
    word, mood = STATES.get(run.state, (run.state, "calm"))
    name = html.escape(str(run.facts.get("output_name") or run.id))
    kind = html.escape(str(run.facts.get("title") or run.facts.get("script") or ""))
    return (
        f'<div class="run {mood}" data-run="{html.escape(run.id)}" data-state="{html.escape(run.state)}">'
        f'<div class="who"><span class="state">{html.escape(word)}</span><b>{name}</b><small>{kind}</small></div>'
        f"{_failure(run)}{_bar(run, progress, now)}</div>"
    )


def facts(run: Run, progress: Progress, now: float) -> str:
    """The numbers of the last step, and what happened on the way."""
    inside = _numbers(run, progress, now) + _told(run, progress)
    return f'<div class="facts">{inside}</div>' if inside else ""


def _failure(run: Run) -> str:
    if run.state not in ("failed", "interrupted") or not run.error:
        return ""
    advice = explain.cause(run.error) or run.error
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in advice.splitlines() if line.strip())
    said = "" if advice == run.error else f"<small>{html.escape(run.error)}</small>"
    return f'<div class="cause" role="alert"><ul>{lines}</ul>{said}</div>'


def _bar(run: Run, progress: Progress, now: float) -> str:
    left, right, done, of = _doing(run, progress, now)
    if run.state == "stopping":
        left += " · stops after this step"
    share = min(1.0, done / of) if of else 0.0
    waiting = " waiting" if run.active and not of else ""
    return (
        f'<div class="line"><span>{html.escape(left)}</span><span>{html.escape(right)}</span></div>'
        f'<div class="track{waiting}" role="progressbar" aria-label="Progress" aria-valuemin="0" aria-valuemax="100"'
        f' aria-valuenow="{share * 100:.0f}"><i style="width:{share * 100:.1f}%"></i></div>'
    )


def _doing(run: Run, progress: Progress, now: float) -> tuple[str, str, int, int]:
    """What goes on in words, what is left, and how much of how much is done (0 of 0 where that is not known)."""
    step, total = number(progress.last.get("step")), number(run.facts.get("total_steps"))
    phase = progress.phase if run.active else None
    if phase and phase.get("total") and phase.get("done") == phase.get("total") and not step:
        # All is read and encoded, and the first step is what compiles.
        compiling = (run.facts.get("config") or {}).get("compile", {}).get("compile")
        return ("Compiling in the first step" if compiling else "Preparing the first step"), "", 0, 0
    if phase:
        done, of = number(phase.get("done")), number(phase.get("total"))
        return str(phase.get("name") or "").capitalize(), f"{done} / {of}" if of else "", done, of
    if run.active and not step:
        return ("Loading Python and the trainer" if run.state == "starting" else "Getting ready"), "", 0, 0
    if not step:
        return "It did not get to the first step", _eta(run, progress, now), 0, 0
    return (f"Step {step} / {total}" if total else f"Step {step}"), _eta(run, progress, now), step, total


def number(value: Any) -> int:
    """A count from a run's files, 0 where there is none."""
    return int(value) if isinstance(value, int | float) else 0


def _eta(run: Run, progress: Progress, now: float) -> str:
    """The time that is left while it runs, the time it took afterwards."""
    started, eta = run.facts.get("started"), progress.last.get("eta")
    if run.active:
        if not isinstance(eta, int | float):
            return ""
        return f"{duration(max(0.0, eta - (now - progress.last.get('t', now))))} left"
    ended = run.facts.get("ended") or run.facts.get("heartbeat")
    return f"took {duration(ended - started)}" if started and ended else ""


def _numbers(run: Run, progress: Progress, now: float) -> str:
    last, rows = progress.last, []
    if progress.curve:
        rows.append(("Loss, smoothed", f"{progress.curve[-1][2]:.4f}", ""))
    if isinstance(last.get("loss"), int | float):
        rows.append(("Loss, last step", f"{last['loss']:.4f}", ""))
    for name, rate in rates(last.get("lr")).items():
        rows.append(("Learning rate", f"{rate:.3g}", name))
    for key, title, unit in (("s_it", "Speed", "s/step"), ("grad_norm", "Gradient", "norm"), ("epoch", "Epoch", "")):
        if isinstance(last.get(key), int | float):
            rows.append((title, f"{last[key]:.3g}", unit))
    if run.active and run.facts.get("started"):
        rows.append(("Running for", duration(now - run.facts["started"]), ""))
    cells = "".join(
        f"<div><dt>{html.escape(title)}</dt><dd>{html.escape(value)} <small>{html.escape(unit)}</small></dd></div>"
        for title, value, unit in rows
    )
    return f"<dl>{cells}</dl>" if cells else ""


def rates(given: Any) -> dict[str, float]:
    """Learning rates by name, of which equal ones are shown once; at most three."""
    if isinstance(given, int | float):
        return {"": float(given)}
    if not isinstance(given, dict):
        return {}
    known = {str(name): float(rate) for name, rate in given.items() if isinstance(rate, int | float)}
    return {"": next(iter(known.values()))} if len(set(known.values())) == 1 else dict(list(known.items())[:3])


def _told(run: Run, progress: Progress) -> str:
    """What happened on the way: warnings, what was compiled, what was saved."""
    parts = [
        _list("Warnings", [text(event) for event in progress.told.get("warning", ())], "warn"),
        _list("Compiled", [compiled(event) for event in progress.told.get("compile", ())], "compiled", _ledger(run)),
        _list("Saved", [saved(event) for event in progress.told.get("saved", ())], "saved"),
        _list("Sample images", [saved(event) for event in progress.told.get("sample", ())], "saved"),
    ]
    return "".join(parts)


def _ledger(run: Run) -> str:
    """The sum of the compiler's work, which is known when the run has ended."""
    total = run.facts.get("compile") or {}
    if not total.get("num_graphs"):
        return ""
    return f"{total['num_graphs']} graphs in {total.get('seconds', 0):.0f} s, {total.get('recompiles', 0)} recompiled"


def _list(title: str, lines: Sequence[str], kind: str, sum_up: str = "") -> str:
    shown = [line for line in lines if line][-8:]
    if not shown:
        return ""
    more = sum_up or (f"last {len(shown)} of {len(lines)}" if len(lines) > len(shown) else "")
    more = f" <small>{html.escape(more)}</small>" if more else ""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in shown)
    return f'<section class="{kind}"><h3>{title}{more}</h3><ul>{items}</ul></section>'


def text(event: dict[str, Any]) -> str:
    """The words of an event, whatever its writer called them."""
    return str(next((event[key] for key in ("text", "message", "reason") if event.get(key)), ""))


def compiled(event: dict[str, Any]) -> str:
    """One line of the ledger: which block made a graph, in which time, and why again."""
    if not event.get("block"):
        return text(event)
    line = f"{event['block']}: {'forward' if event.get('forward', True) else 'backward'} graph"
    if isinstance(event.get("seconds"), int | float):
        line += f" in {event['seconds']:.1f} s"
    for key, words in (("failed", "failed"), ("reason", "again because")):
        if event.get(key):
            line += f", {words}: {event[key]}"
    return line


def saved(event: dict[str, Any]) -> str:
    """The name of a written file, and its size while it is there."""
    path = Path(str(event.get("file") or event.get("path") or ""))
    try:
        size = path.stat().st_size if path.is_file() else 0
    except OSError:
        size = 0
    return f"{path.name} ({size / 1e6:,.1f} MB)" if size else path.name


def duration(seconds: float) -> str:
    """Seconds in words: 45 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{max(0, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def log(lines: str) -> str:
    """The end of the log."""
    return f"<pre>{html.escape(lines)}</pre>" if lines.strip() else "<p>Nothing has been written yet.</p>"


def chart(curve: Sequence[tuple[int, float, float]]) -> str:
    """The loss, as it came and smoothed, over the steps. SVG, so that nothing has to be loaded to draw it."""
    if len(curve) < 2:
        return ""
    points = curve[:: math.ceil(len(curve) / DRAWN)]
    points = [*points, curve[-1]] if points[-1] != curve[-1] else points
    low, high = _limits([p[1] for p in points] + [p[2] for p in points])
    first, last = points[0][0], points[-1][0]

    def line(values: Iterable[tuple[int, float]]) -> str:
        across, up = max(1, last - first), (high - low) or 1.0
        return " ".join(
            f"{(step - first) / across * WIDTH:.1f},{HEIGHT - (min(max(loss, low), high) - low) / up * HEIGHT:.1f}"
            for step, loss in values
        )

    grid = "".join(f'<line x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>' for y in (0, HEIGHT / 2, HEIGHT))
    return (
        '<figure class="chart"><figcaption>Loss <small><i class="raw"></i>each step <i class="smooth"></i>smoothed'
        f'</small></figcaption><div class="y"><span>{high:.3g}</span><span>{low:.3g}</span></div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img"'
        f' aria-label="Loss from step {first} to step {last}, now {points[-1][2]:.4g}">{grid}'
        f'<polyline class="raw" points="{line((p[0], p[1]) for p in points)}"/>'
        f'<polyline class="smooth" points="{line((p[0], p[2]) for p in points)}"/></svg>'
        f'<div class="x"><span>step {first}</span><span>{last}</span></div></figure>'
    )


def _limits(values: list[float]) -> tuple[float, float]:
    """The range to draw: a few wild values at the start must not flatten all the rest."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return max(0.0, low - margin) if low >= 0 else low - margin, high + margin
