"""The benchmark itself: every part, at every size, with every setting; the result file grows meanwhile."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from library.bench import machine, prepared_model, report
from library.bench.images import ImageBench, image_ways
from library.bench.report import BLOCKS, DECODE, ENCODE, ENCODERS, SAMPLE, STEP
from library.bench.subjects import FamilySubject, Subject
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message
from library.jobs.work import JobRecord
from library.measuring import timing
from library.measuring.candidates import Candidate
from library.measuring.shapes import flops
from library.memory.quantization import fp8_storage

SCHEMA = 1


@dataclass
class BenchRun:
    """What to measure and how, and the results."""

    subject: Subject
    device: torch.device
    candidates: Sequence[Candidate]
    parts: Sequence[str]
    resolutions: Sequence[int]
    plan: timing.TimingPlan
    compile_all: bool = False  # compile text encoders and VAE, too, which a training runs eagerly
    say: Callable[[str], None] = print
    ways: Sequence[str] | None = None  # ways to generate images; None: all of this device
    rows: list[JsonObject] = field(default_factory=list)
    rate: JsonObject = field(default_factory=dict)

    def run(self, work: JobRecord) -> JsonObject:
        """Measure everything; if interrupted, the result file holds what was measured."""
        todo = list(self._todo())
        plain = self.subject.config({})
        began, total = time.time(), len(todo)
        work.phase(Message("the rate of matrix products"), 0, total)
        self.rate = timing.matmul_rate(self.device, fp8_storage.compute_type(plain))
        try:
            for number, (row_start, act) in enumerate(todo):
                work.phase(measurement_title(row_start), number, total)
                for row in self._careful(row_start, act):
                    self.rows.append(row)
                    self.say(report.measurement_line(row))
                work.store(self.result(began, finished=False))
        except KeyboardInterrupt:
            work.store(self.result(began, finished=False))
            raise
        work.store(result := self.result(began, finished=True))
        return result

    def result(self, began: float, finished: bool) -> JsonObject:
        """Return the result as in the file; docs/bench.md explains each entry."""
        content = {
            "kind": "bench",
            "schema": SCHEMA,
            "started": began,
            "seconds": round(time.time() - began, 1),
            "finished": finished,
            "subject": {"title": self.subject.title, "batch": self.subject.batch, **self.subject.about},
            "machine": machine.measured_machine(self.device),
            "matmul": self.rate,
            "candidates": {c.name: {"about": c.about, "options": c.chosen()} for c in self.candidates},
            "results": self.rows,
        }
        return content | {"best": report.best(content)}

    # ---- units of measurement

    def _todo(self) -> Iterator[tuple[JsonObject, Callable[[], Iterator[JsonObject]]]]:
        """Yield units of measurement: the start of their row, and the function that measures them."""
        has_images = SAMPLE in self.parts and isinstance(
            self.subject, FamilySubject
        )  # text encoding and decoding included
        if ENCODERS in self.parts or has_images:
            for name in self.subject.encoders():
                yield {"part": f"text encoder {name}", "candidate": "eager"}, lambda name=name: self._encoder(name)
        for part in (ENCODE, DECODE):
            for at in self.resolutions if part in self.parts or (has_images and part == DECODE) else ():
                row = {"part": part, "resolution": at, "candidate": "eager"}
                yield row, lambda part=part, at=at: self._vae(part, at)
        if SAMPLE in self.parts and isinstance(self.subject, FamilySubject):
            for resolution in self.resolutions:
                bench = ImageBench(self.subject, self.device, self.plan, resolution)
                for way in image_ways(self.device) if self.ways is None else self.ways:
                    row = {"part": SAMPLE, "resolution": resolution, "candidate": way}
                    yield row, lambda way=way, bench=bench: bench.rows(way)
        if BLOCKS in self.parts or STEP in self.parts:
            for resolution in self.resolutions:
                costs: list[prepared_model.StepCost] = []  # counted with the first candidate for all of this size
                for candidate in self.candidates:
                    row = {"part": STEP, "resolution": resolution, "candidate": candidate.name}
                    yield row, lambda c=candidate, at=resolution, costs=costs: self._training(c, at, costs)

    def _careful(self, row: JsonObject, act: Callable[[], Iterator[JsonObject]]) -> Iterator[JsonObject]:
        """Run one measurement; an error becomes its result, and the others continue."""
        try:
            yield from act()
        except Exception as error:
            status = "skipped" if isinstance(error, ConfigError) else "failed"
            yield {**row, "status": status, "why": timing.measuring_failure(error)}
        finally:
            timing.release_memory(self.device)

    # ---- the parts

    def _encoder(self, name: str) -> Iterator[JsonObject]:
        config = self.subject.config({})
        dtype = fp8_storage.compute_type(config)
        call = self.subject.encoders()[name](self.device, dtype)
        yield from self._plain({"part": f"text encoder {name}"}, call)

    def _vae(self, part: str, resolution: int) -> Iterator[JsonObject]:
        config = self.subject.config({})
        dtype = torch.float32 if config.model.float32_vae else fp8_storage.compute_type(config)
        vae: Any = self.subject.vae(self.device, dtype)
        if vae is None:
            return
        shape = (self.subject.batch, 3, resolution, resolution)
        if part == DECODE:
            # Latents of all families have an eighth of an image's side.
            shape = (self.subject.batch, vae.config.latent_channels, resolution // 8, resolution // 8)
        values = torch.randn(shape, device=self.device, dtype=dtype)
        call = (lambda: vae.encode(values)) if part == ENCODE else (lambda: vae.decode(values))
        yield from self._plain({"part": part, "resolution": resolution}, call)

    def _plain(self, row: JsonMapping, call: Callable[[], Any]) -> Iterator[JsonObject]:
        """Measure parts without trained parameters, eager and optionally compiled."""
        eager = self._row({**row, "candidate": "eager"}, _no_grad(call))
        yield eager
        if self.compile_all:
            backend = self.subject.config({}).compile.compile_backend
            compiled = torch.compile(call, dynamic=False, backend=backend)
            yield self._row({**row, "candidate": "compiled"}, _no_grad(compiled), eager.get("flops"))

    def _training(self, candidate: Candidate, at: int, costs: list[prepared_model.StepCost]) -> Iterator[JsonObject]:
        """Measure blocks, then the whole step, with one candidate."""
        where = {"resolution": at, "candidate": candidate.name}
        config = self.subject.config(candidate.chosen())
        trainable = self.subject.make(config, self.device)
        if not costs:
            costs.append(prepared_model.count_step(self.subject, trainable, config, at))
        with prepared_model.open_prepared(self.subject, config, self.device, at, trainable) as ready:
            del trainable  # `ready` alone keeps the model now, and frees it when it is closed
            # In a model compiled as a whole, a block has no graph of its own.
            measures_blocks = BLOCKS in self.parts and not (
                config.compile.compile and config.compile.compile_scope == "model"
            )
            for kind, (path, call) in (costs[0].blocks if measures_blocks else {}).items():
                row = {"part": f"block {kind}", **where}
                yield self._row(row, ready.block(path, call), costs[0].block_flops[kind], ready)
            if STEP in self.parts:
                yield self._row({"part": STEP, **where}, ready.step, costs[0].step, ready)

    def _row(
        self,
        row: JsonMapping,
        call: Callable[[], Any],
        operations: int | None = None,
        ready: prepared_model.PreparedModel | None = None,
    ) -> JsonObject:
        seconds_before = ready.compiling().get("compile", {}).get("seconds", 0.0) if ready else 0.0
        try:
            measured = timing.measure_call(call, self.device, self.plan)
        except torch.OutOfMemoryError as error:
            return {**row, "status": "failed", "why": timing.measuring_failure(error)}
        operations = operations or (None if ready else flops(call))
        row = {**row, "status": "ok", **measured.facts(), **report.compute_rates(operations, measured.p50, self.rate)}
        if ready:
            row |= ready.compiling()
            if "compile" in row:
                row["compile"]["seconds_here"] = round(row["compile"]["seconds"] - seconds_before, 2)
        return row


def measurement_title(row: JsonMapping) -> Message:
    """Return a progress line."""
    what = row["candidate"] if row["part"] in (STEP, SAMPLE) else Message(row["part"])
    size = row.get("resolution")
    return Message("{what}", what=what) if size is None else Message("{what} at {size}", what=what, size=size)


def _no_grad(call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        with torch.no_grad():
            call()

    return run
