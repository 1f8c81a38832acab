"""The log of compilations: which block caused which graph, why, and how long it took."""

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from library.compiler import torch_private
from library.compiler.speedup import Speedup
from library.config.json_types import JsonObject
from library.config.problems import Message, MessageLike, Report, counted

MAX_TORCH_EVENTS = 4096  # events that PyTorch buffers for us; one step can produce more than its default of 64

RESUMED = "torch_dynamo_resume_in_"  # PyTorch's name prefix for the rest of a function after a graph break


@dataclass(frozen=True)
class CompiledGraph:
    """One compiled graph. `reason` says why it was recompiled; it is empty for the first of its kind."""

    block: str
    graph: str  # PyTorch's id, "frame/attempt"
    forward: bool
    seconds: float
    reason: str
    cache_hits: int
    failed: str
    total: float  # seconds of compiling so far, this graph included
    bucket: str = ""  # image size of its first batch, such as 1024x768


# PyTorch's callbacks do not name the block, so blocks hold the log and report to it.
# Why: docs/decisions/2026-11-22-compile-log-is-handed-on.md
class CompileLog:
    """Expected and actual graphs of one training or measurement.

    The caller creates a log and passes it to `compile_model`, which starts listening. Closing it stops that and
    discards all compiled code, so that the next log of this process starts from zero.
    """

    def __init__(self, on_graph: Report | None = None) -> None:
        """`on_graph` is called when a graph is begun, with "compiling" and the block's class, its number, and the
        total.
        """
        self.on_graph = on_graph
        self.events: list[CompiledGraph] = []
        self.expected: dict[str, list[Hashable]] = {}  # class of block -> the shape of each block
        self.fallback: MessageLike = ""  # why compiled blocks were abandoned, if they were
        self.attention = ""  # the attention kernel that was put first, on a GPU
        self.speedup = Speedup()
        self.later: set[str] = set()  # expected classes whose blocks still run eagerly, as the plan decides
        self.buckets: dict[str, None] = {}  # of all batches so far, the current one last
        self._inside = ""
        self._owner: dict[str, str] = {}
        self._buckets: dict[str, str] = {}
        self._sizes: dict[tuple[str, Hashable], int] = {}
        self._listening = False
        self._resumed: list[str] = []  # places where a graph had to end and another continues
        self._drained = 0  # events that `drain` has returned
        self._apart: CompileLog | None = None  # the log that records at present, instead of this one

    def __enter__(self) -> "CompileLog":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompileLog":
        return self  # compiled blocks hold it, and copies of them run in the same process

    @property
    def bucket(self) -> str:
        return next(reversed(self.buckets), "")

    @bucket.setter
    def bucket(self, bucket: str) -> None:
        self.buckets.pop(bucket, None)
        self.buckets[bucket] = None

    @contextlib.contextmanager
    def inside(self, kind: str) -> Iterator[None]:
        """Attribute whatever is compiled in this context to a block of this class."""
        before, self._inside = self._inside, kind
        try:
            yield
        finally:
            self._inside = before

    def expect(self, kind: str, shape: Hashable, sizes: int = 1) -> None:
        """Register a block of this class to be compiled. Blocks of equal shape share their graphs.

        Each has one graph per size if `sizes` are compiled separately.
        """
        self.expected.setdefault(kind, []).append(shape)
        self._sizes[kind, shape] = sizes

    # PyTorch runs blocks eagerly beyond its limit of 8 graphs, so the number must be known beforehand.
    # Why: docs/decisions/2026-11-20-graphs-are-predicted.md
    def predicted(self) -> dict[str, int]:
        return {kind: sum(self._sizes[kind, shape] for shape in set(shapes)) for kind, shapes in self.expected.items()}

    def due_for_one_size(self) -> int:
        """Number of graphs that a batch of one size needs now, without blocks that are compiled in later steps."""
        # While another process compiles, every block is still in `later`, and all graphs count.
        needed = {kind: len(set(shapes)) for kind, shapes in self.expected.items()}
        return sum(number for kind, number in needed.items() if kind not in self.later) or sum(needed.values())

    def recompilations(self) -> list[CompiledGraph]:
        """Return unpredicted recompilations; those for separately compiled sizes were predicted."""
        foreseen = Counter({kind: number - len(set(self.expected[kind])) for kind, number in self.predicted().items()})
        unpredicted = []
        for event in (e for e in self.events if e.reason and not e.failed):
            foreseen[event.block] -= 1
            unpredicted += [event] if foreseen[event.block] < 0 else []
        return unpredicted

    def listen(self) -> None:
        """Start to record compilations. Idempotent; `torch.compiler.reset()` ends it."""
        if self._listening:
            return
        torch_private.listen_to_compiler(self._started, MAX_TORCH_EVENTS)
        self._listening = True

    def drain(self) -> list[CompiledGraph]:
        """Return the graphs compiled since the last call."""
        self._take()
        before, self._drained = self._drained, len(self.events)
        return self.events[before:]

    def _take(self) -> None:
        log = self._apart or self
        for metrics in torch_private.take_compilations() if self._listening else ():
            log.events.append(log._read(metrics))

    @contextlib.contextmanager
    def hand_over(self, log: "CompileLog") -> Iterator[None]:
        """Let `log` record what is compiled in this context, so that it does not count here."""
        self._take()
        self._apart = log
        try:
            yield
        finally:
            self._take()
            self._apart = None

    def close(self) -> None:
        """Stop listening, and discard PyTorch's compiled code and its failed attempts. Idempotent."""
        if self._listening or self.fallback:
            torch.compiler.reset()
            torch.compiler.set_stance("default")
        self._listening = False

    @property
    def seconds(self) -> float:
        return self.events[-1].total if self.events else 0.0

    def curves(self) -> dict[str, float]:
        """Return values for the tracker's curves after a step, empty without compiled blocks."""
        if not self.expected or self.fallback:
            return {}
        saved = {"compile/saved_seconds": round(self.speedup.gained - self.seconds, 2)} if self.speedup.eager else {}
        return {"compile/seconds": round(self.seconds, 2), **saved}

    def sentence(self) -> str:
        """Summarise the cost and gain of compiling at the end of a run."""
        total = self.summary()
        if not total["num_graphs"] or self.fallback:
            return ""
        first = (
            f"Compiling took {self.seconds:.1f} s for {counted(total['num_graphs'], 'graph')}, "
            f"{total['recompiles']} recompiled."
        )
        return f"{first} {self.speedup.sentence(self.seconds)}".strip()

    def unproven(self) -> list[str]:
        """Return classes that should be compiled but have no graph. Call it after a step in which all blocks ran."""
        compiled = {e.block for e in self.events if not e.failed}
        return [kind for kind in self.expected if kind not in compiled and kind not in self.later]

    # After a break PyTorch runs parts of a block eagerly, or all of it, and still counts a graph.
    # Why: docs/decisions/2026-11-20-graph-breaks-are-reported.md
    def graph_breaks(self) -> list[str]:
        """Return the reasons of graph breaks. The code around one runs eagerly, and PyTorch does not warn."""
        breaks = torch_private.compile_counters("graph_break") if self._listening else {}
        return [*(reason.partition("\n")[0].strip() for reason in breaks), *self._resumed]

    def summary(self) -> JsonObject:
        """Return totals for the log and the run's record."""
        good = [e for e in self.events if not e.failed]
        return {
            "blocks": {kind: len(shapes) for kind, shapes in self.expected.items()},
            "predicted": self.predicted(),
            "graphs": dict(Counter(e.block for e in good if e.forward)),
            "num_graphs": sum(e.forward for e in good),
            "recompiles": len(self.recompilations()),
            "seconds": round(self.seconds, 2),
            "cache_hits": sum(e.cache_hits for e in good),
            "fallback": self.fallback,
            **({"attention": self.attention} if self.attention else {}),
            **self.speedup.facts(self.seconds),
        }

    def _started(self, graph: str) -> None:
        if self._apart:
            self._apart._started(graph)
            return
        number = len(self._owner)
        self._owner.setdefault(graph, self._inside)
        self._buckets.setdefault(graph, self.bucket)
        if self.on_graph and self._inside and len(self._owner) > number:
            begun, message = len(self._owner), Message("compiling {block}", block=self._inside)
            self.on_graph(message, begun, max(self.due_for_one_size(), begun))

    def _read(self, m: Any) -> CompiledGraph:
        graph, seconds = str(m.compile_id), (m.duration_us or 0) / 1e6
        if (place := (m.co_name or "").removeprefix(RESUMED)) != (m.co_name or ""):
            self._resumed.append(f"it ends before line {place.rpartition('_')[2]} of {place.rpartition('_at_')[0]}")
        first = f"{graph.partition('/')[0]}/0"  # so the block is known even if a recompilation fails before it begins
        return CompiledGraph(
            block=self._owner.get(graph) or self._owner.get(first) or m.co_name or "?",
            graph=graph,
            # Autotuning of a kernel at its first run on a GPU is an event, too: it takes time but makes no graph.
            forward=bool(m.is_forward or (m.fail_reason and m.is_forward is None)) and not m.is_runtime,
            seconds=seconds,
            reason=(m.recompile_reason or "").partition("\n")[0],
            cache_hits=(m.inductor_fx_local_cache_hit_count or 0) + (m.aotautograd_local_cache_hit_count or 0),
            failed=m.fail_reason or "",
            total=self.seconds + seconds,
            bucket=self._buckets.get(graph, self.bucket),
        )
