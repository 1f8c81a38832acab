"""The queue's worker process, `python -m library.runs.worker`; it ends when the queue is done.

It outlives page and browser. Several may be started, but only the one with the lock works. Trainings are independent of
it; the next worker finds them by their records.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from library.config.command import is_on_cpu, named_gpus
from library.config.problems import ConfigError, Message
from library.runs import gpu_slots, layout, locking, process, queue, reader, start, webhook

PERIOD = 0.5  # seconds between two polls of the queue
HANDOVER = 5.0  # seconds that a previous worker may take to end


# A separate process outlives the page, and the lock that it holds prevents a second worker.
# Why: docs/decisions/2026-11-20-queue-is-a-file-with-a-worker.md
def main() -> int:
    """Work until no entry waits and no training of the queue is active."""
    for name in ("SIGINT", "SIGHUP"):  # the worker ignores a terminal's signals
        if number := getattr(signal, name, None):
            signal.signal(number, signal.SIG_IGN)
    with locking.hold_lock(queue.queue_folder() / "worker.lock", HANDOVER) as has_lock:
        while has_lock and advance():
            time.sleep(PERIOD)
    return 0


def advance() -> bool:
    """Record ended entries and start what can start; return whether there is more to do."""
    try:
        with queue.changing() as training_queue:
            # Before recording ends: a run that fails in between still has its devices.
            active = [run for run in reader.runs() if run.active and run.is_here]
            for entry in training_queue.entries:
                record_end(training_queue, entry)
            if not training_queue.paused:
                start_next(training_queue, active)
            works = any(entry.run and not entry.ended for entry in training_queue.entries)
            goes_on = works or bool(training_queue.waiting and not training_queue.paused)
            training_queue.worker, training_queue.called = (process.identity() if goes_on else {}), 0.0
            return goes_on
    except (ConfigError, OSError) as error:  # a full disk, or a browser that holds the lock: try again
        print(f"{time.strftime('%H:%M:%S')} {error}", file=sys.stderr, flush=True)
        return True


def record_end(training_queue: queue.Queue, entry: queue.QueueEntry) -> None:
    """Record how a training ended, and pause after a failure if configured."""
    if not entry.run or entry.ended:
        return
    state, _ = queue.state_of(entry)
    if state not in layout.FINAL:
        return
    entry.ended = state
    with contextlib.suppress(KeyError):  # a killed training could not notify it
        run = reader.find_run(entry.run)
        _in_background(webhook.tell_end, run.folder, run.facts)
    after(training_queue, entry)


def _in_background(tell: Callable[..., None], *about: object) -> None:
    # Others wait for the queue's lock meanwhile. The process ends after this thread.
    threading.Thread(target=tell, args=about, name="webhook").start()


def after(training_queue: queue.Queue, entry: queue.QueueEntry) -> None:
    """Handle an ended training of the queue."""
    if entry.ended in ("failed", "interrupted") and not training_queue.go_on:
        training_queue.paused = Message(
            "{name} has failed." if entry.ended == "failed" else "{name} was interrupted.", name=entry.name
        )
        if training_queue.waiting:
            _in_background(webhook.tell_waiting, training_queue.waiting[0].name, training_queue.paused)


def start_next(training_queue: queue.Queue, active: Sequence[reader.RecordedRun]) -> None:
    """Start entries in order as long as devices are free; an entry that waits for certain GPUs reserves them."""
    runs_by_entry = {run.facts.get("queued"): run.id for run in active}
    free = list(gpu_slots.free_devices(run.facts for run in active))
    for entry in training_queue.waiting:
        if training_queue.paused or not free:
            return
        if entry.id in runs_by_entry:  # started by a worker that ended before recording it
            entry.run = runs_by_entry[entry.id]
            continue
        try:
            devices = gpu_slots.choose_devices(entry.how, free)
            if devices:
                entry.run = start.begin_job(queue.job_of_entry(entry))
                free = [device for device in free if device not in devices]
            else:
                free = _left(entry, free)
        except ConfigError as error:
            entry.ended, entry.error = "failed", error.said
            after(training_queue, entry)


def _left(entry: queue.QueueEntry, free: list[str]) -> list[str]:
    """Return the devices left for the entries after one that waits for devices."""
    if is_on_cpu(entry.how):
        return [device for device in free if device != gpu_slots.CPU]
    if named := named_gpus(entry.how):
        return [device for device in free if device not in named]
    return [device for device in free if device == gpu_slots.CPU]


if __name__ == "__main__":
    os.chdir(queue.PROJECT_ROOT)
    sys.exit(main())
