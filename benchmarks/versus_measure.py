"""Measure a training in a separate process from outside, in the same way for every program."""

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MEMORY_INTERVAL = 0.2  # seconds between two readings of the GPU's memory
LOSS = re.compile(r"(?:avr_loss=|\(average )([0-9.]+|nan)")  # mean of the epoch so far: tqdm's, and this trainer's
NOISE = re.compile(r"^\s*(?:File \"|\^+|warnings\.warn|\S+%\||$)")


@dataclass
class PrintedSteps:
    """Notes the time of each step from a training's output."""

    steps: int
    began: float
    seen: dict[int, float] = field(default_factory=dict)  # step -> seconds since the start
    _rest: str = ""

    def feed(self, text: str, now: float) -> None:
        """Read more output. tqdm's bars print `12/60`, this trainer `step 12/60`."""
        self._rest += text
        for match in re.finditer(rf"(?<![\d/.])(\d+)/{self.steps}(?=[\s,\[\]])", self._rest):
            if 1 <= int(match[1]) <= self.steps:
                self.seen.setdefault(int(match[1]), now - self.began)
        self._rest = self._rest[-40:]

    def facts(self) -> dict[str, float]:
        """Return the seconds until the end of the first step, and per step over the second half."""
        if not self.seen:
            return {}
        facts = {"first_step_s": round(min(self.seen.values()), 1)}
        last = max(self.seen)
        first = min((step for step in self.seen if step >= self.steps / 2), default=last)
        if last > first:
            facts["s_it"] = round((self.seen[last] - self.seen[first]) / (last - first), 4)
        return facts


class GpuMemory:
    """Polls the driver for peak memory of whole GPUs; empty without a GPU."""

    def __init__(self, shown: Sequence[str]) -> None:
        self._peaks: dict[str, float] = {}
        self._shown = shown
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "GpuMemory":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def peak(self) -> float | list[float] | None:
        """Return the peak in GiB: of the GPU, or of each of several."""
        peaks = [self._peaks[index] for index in self._shown if index in self._peaks]
        return peaks if len(peaks) > 1 else next(iter(peaks), None)

    def _watch(self) -> None:
        from library.runs.machine import read_gpus

        while not self._stop.wait(MEMORY_INTERVAL):
            for gpu in read_gpus():
                if gpu.index in self._shown:
                    self._peaks[gpu.index] = max(self._peaks.get(gpu.index, 0.0), gpu.used)


def measure_training(
    command: list[str], steps: int, log: Path, environment: dict[str, str], folder: Path, limit: float
) -> dict[str, Any]:
    """Run a training to its end, for at most `limit` seconds; return its figures, and the reason if it failed. Memory
    is that of the GPUs visible to it, by default the first."""
    began = time.monotonic()
    gpus = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    progress, expired = PrintedSteps(steps, began), threading.Event()
    with GpuMemory(gpus) as memory, log.open("wb") as log_file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

        def end() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(limit, end)
        timer.start()
        try:
            assert process.stdout
            while data := os.read(process.stdout.fileno(), 1 << 16):
                log_file.write(data)
                log_file.flush()
                progress.feed(data.decode("utf-8", "replace").replace("\r", "\n"), time.monotonic())
            code = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                process.kill()
    text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    training = {
        "wall_s": round(time.monotonic() - began, 1),
        "gib": memory.peak(),
        **progress.facts(),
        **read_log(text),
    }
    if expired.is_set():
        training["failed"] = f"not done after {limit:.0f} s"
    elif code:
        training["failed"] = last_words(text) or f"exit code {code}"
    return training


def read_log(text: str) -> dict[str, Any]:
    """Return the final mean loss and the compile time of a log."""
    losses, compiled = LOSS.findall(text), re.findall(r"Compiled: (\d+ graphs .* in [\d.]+ s)", text)
    facts: dict[str, Any] = {"loss": float(losses[-1])} if losses else {}
    return facts | ({"compiled": compiled[-1]} if compiled else {})


def last_words(text: str) -> str:
    """Return the last line of a log that names an error, or else its last non-empty line."""
    lines = [line.strip() for line in text.splitlines() if not NOISE.match(line)]
    errors = [line for line in lines if re.match(r"(?:\w+\.)*\w*(?:Error|Exception|Exit)\b.*:|error:|.*: error:", line)]
    return (errors or lines or [""])[-1][:200]


def versions_of_program(python: str, environment: dict[str, str]) -> dict[str, str]:
    """Return the versions of a program's packages."""
    names = ["torch", "transformers", "diffusers", "accelerate"]
    code = "import importlib.metadata as m, json, sys\nfound = {'python': sys.version.split()[0]}\n"
    code += f"for name in {names}:\n    try: found[name] = m.version(name)\n    except m.PackageNotFoundError: pass\n"
    done = subprocess.run(
        [python, "-c", code + "print(json.dumps(found))"], capture_output=True, text=True, env=environment, check=False
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 and done.stdout else {}
