"""Events as a stream (SSE): new states of runs, their steps, and changes of the queue."""

import asyncio
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Problem
from library.runs import layout, overview, queue

EVENT_INTERVAL = 1.0  # seconds between two polls of the runs
KEEPALIVE = 15.0  # seconds after which a stream without events sends a comment, so that proxies keep it
MAX_STREAMS = 16  # maximum open streams
MAX_KEPT = 2000  # events that are kept, from which a stream can continue
MAX_SECONDS = 86_400.0


@dataclass(frozen=True)
class StreamEvent:
    """One event of the stream."""

    id: str
    kind: str
    content: JsonObject

    def lines(self) -> str:
        """Return the event as SSE."""
        return f"id: {self.id}\nevent: {self.kind}\ndata: {json.dumps(self.content, default=str)}\n\n"


class EventLog:
    """The newest events, for all streams. Polls the runs only while a stream is open, at most once a second."""

    def __init__(self) -> None:
        self.events: deque[StreamEvent] = deque(maxlen=MAX_KEPT)
        self.open = 0
        self._session, self._number, self._looked = secrets.token_hex(4), 0, 0.0
        self._states: dict[str, str] = {}
        self._steps: dict[str, int] = {}
        self._queue: tuple[int, int, int] | None = None
        self._lock = threading.Lock()

    def look(self) -> None:
        """Add an event for each change since the last poll."""
        with self._lock:
            if time.monotonic() - self._looked < EVENT_INTERVAL / 2:
                return
            is_first, self._looked = not self._looked, time.monotonic()
            changes = self._changes()
            for kind, content in () if is_first else changes:  # on the first poll everything looks changed
                self._number += 1
                self.events.append(StreamEvent(f"{self._session}-{self._number}", kind, content))

    def _changes(self) -> list[tuple[str, JsonObject]]:
        """Store the current states, and return those that have changed."""
        changes, summaries = list[tuple[str, JsonObject]](), overview.overview()
        for run in reversed(summaries):
            if self._states.get(run.id) != run.state:
                self._states[run.id] = run.state
                changes.append(("run", _run_facts(run)))
            if self._steps.get(run.id, 0) != run.steps_done:
                self._steps[run.id] = run.steps_done
                changes.append(("step", _step_facts(run)))
        for gone in self._states.keys() - {run.id for run in summaries}:
            del self._states[gone]
            changes.append(("run", {"run": gone, "state": "removed"}))
        written = layout.signature(str(queue.queue_folder() / "queue.json"))
        if written != self._queue:
            self._queue = written
            changes.append(("queue", _queue_facts()))
        return changes

    def after(self, last: str) -> list[StreamEvent] | None:
        """Return the events after the one with this id; None if it was dropped."""
        session, _, number = last.rpartition("-")
        if session != self._session or not number.isdecimal():
            return None
        missed = self._number - int(number)
        events = list(self.events)
        return events[len(events) - missed :] if 0 <= missed <= len(events) else None

    def snapshot(self) -> StreamEvent:
        """Return the current states, the first event of a stream that does not continue another."""
        active = [{**_run_facts(run), **_step_facts(run)} for run in overview.overview() if run.active]
        return StreamEvent(f"{self._session}-{self._number}", "snapshot", {"runs": active, "queue": _queue_facts()})


def _run_facts(run: overview.RunSummary) -> JsonObject:
    facts = {name: getattr(run, name) for name in ("name", "state", "steps_done", "steps_total", "error")}
    return {"run": run.id, **facts}


def _step_facts(run: overview.RunSummary) -> JsonObject:
    facts = {name: getattr(run, name) for name in ("steps_done", "steps_total", "loss", "speed", "eta")}
    return {"run": run.id, **facts}


def _queue_facts() -> JsonObject:
    now = queue.read_queue()
    return {"waiting": len(now.waiting), "paused": str(now.paused), "halted": now.halted}


def router() -> APIRouter:
    """Return the route of events."""
    routes, log = APIRouter(tags=["events"]), EventLog()
    about = (
        "Server-sent events: `snapshot` first (active runs and the queue), then `run` (a new state), `step`, `queue`. "
        "A stream that sends Last-Event-ID continues after that event; if it is forgotten, a snapshot comes again."
    )

    @routes.get(
        "/events",
        operation_id="stream_events",
        summary="Changes as a stream",
        description=about,
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}, "description": about}, 429: {"description": "Too many"}},
    )
    async def stream_events(
        last_event_id: Annotated[str, Header(max_length=60)] = "",
        seconds: Annotated[
            float, Query(ge=0, le=MAX_SECONDS, description="End the stream after so long")
        ] = MAX_SECONDS,
    ) -> Any:
        if log.open >= MAX_STREAMS:
            template = "No more than {most} streams can be open: close one."
            raise ConfigError(Problem("", template, most=MAX_STREAMS, code="too_many"))
        headers = {"cache-control": "no-store", "content-encoding": "identity", "x-accel-buffering": "no"}
        stream = _stream(log, last_event_id, time.monotonic() + seconds)
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    return routes


async def _stream(log: EventLog, last: str, end: float) -> AsyncIterator[str]:
    """Yield the events of one stream until its end, or until its reader disconnects."""
    log.open += 1
    try:
        await run_in_threadpool(log.look)
        if not last or log.after(last) is None:
            first = await run_in_threadpool(log.snapshot)
            last = first.id
            yield first.lines()
        last_sent = time.monotonic()
        while True:
            await run_in_threadpool(log.look)
            fresh = log.after(last)
            if fresh is None:
                fresh = [await run_in_threadpool(log.snapshot)]
            for event in fresh:
                last, last_sent = event.id, time.monotonic()
                yield event.lines()
            if time.monotonic() >= end:
                return
            if time.monotonic() - last_sent > KEEPALIVE:
                last_sent = time.monotonic()
                yield ": still here\n\n"
            await asyncio.sleep(min(EVENT_INTERVAL, max(0.0, end - time.monotonic())))
    finally:
        log.open -= 1
