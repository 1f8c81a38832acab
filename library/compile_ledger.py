"""The ledger of compilation: which block made which graph, why, and how long it took."""

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Compiled:
    """One graph that PyTorch made. `reason` is empty for the first of its kind; a recompilation says why."""

    block: str
    graph: str  # PyTorch's id, "frame/attempt"
    forward: bool
    seconds: float
    reason: str
    cache_hits: int
    failed: str


class Ledger:
    """Collects what the compiler did in this process. One exists (`LEDGER`), as there is one compiler."""

    def __init__(self) -> None:
        self.events: list[Compiled] = []
        self.expected: dict[str, list[Hashable]] = {}  # class of block -> the shape of each block
        self.fallback = ""  # why compiled blocks were given up, if they were
        self._inside = ""
        self._owner: dict[str, str] = {}
        self._listening = False

    @contextlib.contextmanager
    def inside(self, kind: str) -> Iterator[None]:
        """Whatever is compiled in this context belongs to a block of this class."""
        before, self._inside = self._inside, kind
        try:
            yield
        finally:
            self._inside = before

    def expect(self, kind: str, shape: Hashable) -> None:
        """A block of this class has been set up to compile. Blocks of equal shape share their graphs."""
        self.expected.setdefault(kind, []).append(shape)

    def predicted(self) -> dict[str, int]:
        """How many forward graphs the whole run should need, by class of block."""
        return {kind: len(set(shapes)) for kind, shapes in self.expected.items()}

    def listen(self) -> None:
        """Start to note compilations. Safe to call twice; `torch._dynamo.reset()` ends it."""
        if self._listening:
            return
        import torch._dynamo.callback as callback

        callback.on_compile_start(self._started)
        torch._dynamo.utils.clear_compilation_metrics()
        self._listening = True

    def drain(self) -> list[Compiled]:
        """What was compiled since the last call."""
        if not self._listening:
            return []
        found = [self._read(m) for m in torch._dynamo.utils.get_compilation_metrics()]
        torch._dynamo.utils.clear_compilation_metrics()
        self.events += found
        return found

    def unproven(self) -> list[str]:
        """Classes that were set up to compile and have no graph. To be asked after a step in which all blocks ran."""
        made = {e.block for e in self.events if not e.failed}
        return [kind for kind in self.expected if kind not in made]

    def summary(self) -> dict[str, Any]:
        """Totals for the log and the run's record."""
        good = [e for e in self.events if not e.failed]
        return {
            "blocks": {kind: len(shapes) for kind, shapes in self.expected.items()},
            "predicted": self.predicted(),
            "graphs": dict(Counter(e.block for e in good if e.forward)),
            "num_graphs": sum(e.forward for e in good),
            "recompiles": sum(bool(e.reason) for e in good),
            "seconds": round(sum(e.seconds for e in self.events), 2),
            "cache_hits": sum(e.cache_hits for e in good),
            "fallback": self.fallback,
        }

    def clear(self) -> None:
        """Forget everything, for the next run in this process."""
        self.events.clear()
        self.expected.clear()
        self._owner.clear()
        self.fallback = ""

    def _started(self, args: Any) -> None:
        self._owner.setdefault(str(args.compile_id), self._inside)

    def _read(self, m: Any) -> Compiled:
        graph = str(m.compile_id)
        return Compiled(
            block=self._owner.get(graph) or m.co_name or "?",
            graph=graph,
            forward=bool(m.is_forward),
            seconds=(m.duration_us or 0) / 1e6,
            reason=(m.recompile_reason or "").partition("\n")[0],
            cache_hits=(m.inductor_fx_local_cache_hit_count or 0) + (m.aotautograd_local_cache_hit_count or 0),
            failed=m.fail_reason or "",
        )


def as_line(event: Compiled) -> dict[str, Any]:
    """An event as the run's record keeps it."""
    return asdict(event)


LEDGER = Ledger()
