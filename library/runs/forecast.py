"""Forecast the start, end and devices of the queue's entries."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from library.config.command import is_on_cpu, named_gpus
from library.config.json_types import JsonMapping, as_float
from library.runs import gpu_slots, layout, reader
from library.runs.queue import Queue, QueueEntry


@dataclass(frozen=True)
class Expected:
    """The forecast of an entry: start and end in seconds since 1970, None if unknown."""

    start: float | None = None
    end: float | None = None
    devices: tuple[str, ...] = ()


def seconds_of_entry(entry: QueueEntry, runs: Iterable[reader.RecordedRun]) -> float | None:
    """Return how long an entry will take: by the check's estimate, else by the speed of the newest run like it."""
    pace = entry.step_seconds or next((pace for run in runs if (pace := _pace_like(entry, run))), 0.0)
    return entry.steps * pace if entry.steps and pace else None


def _pace_like(entry: QueueEntry, run: reader.RecordedRun) -> float:
    if run.facts.get("script") != entry.script or run.facts.get("title") != entry.title or not run.is_here:
        return 0.0
    return as_float(reader.progress(run.folder).update().last.get("s_it"))


def seconds_left(run: reader.RecordedRun) -> float | None:
    """Return the seconds that an active run has left, None before it knows."""
    last = reader.progress(run.folder).update().last
    eta, at = last.get("eta"), last.get("t")
    if not isinstance(eta, int | float) or not isinstance(at, int | float) or not math.isfinite(eta - at):
        return None
    return max(0.0, eta - (now() - at)) if layout.stop_asked(run.folder) == "" else 0.0


def now() -> float:
    return time.time()


def expected_times(queue: Queue, runs: Sequence[reader.RecordedRun]) -> dict[str, Expected]:
    """Return the forecast of each waiting entry by id, for an unchanged queue."""
    all_devices, expected = gpu_slots.devices(), dict[str, Expected]()
    free_at = _free_at(queue, runs, (*all_devices, gpu_slots.CPU))
    is_stopped = bool(queue.paused) or queue.halted
    for entry in queue.waiting:
        devices = _devices(entry.how, free_at, all_devices)
        start = max((free_at.get(device, math.inf) for device in devices), default=math.inf)
        end = start + (seconds_of_entry(entry, runs) or math.inf)
        if len(devices) > 1 and not named_gpus(entry.how):  # it blocks all GPUs for others until enough are free
            free_at |= {device: max(free_at[device], start) for device in all_devices}
        free_at |= dict.fromkeys(devices, end)
        expected[entry.id] = Expected(devices=devices) if is_stopped else Expected(_known(start), _known(end), devices)
    return expected


def _free_at(queue: Queue, runs: Sequence[reader.RecordedRun], devices: Iterable[str]) -> dict[str, float]:
    """Return the moment from which each device is free of the active runs, infinity if unknown."""
    free_at, entries = dict.fromkeys(devices, now()), {entry.run: entry for entry in queue.entries if entry.run}
    for run in (run for run in runs if run.active and run.is_here):
        left = seconds_left(run)
        if left is None and (entry := entries.get(run.id)) and (whole := seconds_of_entry(entry, runs)):
            left = max(0.0, whole - (now() - run.facts.get("started", now())))
        end = math.inf if left is None else now() + left
        devices = map(str, run.facts.get("devices") or list(free_at))
        free_at |= {device: max(free_at.get(device, end), end) for device in devices}
    return free_at | dict.fromkeys(gpu_slots.held_devices(), math.inf)


def _known(moment: float) -> float | None:
    return moment if math.isfinite(moment) else None


def _devices(launch_options: JsonMapping, free_at: dict[str, float], all_devices: Sequence[str]) -> tuple[str, ...]:
    """Return the devices that an entry gets: those it names, or the first to be free."""
    if is_on_cpu(launch_options) or tuple(all_devices) == (gpu_slots.CPU,):
        return (gpu_slots.CPU,)
    if named := named_gpus(launch_options):
        return tuple(named)
    count = gpu_slots.wanted_gpus(launch_options, len(all_devices))
    first_free = sorted(all_devices, key=lambda device: free_at[device])[:count]
    return tuple(device for device in all_devices if device in first_free)
