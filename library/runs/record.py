"""The record that a training writes: its settings, its progress, and its events."""

import contextlib
import functools
import importlib.metadata
import logging
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike
from library.config.schema import flatten_sections
from library.files import write_atomic
from library.runs import job_files, layout, process, registry, restoring, webhook
from library.runs.gpu_log import GpuLog
from library.runs.refusal import Secrets

HEARTBEAT = 2.0  # seconds between two heartbeats
ROOM = 2**17  # bytes reserved on the disk for the end of a run's record
PHASE_INTERVAL = 0.5  # seconds between two lines about the same phase, as caching may report every image

STORY = "The whole story is in"  # the log
DELETED = (
    "the folder of this run was deleted while it trained; its record was written again, "
    "but files that were saved there before are lost"
)

RECORDED_PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "gradio", "kohya-trainer")


class Record:
    """The record of one running training. Only the main process of a training writes one.

    Use it as a context manager, and an exception that leaves it is recorded as the cause of the failure:

        with Record.start(changed(config), script, output_dir, output_name, title) as record:
            record.plan(1600)
            record.phase(Message("caching latents"), 3, 12)
            record.step({"step": 1, "loss": 0.12, "lr": {"unet": 1e-4}})
    """

    def __init__(self, folder: Path, facts: JsonObject, in_shell: bool, hidden: Secrets | None = None) -> None:
        self.folder, self.facts = folder, facts
        self._hidden = hidden or Secrets({})
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._phase_said: tuple[MessageLike, float] = ("", 0.0)
        self._progress: IO[str] = (folder / layout.PROGRESS).open("a+", encoding="utf-8", buffering=1)
        self._log = _follow_logging(folder / layout.LOG, self._hidden) if in_shell else None
        self._copy = restoring.FolderCopy(folder)
        self._room = folder / layout.ROOM
        with contextlib.suppress(OSError):
            self._room.write_bytes(bytes(ROOM))
        self._write()
        with contextlib.suppress(OSError, RuntimeError, ConfigError):  # the check has reported it
            registry.add_pointer(folder, facts)
        threading.Thread(target=self._beat, name="run heartbeat", daemon=True).start()
        threading.Thread(target=GpuLog(self.event, self.say, self._ended).follow, name="gpu log", daemon=True).start()

    @classmethod
    def start(
        cls, config: JsonMapping, script: str, output_dir: str | Path, output_name: str | None, title: str = ""
    ) -> "Record":
        """Create a run's folder, or take over the one prepared by the page (KOHYA_RUN_DIR).

        `config` are the non-default values, flat or by section; tokens and keys in it are not written.
        """
        prepared = os.environ.get("KOHYA_RUN_DIR", "")
        facts = layout.load_facts(Path(prepared) / layout.RUN) if prepared else {}
        in_shell = facts.get("state") != "starting"  # even if the variable is left over from an ended run
        if in_shell:
            folder = Path(output_dir).absolute() / "runs" / layout.new_id(output_name or script)
            folder.mkdir(parents=True)
            facts = {"id": folder.name, "started": time.time(), "from": "shell", "folder": str(Path.cwd())}
            job_files.record_files(flatten_sections(config, []), "", folder)
        else:
            folder = Path(prepared).absolute()
        facts |= {
            "script": script,
            "title": title,
            "state": "running",
            **process.identity(),
            "output_dir": str(Path(output_dir).absolute()),
            "output_name": output_name,
            "versions": package_versions(),
            "hardware": hardware(),
            "config": layout.without_secrets(config),
            "step": 0,
            "total_steps": 0,
            "error": None,
        }
        return cls(folder, facts, in_shell, Secrets(config))

    @property
    def id(self) -> str:
        return self.folder.name

    def plan(self, total_steps: int, **facts: Any) -> None:
        self.note(total_steps=int(total_steps), **facts)

    def note(self, **facts: Any) -> None:
        """Add facts to run.json; a mapping is merged: note(hardware={"gpu": "L40S"})."""
        with self._lock:
            for name, value in facts.items():
                existing = self.facts.get(name)
                self.facts[name] = (
                    {**existing, **value} if isinstance(existing, dict) and isinstance(value, dict) else value
                )
        self._write()

    def phase(self, name: Message, done: int | None = None, total: int | None = None) -> None:
        """Record the current phase outside of steps: `caching latents`, 312 of 1000."""
        now, (last_name, last_time) = time.monotonic(), self._phase_said
        with self._lock:
            self.facts["phase"] = {"name": name, "done": done, "total": total}
        if name != last_name or done == total or now - last_time >= PHASE_INTERVAL:
            self._phase_said = (name, now)
            self.event("phase", name=name, done=done, total=total)

    def step(self, values: JsonMapping) -> None:
        """Record a point of the loss curve: step, epoch, loss, avr_loss, lr {name: rate}, grad_norm, s_it, eta
        (seconds).
        """
        with self._lock:
            self.facts |= {"step": int(values.get("step", self.facts["step"])), "phase": None}
        self._phase_said = ("", 0.0)
        self.event("step", **values)

    def event(self, kind: str, **data: Any) -> None:
        """Record any other event: compile, saved, sample, warning, error."""
        event = {"t": round(time.time(), 3), "kind": kind, **data}
        line = self._hidden.redact(layout.dump(event))
        # A full disk ends the training when it saves, not when it logs a line.
        with self._lock, contextlib.suppress(OSError):
            latest = self.facts.get("latest", {})
            # The first prompt of a step stands for all, as the last ones often show what should stay as it was.
            repeated = kind == "sample" and latest.get("sample", {}).get("step") == event.get("step")
            if numbers := {} if repeated else layout.latest_of(kind, event):
                self.facts["latest"] = {**latest, **numbers}
            if not self._progress.closed:
                self._progress.write(line + "\n")

    def say(self, line: MessageLike) -> None:
        """Print a line that is also kept in log.txt, whoever started the run."""
        text = str(line)
        with contextlib.suppress(OSError):  # a closed terminal, or a pipe without a reader
            print(self._hidden.redact(text) + "\n", end="", flush=True)  # one write, as threads may print
        if self._log:
            self._keep(text + "\n")

    def _keep(self, text: str) -> None:
        """Append text to the log, unless the console of a page-started run already goes there."""
        with contextlib.suppress(OSError):
            if self._log and self._log.append(self._hidden.redact(text)):
                return
            with (self.folder / layout.LOG).open("a", encoding="utf-8") as log:
                log.write(self._hidden.redact(text))

    def stop_requested(self) -> str:
        """Return the requested stop, one of layout.STOPS. Accesses the disk once per call."""
        request = layout.stop_asked(self.folder)
        with self._lock:
            if request and self.facts["state"] == "running":
                self.facts["state"] = "stopping"
        return request

    def requests(self) -> list[str]:
        """Return pending requests of layout.REQUESTS, and delete them from the disk."""
        pending = []
        for request in layout.REQUESTS:
            with contextlib.suppress(OSError):
                layout.request_file(self.folder, request).unlink()
                pending.append(request)
        return pending

    def stopping(self, how: str = "after_step") -> None:
        """Record a requested stop; one by signal looks the same to readers as one by file."""
        with contextlib.suppress(OSError, ConfigError):
            if layout.STOPS.index(layout.stop_asked(self.folder)) < layout.STOPS.index(how):
                write_atomic(self.folder / layout.STOP, how)
            self.stop_requested()

    def finish(self, state: str, error: MessageLike | None = None) -> None:
        """Close the record as finished, stopped or failed, with the cause in one sentence. Only the first
        call counts.
        """
        if state not in layout.FINAL:
            raise ValueError(f"A run ends as one of {', '.join(layout.FINAL)}, not as {state!r}.")
        with self._lock:
            if self._ended.is_set():
                return
            self._restore()
            self._ended.set()
            with contextlib.suppress(OSError):  # frees reserved space, so that the end is recorded on a full disk, too
                self._room.unlink(missing_ok=True)
            if error:
                redact = self._hidden.redact
                error = error.changed(redact) if isinstance(error, Message) else redact(error)
                self.event("error", text=error)
            self.facts |= {"state": state, "error": error, "ended": time.time(), "phase": None}
            with contextlib.suppress(OSError):
                self._progress.close()
        self._write()
        self._copy.close()
        if self._log:
            logging.getLogger().removeHandler(self._log)
            self._log.close()

        webhook.tell_end(self.folder, self.facts)

    def __enter__(self) -> "Record":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish("stopped" if self.facts["state"] == "stopping" else "finished")
        elif isinstance(error, KeyboardInterrupt):
            self.finish("stopped")
        elif isinstance(error, SystemExit) and not error.code:
            self.finish("finished")
        else:
            self._keep("".join(traceback.format_exception(error)))
            self.finish("failed", error_sentence(error))
            if not isinstance(error, ConfigError):
                error.add_note(f"{STORY} {self.folder / layout.LOG}")

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT):
            with self._lock:
                self._restore()
            self._write()

    def _restore(self) -> None:
        """Write the run's folder again if it was deleted."""
        # The run must stay visible as long as it is active.
        self._copy.update()
        if self._progress.closed or restoring.is_same(self._progress, self.folder / layout.PROGRESS):
            return
        with contextlib.suppress(OSError, ConfigError):  # after an unmount the next heartbeat tries again
            self._copy.restore()
            self._progress = restoring.copied(self._progress, self.folder / layout.PROGRESS)
            if self._log:
                self._log.close_until_next_line()
            if not self.facts.get("restored"):
                self.event("warning", text=Message(DELETED))
                self.say(f"warning: {DELETED}: {self.folder}")
            self.facts["restored"] = time.time()

    def _write(self) -> None:
        with self._lock:
            self.facts["heartbeat"] = time.time()
            try:
                layout.store(self.folder / layout.RUN, self.facts)
            except (OSError, ConfigError):  # after a full disk or a reader's open file the next heartbeat tries again
                logging.getLogger(__name__).debug("run.json could not be written", exc_info=True)


def error_sentence(error: BaseException) -> MessageLike:
    """Return an exception as a sentence for users: a ConfigError's own, others preceded by their type."""
    if isinstance(error, ConfigError):
        return error.said
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@functools.cache
def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a record names; packages that are missing are left out."""
    # From metadata, so that nothing heavy is imported.
    versions = {"python": platform.python_version()}
    for name in RECORDED_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def hardware() -> JsonObject:
    memory = psutil.virtual_memory().total / 2**30
    return {"system": platform.platform(), "cpus": os.cpu_count(), "memory_gb": round(memory, 1)}


class _LogFile(logging.FileHandler):
    """A log file that silently drops lines on a full disk."""

    def append(self, text: str) -> bool:
        """Write text unchanged; return False if the file is closed."""
        with self._locked():
            if not self.stream:
                return False
            self.stream.write(text)
            self.flush()
            return True

    def close_until_next_line(self) -> None:
        """Close a deleted file; the next logged line opens a new one."""
        with self._locked():
            if self.stream:
                self.stream.close()
                self.stream = None  # type: ignore[assignment]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # The heartbeat closes the file in one thread while the training writes to it in another.
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - of the standard library
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _Lines(logging.Formatter):
    def __init__(self, hidden: Secrets) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
        self._hidden = hidden

    def format(self, record: logging.LogRecord) -> str:
        return self._hidden.redact(super().format(record))


def _follow_logging(path: Path, hidden: Secrets) -> "_LogFile":
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(_Lines(hidden))
    logging.getLogger().addHandler(handler)
    return handler
