"""The log of compilations: which block caused which graph, why, and how long it took."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from library.compiler import torch_private
from library.config.json_types import JsonObject
from library.config.problems import Message, MessageLike, Report, counted

MAX_TORCH_EVENTS = 4096  # events that PyTorch keeps until they are read; its own 64 are fewer than one step may bring

RESUMED = "torch_dynamo_resume_in_"  # what PyTorch calls a function whose beginning is in a graph of its own


@dataclass(frozen=True)
class CompiledGraph:
    """One graph that PyTorch made. `reason` is empty for the first of its kind; a recompilation says why."""

    block: str
    graph: str  # PyTorch's id, "frame/attempt"
    forward: bool
    seconds: float
    reason: str
    cache_hits: int
    failed: str
    total: float  # seconds of compiling so far, this graph included
    bucket: str = ""  # size of the images that it was made with, such as 1024x768


# Why: docs/decisions/2026-11-20-speedup-is-measured.md
@dataclass
class Speedup:
    """Whether compiling pays, judged by whole steps: some eager ones at the start of a run, and compiled ones after.

    Nothing is known without those eager steps (`compile_compare_steps`), and nothing is claimed then. Steps that
    compile, and steps after a pause, count for neither side.
    """

    eager_steps_left: int = 0  # before compiling begins
    begin: Callable[[], None] | None = None  # what ends the waiting
    eager: list[float] = field(default_factory=list)  # seconds of each eager step
    compiled: int = 0  # steps that were timed compiled,
    gained: float = 0.0  # and the seconds by which they were faster altogether
    break_even_step: int | None = None  # from it on more has been gained than compiling took

    @property
    def eager_step(self) -> float:
        """Seconds of an eager step."""
        return sum(self.eager) / len(self.eager) if self.eager else 0.0

    @property
    def compiled_step(self) -> float:
        """Seconds of a compiled step."""
        return self.eager_step - self.gained / self.compiled if self.compiled else 0.0

    def note_step(self, step: int, seconds: float | None, spent: float) -> None:
        """A step has ended; compiling has taken `spent` seconds until now."""
        if self.eager_steps_left:
            self.eager += [] if seconds is None else [seconds]
            self.eager_steps_left -= 1
            if not self.eager_steps_left and self.begin:
                self.begin()
        elif self.eager and seconds is not None:
            self.compiled += 1
            self.gained += self.eager_step - seconds
        if self.gained <= spent:
            self.break_even_step = None
        elif self.break_even_step is None:
            self.break_even_step = step

    def facts(self, spent: float) -> JsonObject:
        """What is known, for the run's record; nothing where nothing was measured."""
        if not self.compiled:
            return {}
        return {
            "eager_s_it": round(self.eager_step, 4),
            "compiled_s_it": round(self.compiled_step, 4),
            "saved_seconds": round(self.gained - spent, 2),
            "paid_step": self.break_even_step,
        }

    def sentence(self, spent: float) -> str:
        """The same in words."""
        if not self.compiled:
            return ""
        saved = self.gained - spent
        paces = f"{self.compiled_step:.3g} s a step instead of {self.eager_step:.3g} s, "
        paces += f"timed over {self.compiled} and {len(self.eager)} steps"
        if self.break_even_step is None:
            return f"Compiling has cost {-saved:.1f} s more than it saved so far ({paces})."
        return (
            f"Compiling saved {saved:.1f} s in total ({paces}); its time was recovered at step {self.break_even_step}."
        )


# Why: docs/decisions/2026-11-22-compile-log-is-handed-on.md
class CompileLog:
    """What PyTorch compiled for one training or measurement: expected, noted graph by graph, and summed up.

    Whoever trains makes one and hands it to `compile_model`, which begins to listen. Closing it ends that and forgets
    all compiled code, so that the next log of this process counts from nothing.
    """

    def __init__(self, on_graph: Report | None = None) -> None:
        """`on_graph` is told when a graph is begun: "compiling" and the class of the block, its number, of how many."""
        self.on_graph = on_graph
        self.events: list[CompiledGraph] = []
        self.expected: dict[str, list[Hashable]] = {}  # class of block -> the shape of each block
        self.fallback: MessageLike = ""  # why compiled blocks were given up, if they were
        self.attention = ""  # the attention kernel that was put first, on a GPU
        self.speedup = Speedup()
        self.begin: dict[str, Callable[[], None]] = {}  # class of block -> begin to compile its blocks
        self.begin_some: Callable[[list[Any]], None] = lambda blocks: None  # the same of some blocks
        self.later: dict[str, Callable[[], None]] = {}  # those of `begin` whose blocks still run eagerly
        self.on_call: Callable[[Any, Any, Any], None] | None = None  # is told what a block is called with
        self.bucket = ""  # size of the images that are learned from just now
        self._inside = ""
        self._owner: dict[str, str] = {}
        self._buckets: dict[str, str] = {}
        self._sizes: dict[tuple[str, Hashable], int] = {}
        self._listening = False
        self._resumed: list[str] = []  # graphs that go on where another had to end

    def __enter__(self) -> "CompileLog":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __deepcopy__(self, known: dict[int, Any]) -> "CompileLog":
        return self  # compiled blocks hold it, and copies of them run in the same process

    @contextlib.contextmanager
    def inside(self, kind: str) -> Iterator[None]:
        """Whatever is compiled in this context belongs to a block of this class."""
        before, self._inside = self._inside, kind
        try:
            yield
        finally:
            self._inside = before

    def expect(self, kind: str, shape: Hashable, sizes: int = 1) -> None:
        """A block of this class has been set up to compile. Blocks of equal shape share their graphs.

        There is one graph for each of `sizes`, where they are compiled one by one.
        """
        self.expected.setdefault(kind, []).append(shape)
        self._sizes[kind, shape] = sizes

    def prepare(self, begin: Callable[[list[Any]], None], blocks: list[Any]) -> None:
        """`begin` compiles any of these blocks, which are those that are expected."""
        self.begin_some = begin
        for kind in self.expected:
            self.begin[kind] = functools.partial(begin, [block for block in blocks if type(block).__name__ == kind])

    # Why: docs/decisions/2026-11-20-graphs-are-predicted.md
    def predicted(self) -> dict[str, int]:
        """How many forward graphs the whole run should need, by class of block."""
        return {kind: sum(self._sizes[kind, shape] for shape in set(shapes)) for kind, shapes in self.expected.items()}

    def due(self) -> int:
        """How many graphs are needed by now: without those of blocks that are compiled in later steps.

        All of them where none is compiled yet, as while another process compiles them.
        """
        needed = self.predicted()
        return sum(number for kind, number in needed.items() if kind not in self.later) or sum(needed.values())

    @property
    def graphs_per_block(self) -> int:
        """How many graphs a single block needs at most."""
        return max(self._sizes.values(), default=0)

    def recompilations(self) -> list[CompiledGraph]:
        """Recompilations that were not predicted: those for sizes that are compiled one by one were."""
        foreseen = Counter({kind: number - len(set(self.expected[kind])) for kind, number in self.predicted().items()})
        found = []
        for event in (e for e in self.events if e.reason and not e.failed):
            foreseen[event.block] -= 1
            found += [event] if foreseen[event.block] < 0 else []
        return found

    def listen(self) -> None:
        """Start to note compilations. Safe to call twice; `torch.compiler.reset()` ends it."""
        if self._listening:
            return
        torch_private.listen_to_compiler(self._started, MAX_TORCH_EVENTS)
        self._listening = True

    def drain(self) -> list[CompiledGraph]:
        """What was compiled since the last call."""
        if not self._listening:
            return []
        if self.waiting and torch.cuda.is_available():
            torch.cuda.synchronize()  # a step that is to be compared has to be over
        before = len(self.events)
        for metrics in torch_private.take_compilations():
            self.events.append(self._read(metrics))
        return self.events[before:]

    def note_step(self, step: int, seconds: float | None) -> None:
        """A step has ended, in which nothing was compiled if its seconds are given."""
        if not self.fallback:
            self.speedup.note_step(step, seconds, self.seconds)

    def close(self) -> None:
        """Stop listening, and reset PyTorch's compiled code and its failed attempts. Safe to call twice."""
        if self._listening or self.fallback:
            torch.compiler.reset()
            torch.compiler.set_stance("default")
        self._listening = False

    @property
    def active(self) -> bool:
        """Whether blocks are compiled, or will be after some eager steps."""
        return bool(self.expected) and not self.fallback

    @property
    def waiting(self) -> bool:
        """Whether compiling has yet to begin, as eager steps to compare with come first."""
        return self.speedup.eager_steps_left > 0

    @property
    def seconds(self) -> float:
        """Seconds of compiling so far."""
        return self.events[-1].total if self.events else 0.0

    def curves(self) -> dict[str, float]:
        """Numbers of a step, for the curves of a run whose blocks are compiled."""
        if not self.expected or self.fallback:
            return {}
        saved = {"compile/saved_seconds": round(self.speedup.gained - self.seconds, 2)} if self.speedup.eager else {}
        return {"compile/seconds": round(self.seconds, 2), **saved}

    def sentence(self) -> str:
        """What compiling was worth, at the end of a run."""
        total = self.summary()
        if not total["num_graphs"] or self.fallback:
            return ""
        first = (
            f"Compiling took {self.seconds:.1f} s for {counted(total['num_graphs'], 'graph')}, "
            f"{total['recompiles']} recompiled."
        )
        return f"{first} {self.speedup.sentence(self.seconds)}".strip()

    def unproven(self) -> list[str]:
        """Classes that were set up to compile and have no graph. Call it after a step in which all blocks ran."""
        if self.waiting:
            return []
        made = {e.block for e in self.events if not e.failed}
        return [kind for kind in self.expected if kind not in made and kind not in self.later]

    # Why: docs/decisions/2026-11-20-graph-breaks-are-reported.md
    def graph_breaks(self) -> list[str]:
        """Why blocks did not fit into one graph, if they did not: around such a place they run eagerly, or altogether,
        and PyTorch says nothing."""
        breaks = torch_private.compile_counters("graph_break") if self._listening else {}
        return [*(reason.partition("\n")[0].strip() for reason in breaks), *self._resumed]

    def summary(self) -> JsonObject:
        """Totals for the log and the run's record."""
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
        number = len(self._owner)
        self._owner.setdefault(graph, self._inside)
        self._buckets.setdefault(graph, self.bucket)
        if self.on_graph and self._inside and len(self._owner) > number:
            made, said = len(self._owner), Message("compiling {block}", block=self._inside)
            self.on_graph(said, made, max(self.due(), made))

    def _read(self, m: Any) -> CompiledGraph:
        graph, seconds = str(m.compile_id), (m.duration_us or 0) / 1e6
        if (place := (m.co_name or "").removeprefix(RESUMED)) != (m.co_name or ""):
            self._resumed.append(f"it ends before line {place.rpartition('_')[2]} of {place.rpartition('_at_')[0]}")
        first = f"{graph.partition('/')[0]}/0"  # whose owner is known also where making another was not even begun
        return CompiledGraph(
            block=self._owner.get(graph) or self._owner.get(first) or m.co_name or "?",
            graph=graph,
            # On a GPU choosing among a kernel's variants is noted by itself, when it first runs: time, but no graph.
            forward=bool(m.is_forward or (m.fail_reason and m.is_forward is None)) and not m.is_runtime,
            seconds=seconds,
            reason=(m.recompile_reason or "").partition("\n")[0],
            cache_hits=(m.inductor_fx_local_cache_hit_count or 0) + (m.aotautograd_local_cache_hit_count or 0),
            failed=m.fail_reason or "",
            total=self.seconds + seconds,
            bucket=self._buckets.get(graph, self.bucket),
        )
