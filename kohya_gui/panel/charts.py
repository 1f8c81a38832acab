"""The curves of the live panel as SVG, which needs no library."""

import html
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kohya_gui.i18n.sentences import data
from library.config.json_types import JsonObject
from library.config.problems import Message
from library.runs.dates import local_time

WIDTH, HEIGHT, MAX_POINTS = 600, 150, 300  # units of a chart, and the most points of a line
MAX_LABEL = 6  # characters that fit beside an axis
MAX_RATES = 3  # learning rates shown at most


def chart(curve: Sequence[tuple[int, float, float]], resumed: Sequence[int] = ()) -> str:
    """Return the chart of the loss: each step, and smoothed."""
    if len(curve) < 2:
        return ""
    points = _thin_out_rows(curve)
    frame = _Frame(points[0][0], points[-1][0], *_limits([p[1] for p in points] + [p[2] for p in points]))
    polylines = (
        f'<polyline class="raw" points="{frame.line((p[0], p[1]) for p in points)}"/>'
        f'<polyline class="smooth" points="{frame.line((p[0], p[2]) for p in points)}"/>'
    )
    resumed_steps = frame.seen(resumed)
    after = Message("resumed after {steps}", steps=", ".join(map(str, resumed_steps[-3:]))) if resumed_steps else ""
    about = Message(
        "Loss from step {first} to step {last}, now {loss}{after}",
        first=frame.first,
        last=frame.last,
        loss=f"{points[-1][2]:.4g}",
        after=Message(", {resumed}", resumed=after) if after else "",
    )
    key = '<small><i class="raw"></i>each step <i class="smooth"></i>smoothed</small>'
    below = f'<span class="resumed"{data(after)}>{after}</span>' if after else ""
    inside = frame.around(polylines, about, resumed_steps, below)
    return f'<figure class="chart"><figcaption>Loss {key}</figcaption>{inside}</figure>'


def rate_chart(rates: Sequence[tuple[int, dict[str, float]]], resumed: Sequence[int] = ()) -> str:
    """Return the chart of learning rates; rates that are always equal share a line."""
    rows = _thin_out_rows([row for row in rates if row[1]])
    if len(rows) < 2:
        return ""
    is_one_line = all(len(set(by_name.values())) == 1 for _, by_name in rows)
    names = list(dict.fromkeys(name for _, by_name in rows for name in by_name))[: 1 if is_one_line else MAX_RATES]
    highest = max(rate for _, by_name in rows for rate in by_name.values())
    frame = _Frame(rows[0][0], rows[-1][0], 0.0, highest or 1.0)
    polylines = "".join(
        f'<polyline class="r{at}" points="{frame.line((s, by_name[name]) for s, by_name in rows if name in by_name)}"/>'
        for at, name in enumerate(names)
    )
    key = "" if is_one_line else "".join(f'<i class="r{at}"></i>{html.escape(name)} ' for at, name in enumerate(names))
    about = Message("Learning rate from step {first} to step {last}", first=frame.first, last=frame.last)
    inside = frame.around(polylines, about, frame.seen(resumed))
    return f'<figure class="chart low"><figcaption>Learning rate <small>{key}</small></figcaption>{inside}</figure>'


# Measurements of a GPU: name in an event, title, unit, and the least upper end of the axis.
MEASURES = (
    ("used", "GPU memory", "GB", 0),
    ("utilization", "GPU load", "%", 100),
    ("temperature", "Temperature", "°C", 100),
    ("power", "GPU power", "W", 0),
)


def gpu_charts(events: Iterable[JsonObject]) -> str:
    """Return charts of memory, load, temperature and power of a run's GPUs over time, from its events; one line for
    each GPU."""
    timed = [event for event in events if isinstance(event.get("t"), int | float)]
    rows = [
        (int(event["t"]), gpu) for event in _thin_out_rows(timed) for gpu in event.get("gpus") or () if "index" in gpu
    ]
    if not rows or rows[0][0] == rows[-1][0]:
        return ""
    return f'<div class="gpu-charts">{"".join(_gpu_chart(rows, *measure) for measure in MEASURES)}</div>'


def _gpu_chart(rows: Sequence[tuple[int, JsonObject]], key: str, title: str, unit: str, axis_end: float) -> str:
    lines: dict[str, list[tuple[int, float]]] = {}
    for at, gpu in rows:
        if isinstance(gpu.get(key), int | float):
            lines.setdefault(str(gpu["index"]), []).append((at, float(gpu[key])))
        if key == "used":
            axis_end = max(axis_end, gpu.get("total") or 0)
    if not lines:
        return ""
    ends = tuple(time.strftime("%H:%M", local_time(at)) for at in (rows[0][0], rows[-1][0]))
    highest = max(value for line in lines.values() for _, value in line)
    frame = _Frame(rows[0][0], rows[-1][0], 0.0, max(axis_end, highest), ends)
    polylines = "".join(
        f'<polyline class="r{at % MAX_RATES}" points="{frame.line(line)}"/>' for at, line in enumerate(lines.values())
    )
    now = [f"{line[-1][1]:.4g} {unit}" for line in lines.values()]
    about = Message(
        "{what} from {first} to {last}, now {value}",
        what=Message(title),
        first=ends[0],
        last=ends[1],
        value=", ".join(now),
    )
    names = [f'<i class="r{at % MAX_RATES}"></i>{html.escape(name)} ' for at, name in enumerate(lines)]
    return (
        f'<figure class="chart low"><figcaption>{title} <small>{"".join(names if len(names) > 1 else now)}</small>'
        f"</figcaption>{frame.around(polylines, about, ())}</figure>"
    )


class _Frame(NamedTuple):
    """The range of steps (or seconds, then with labels for both `ends`) and values of a chart."""

    first: int
    last: int
    low: float
    high: float
    ends: tuple[str, ...] = ()

    def across(self, step: int) -> float:
        return (step - self.first) / max(1, self.last - self.first) * WIDTH

    def line(self, values: Iterable[tuple[int, float]]) -> str:
        """Return values in the units of the chart."""
        up = (self.high - self.low) or 1.0
        return " ".join(
            f"{self.across(step):.1f},{HEIGHT - (min(max(value, self.low), self.high) - self.low) / up * HEIGHT:.1f}"
            for step, value in values
        )

    def seen(self, steps: Sequence[int]) -> list[int]:
        return [step for step in steps if self.first <= step <= self.last]

    def around(self, polylines: str, about: Message, marks: Sequence[int], below: str = "") -> str:
        """Lines with their axes, and a mark at some steps."""
        grid = "".join(f'<line x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>' for y in (0, HEIGHT / 2, HEIGHT))
        for x in map(self.across, marks):
            grid += f'<line class="resumed" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HEIGHT}"/>'
        first, last = self.ends or (Message("step {step}", step=self.first), str(self.last))
        return (
            f'<div class="y"><span>{_short(self.high)}</span><span>{_short(self.low)}</span></div>'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{about}"'
            f"{data(about)}>{grid}{polylines}</svg>"
            f'<div class="x"{data(first)}><span>{first}</span>{below}<span>{last}</span></div>'
        )


def _short(value: float) -> str:
    text = f"{value:.3g}"
    is_long = "e" in text or len(text) > MAX_LABEL
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e") if is_long else text


def _thin_out_rows(rows: Sequence[Any]) -> Sequence[Any]:
    if not rows:
        return rows
    points = rows[:: math.ceil(len(rows) / MAX_POINTS)]
    return [*points, rows[-1]] if points[-1] != rows[-1] else points


def _limits(values: list[float]) -> tuple[float, float]:
    """Return the range to show: a few outliers at the start must not flatten the rest."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return max(0.0, low - margin) if low >= 0 else low - margin, high + margin
