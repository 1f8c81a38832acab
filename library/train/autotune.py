"""`compile_autotune`: time a few steps of this training in several ways, and go on with the fastest that fits.

Nothing that is learned or drawn by chance changes: each way is tried on the training's own images as a rehearsal, and
undone. What was measured is remembered, so that the next start of such a training measures nothing.
"""

import gc
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from library import memory
from library.compiler import blocks, cudagraph
from library.compiler.log import CompileLog
from library.config import schema
from library.config.schema import ConfigError
from library.memory import attention, trial
from library.train import autotune_cache, compiling, rng
from library.train.progress import clock

TIMED = 3  # passes over each size, after one that compiles
SIZES = 3  # sizes of images that are timed, the most frequent ones
FEW = 4  # sizes of images up to which graphs for each of them are worth a try
ROOM = 0.93  # of the GPU's memory may be in use, as the optimizer's own is not yet there
WAIT = 0.5  # seconds between two looks whether the main process has done
COMPILED_SAVES, COMPILING = 0.5, 10.0  # of a step at most, for seconds at least: a run has to be worth trying it
KERNELS_SAVE, KERNELS = 0.1, 120.0  # the same of max-autotune, which compiles each kernel in many ways
NOISE = 0.01  # a way has to be better by this share to be preferred to a simpler one
GIB = 2**30

Way = dict[str, Any]  # options that differ from those of the training as it was asked for


@dataclass
class Result:
    """What a way of training cost; `why` says why it cannot be used, '' if it can."""

    way: Way
    seconds: float = 0.0  # of a forward and backward pass, the mean over sizes as frequent as they are
    compiling: float = 0.0  # seconds before the first such pass
    peak: float = 0.0  # GiB of the GPU
    why: str = ""

    def total(self, passes: int) -> float:
        """Seconds of a whole training."""
        return self.compiling + passes * self.seconds


@dataclass
class Bench:
    """A training that is about to begin, and all that is needed to rehearse it."""

    batches: Any
    family: Any
    parts: Any
    method: Any
    run: Any
    results: list[Result] = field(default_factory=list)
    kernels: attention.Watch | None = None  # what attention this model asks for, once that has been seen
    complete: bool = True  # whether all ways were tried, also those that only pay in longer trainings

    @property
    def passes(self) -> int:
        """Forward and backward passes of the whole training."""
        return self.run.clock.total * self.run.config.steps.gradient_accumulation_steps


def best(batches: Any, family: Any, parts: Any, method: Any, run: Any) -> Any:
    """The config to train with: the run's own, or with `compile_autotune` the fastest way of it on this machine.

    Where there are several processes, one measures for all.
    """
    if not run.config.compile.compile_autotune:
        return run.config
    bench = Bench(batches, family, parts, method, run)
    found = [_decided(bench) if run.main else None]
    if run.ranks > 1:
        _wait_for_main(run)
        torch.distributed.broadcast_object_list(found)
    run.config = family.config = schema.replace(run.config, **found[0] or {})
    return run.config


def _wait_for_main(run: Any) -> None:
    """Until the main process has measured, which takes longer than PyTorch lets processes wait for each other."""
    store, done = torch.distributed.distributed_c10d._get_default_store(), "compile_autotune"
    if run.main:
        store.set(done, "1")
    while not store.check([done]):
        run.wishes.check()
        time.sleep(WAIT)


def _decided(bench: Bench) -> Way:
    name = autotune_cache.name_of(bench)
    known = autotune_cache.read(name, bench.passes)
    if known:
        bench.results = [_still(Result(**result), bench.run.config) for result in known]
    else:
        _measure(bench)
        if _compiles(bench):  # else that may be mended by the next start, and shall not be remembered
            autotune_cache.write(name, [asdict(result) for result in bench.results], bench.passes, bench.complete)
    chosen = choose(bench.results, bench.passes)
    sentence = told(chosen, bench.results, bench.passes, known=bool(known))
    rows = [asdict(result) for result in bench.results]
    bench.run.event("tuned", chosen=chosen.way, results=rows, remembered=bool(known), text=sentence)
    bench.run.say("\n".join([sentence, *(f"  {_short(result.way)}: {_row(result)}" for result in bench.results)]))
    return chosen.way


def _compiles(bench: Bench) -> bool:
    return any(result.way.get("compile") and not result.why for result in bench.results)


def _still(result: Result, config: Any) -> Result:
    """A result of before; a way that other options of this training exclude cannot be used."""
    try:
        schema.replace(config, **result.way)
    except ConfigError as refused:
        result.why = result.why or str(refused).splitlines()[0]
    return result


def choose(results: list[Result], passes: int) -> Result:
    """The way in which the whole training is over first, its compiling included; of equals, the simpler one."""
    usable = [result for result in results if not result.why]
    if not usable:
        return Result({})  # as it was asked for; what is wrong will be told when it begins
    found = usable[0]
    for result in usable[1:]:
        if result.total(passes) < (1 - NOISE) * found.total(passes):
            found = result
    return found


def told(chosen: Result, results: list[Result], passes: int, known: bool) -> str:
    """The choice, and why it was made."""
    tried = f"compile_autotune: {len(results)} ways {'remembered' if known else 'tried'}"
    shown = ", ".join(f"{name} = {str(value).lower()}" for name, value in chosen.way.items()) or "as it was asked for"
    if len(results) == 1 and not results[0].way.get("compile") and chosen.seconds:
        return (
            f"compile_autotune: eager steps take {chosen.seconds:.3g} s, so the whole training takes "
            f"{clock(chosen.total(passes))}: compiling would take longer than it saves"
        )
    if not chosen.seconds:
        return f"{tried}, none of which could be used; continuing {shown}"
    eager = next((r for r in results if r.way.get("compile") is False and not r.why), None)
    against = f" instead of {eager.seconds:.3g} s eagerly" if eager and eager is not chosen else ""
    why = f"With it the whole training takes {clock(chosen.total(passes))}"
    if others := [result for result in results if not result.why and result is not chosen]:
        second = min(others, key=lambda result: result.total(passes))
        why += f", and {clock(second.total(passes))} with the next best, {_short(second.way)}"
    return f"{tried}; the fastest is {shown}: {chosen.seconds:.3g} s a batch{against}. {why}, compiling included."


# ---- measuring


def _measure(bench: Bench) -> None:
    """Try eager and compiled first, then one thing after the other around the best so far."""
    run, before, asked = bench.run, rng.get_rng_state(bench.run.device), bench.run.config
    cudagraph.leave_default_stream()  # some ways are recorded, and all of them share their weights
    bench.method.train()
    try:
        for number, ways in enumerate(rounds(bench)):
            for way in ways:
                if number == 0 and way["compile"] and not _pays(bench, COMPILED_SAVES, COMPILING):
                    return
                run.phase(f"trying {_short(way)}", len(bench.results) + 1)
                bench.results.append(tried(bench, way))
            if number == 0 and not _compiles(bench):
                return  # where compiling does not work there is nothing to choose about it
    finally:
        run.config = asked
        rng.set_rng_state(before, run.device)
        run.meter.pause()


def rounds(bench: Bench) -> Iterator[list[Way]]:
    """What to try. Each round goes on from the fastest way so far, whatever it takes to compile: what is remembered
    shall serve longer trainings too."""
    config, cuda = bench.run.config, bench.run.device.type == "cuda"
    options, sizes = config.compile, len(bench.batches.shapes)
    yield [{"compile": False}, {"compile": True}]
    if bench.kernels and config.memory.attention_kernel == "auto":
        yield [_best(bench) | {"attention_kernel": name} for name in bench.kernels.others()]
    if options.compile_mode == "default" and options.compile_backend == "inductor" and cuda:
        modes = () if bench.run.ranks > 1 else ("reduce-overhead",)
        bench.complete = _pays(bench, KERNELS_SAVE, KERNELS)
        if bench.complete:
            modes = ("max-autotune-no-cudagraphs", *modes)
        yield [_best(bench) | {"compile_mode": mode} for mode in modes if _best(bench)["compile"]]
    if options.dynamic is None and 1 < sizes <= FEW and _best(bench)["compile"]:
        yield [_best(bench) | {"compile_dynamic": "false"}]
    if config.adapters and config.memory.gradient_checkpointing and not config.memory.cpu_offload_checkpointing:
        free = [] if config.memory.blocks_to_swap else [{"gradient_checkpointing": False}]
        keep = [] if config.memory.checkpoint_keep_attention else [{"checkpoint_keep_attention": True}]
        yield [_best(bench) | way for way in (*free, *keep)]
    if config.adapters and (number := config.memory.blocks_to_swap):
        yield [_best(bench) | {"blocks_to_swap": fewer or None} for fewer in (0, number // 2) if fewer != number]


def _pays(bench: Bench, share: float, seconds: float) -> bool:
    """Whether this training is so long that saving a share of its time is worth these seconds of compiling."""
    return bench.passes * choose(bench.results, bench.passes).seconds * share > seconds


def _best(bench: Bench) -> Way:
    return choose(bench.results, passes=10**9).way


def tried(bench: Bench, way: Way) -> Result:
    """Train in this way for a few passes, and undo it."""
    run, result = bench.run, Result(way)
    if bench.kernels and (why := bench.kernels.why_not(way.get("attention_kernel"))):
        result.why = why
        return result
    try:
        asked = {"compile_autotune": False, "compile_compare_steps": 0, "compile_fallback": False}
        run.config = schema.replace(bench.family.config, **way | asked)
    except ConfigError as refused:
        result.why = str(refused).splitlines()[0]
        return result
    with CompileLog(run.compile_log.on_graph) as log, trial.undone(bench.parts.denoiser, bench.family.block_classes):
        try:
            _rehearsed(bench, result, log)
        except (torch.OutOfMemoryError, MemoryError):
            result.why = "not enough memory"
        except Exception as error:
            if not _expected(error, way):
                raise
            result.why = blocks.why(error)
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def _expected(error: Exception, way: Way) -> bool:
    """Whether it is this way that does not work: compiling, or a kernel of attention that promised too much."""
    broken = "attention_kernel" in way and isinstance(error, RuntimeError)
    return broken or isinstance(error, ConfigError) or blocks.is_compile_error(error)


def _rehearsed(bench: Bench, result: Result, log: CompileLog) -> None:
    run, parts, batches = bench.run, bench.parts, bench.batches
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
    texts = any(map(bench.method.trained_parts.get, parts.encoders))
    memory.prepare(parts.denoiser, bench.family, run.config, run.device, batches.kinds(), texts, log)
    kinds = Counter(dict(batches.kinds().most_common(SIZES)))
    first, steady = 0.0, 0.0
    for kind, number in kinds.items():
        batch = batches.example(kind)
        if not run.config.compile.compile:
            _watched(bench, batch)
        times = [seconds_of(bench, batch) for _ in range(1 + TIMED)]
        usual = statistics.median(times[1:])
        first += times[0] - usual
        steady += usual * number / kinds.total()
    result.seconds, result.compiling = steady, max(first, 0.0) if run.config.compile.compile else 0.0
    log.drain()
    if missing := log.unproven():
        result.why = f"no graph was made for {', '.join(missing)}"
    elif broken := log.graph_breaks():
        result.why = f"a block does not fit into one graph ({broken[0]})"
    if run.device.type == "cuda":
        result.peak = cudagraph.peak(run.device) / GIB
        room = ROOM * torch.cuda.get_device_properties(run.device).total_memory / GIB
        room -= 12 * sum(p.numel() for p in bench.method.parameters()) / GIB  # gradients and the optimizer's memory
        if result.peak > room:
            result.why = f"needs {result.peak:.1f} GiB, and with the optimizer there are {room:.1f} GiB"


def _watched(bench: Bench, batch: Any) -> None:
    """See what attention the model asks for, where it can be seen: in eager blocks."""
    bench.kernels = bench.kernels or attention.Watch(bench.run.device)
    with bench.kernels:
        compiling.rehearse(batch, bench.family, bench.parts, bench.method, bench.run)


def seconds_of(bench: Bench, batch: Any) -> float:
    """One rehearsal by the clock."""
    _wait(bench.run.device)
    begin = time.perf_counter()
    compiling.rehearse(batch, bench.family, bench.parts, bench.method, bench.run)
    _wait(bench.run.device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _short(way: Way) -> str:
    words = [name.removeprefix("compile_") if value is True else f"{name.removeprefix('compile_')} {value}"
             for name, value in way.items() if name != "compile"]  # fmt: skip
    return ", ".join(["compiled" if way.get("compile") else "eager", *words])


def _row(result: Result) -> str:
    if result.why:
        return result.why
    return f"{result.seconds:.3g} s a batch, {result.compiling:.1f} s to compile, {result.peak:.1f} GiB"
