"""The history of a run: saved files and their checks, warnings, the compiler's log."""

import html
import os
from collections.abc import Iterable, Sequence
from urllib.parse import urlencode

from kohya_gui.i18n.sentences import data
from kohya_gui.server import paths
from library.config.json_types import JsonObject, as_float
from library.config.problems import Message, MessageLike, counted, join_messages
from library.runs.reader import RecordedRun, RunProgress, path_in_run

MAX_SHOWN = 8  # newest events of each kind


def history_html(run: RecordedRun, progress: RunProgress) -> str:
    """Return the history, one section for each kind of event."""
    events = progress.events
    compiles = list(events.get("compile", ()))
    folder = run.facts.get("output_dir")
    parts = [
        _list(
            "Saved",
            (saved(run, event) for event in _without_replaced_states(events.get("saved", ()))),
            "saved",
            Message("in {folder}", folder=folder) if folder else "",
        ),
        _list("Ended early", map(event_words, events.get("early_stop", ())), "ended"),
        _list("Warnings", map(event_words, events.get("warning", ())), "warn"),
        _list("Compiled", map(compile_line, compiles), "compiled", compile_totals(run, progress, compiles)),
    ]
    inside = "".join(parts)
    return f'<div class="facts">{inside}</div>' if inside else ""


def _without_replaced_states(events: Iterable[JsonObject]) -> list[JsonObject]:
    """Return the saved files, without states by time that were replaced by newer ones."""
    all_events = list(events)
    newest = next((event for event in reversed(all_events) if event.get("backup")), None)
    return [event for event in all_events if not event.get("backup") or event is newest]


def compile_totals(run: RecordedRun, progress: RunProgress, events: Sequence[JsonObject]) -> MessageLike:
    """Return the compiler's work in one line: graphs, time, cache hits, and time saved."""
    total = run.facts.get("compile") or {}
    good = [event for event in events if not event.get("failed")]
    graphs = total.get("num_graphs") or sum(bool(event.get("forward", True)) for event in good)
    if not graphs:
        return ""
    totals = [event["total"] for event in events if isinstance(event.get("total"), int | float)]
    seconds = total.get("seconds") or (totals[-1] if totals else sum(as_float(event.get("seconds")) for event in good))
    again = total.get("recompiles") if total else sum(bool(event.get("reason")) for event in good)
    hits = total.get("cache_hits") if total else sum(as_float(event.get("cache_hits")) for event in good)
    phrases = [Message("{graphs} in {seconds} s", graphs=counted(graphs, "graph"), seconds=f"{seconds:.0f}")]
    phrases += [Message("{count} recompiled", count=again)] if again else []
    phrases += [Message("{hits} from the cache", hits=f"{hits:.0f}")] if hits else []
    gained = total.get("saved_seconds", progress.last.get("compile/saved_seconds"))
    if isinstance(gained, int | float):
        phrases.append(
            Message("{seconds} s saved", seconds=f"{gained:.0f}")
            if gained >= 0
            else Message("{seconds} s lost so far" if run.active else "{seconds} s lost", seconds=f"{-gained:.0f}")
        )
    return join_messages(phrases)


def _list(title: str, lines: Iterable[MessageLike], kind: str, sum_up: MessageLike = "") -> str:
    all_lines = [line for line in lines if line]
    shown = all_lines[-MAX_SHOWN:]
    if not shown:
        return ""
    more = sum_up or (
        Message("last {shown} of {every}", shown=len(shown), every=len(all_lines))
        if len(all_lines) > len(shown)
        else ""
    )
    more = f" <small{data(more)}>{html.escape(str(more))}</small>" if more else ""
    items = "".join(
        str(line) if kind == "saved" else f"<li{data(line)}>{html.escape(str(line))}</li>" for line in shown
    )
    return f'<section class="{kind}"><h3>{title}{more}</h3><ul>{items}</ul></section>'


def event_words(event: JsonObject) -> MessageLike:
    words = next((event[key] for key in ("text", "message", "reason") if event.get(key)), "")
    return words if isinstance(words, str | Message) else str(words)


def compile_line(event: JsonObject) -> MessageLike:
    """Return one line of the log: the block, the time, and the reason of a recompilation."""
    if not event.get("block"):
        return event_words(event)
    template = "{block}: forward graph" if event.get("forward", True) else "{block}: backward graph"
    line = Message(template, block=event["block"])
    if isinstance(event.get("seconds"), int | float):
        line = Message("{graph} in {seconds} s", graph=line, seconds=f"{event['seconds']:.1f}")
    for key, template in (("failed", "{graph}, failed: {why}"), ("reason", "{graph}, recompiled because: {why}")):
        if event.get(key):
            line = Message(template, graph=line, why=event[key])
    return line


def _format_bytes(count: float) -> str:
    return f"{count / 1e3:,.1f} kB" if count < 1e5 else f"{count / 1e6:,.1f} MB"


def saved(run: RecordedRun, event: JsonObject) -> str:
    """Return a saved file or state as HTML: its name, its size, and whether it loads into its model. A file is a
    download."""
    name = str(event.get("file") or event.get("path") or "")
    if not name:
        return ""
    size, path = event.get("bytes"), path_in_run(run, name)
    if not isinstance(size, int | float):
        size = path.stat().st_size if os.path.isfile(path) else 0
    line = html.escape(path.name)
    if path.suffix in paths.WEIGHTS and os.path.isfile(path):
        address = html.escape("own/run-file?" + urlencode({"run": run.id, "file": path.name}))
        line = f'<a href="{address}" download="{line}" title="Save this file">{line}</a>'
    line += f" <small>({_format_bytes(size)})</small>" if size else ""
    if "ok" in event:
        mood, mark, words = (
            ("fine", "✓", "loads") if event["ok"] else ("wrong", "✗", event_words(event) or "does not load")
        )
        verdict = join_messages([mark, words], " ")
        about = event_words(event)
        line += f' <span class="{mood}" title="{html.escape(str(about))}"{data(verdict, about)}>'
        line += f"{html.escape(str(verdict))}</span>"
    return f"<li>{line}</li>"
