"""Compiling, as a training sees it: all of it before the first step, proof that it happened, and what if it fails."""

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from library import memory
from library.compiler import blocks, prewarm
from library.compiler.log import CompileLog
from library.config.schema import ConfigError
from library.train import loss, rng

Kind = tuple[int, int, int]  # of a batch: images, and the height and width of their latents


def getting_ready(run: Any) -> contextlib.AbstractContextManager[None]:
    """Let the compiler get up while the model is loaded."""
    return prewarm.getting_ready(run.config.compile, run.device)


def ahead(batches: Any, family: Any, parts: Any, method: Any, run: Any) -> None:
    """Make every graph that the training needs before its first step, with its own images.

    Nothing that the training learns or draws by chance changes. Where eager steps come first, to be compared with
    (`compile_compare_steps`), it happens right after them. Of several processes on a machine, one goes first and
    compiles; the others find its graphs in the cache.
    """
    log = run.compile_log
    if not log.active:
        return
    _warn(run)
    if not run.config.compile.ahead:
        return
    work = functools.partial(_in_turn, batches, family, bare(parts), method, run)
    if log.waiting and log.speedup.begin:
        log.speedup.begin = functools.partial(_both, log.speedup.begin, work)
    else:
        work()


def _warn(run: Any) -> None:
    """Say what leaves blocks eager although it was asked to compile them; ConfigError where none may be."""
    options, steps = run.config.compile, run.clock.total - run.clock.step
    limit, needed = options.compile_cache_size_limit, run.compile_log.graphs_per_block
    if 0 < limit < needed:
        said = (
            f"compile_cache_size_limit = {limit}: blocks need {needed} graphs for the sizes of this data set, and run "
        )
        said += f"eagerly beyond the limit; use {needed} or more, 0 for as many as it takes, or compile_dynamic = auto"
        if options.compile_fullgraph:
            raise ConfigError(said)
        run.warn(said)
    if 0 < steps <= (first := options.compile_compare_steps):
        run.warn(f"compile_compare_steps = {first}: nothing is compiled, as only {steps} are to be done; use fewer")


def _both(first: Any, then: Any) -> None:
    first()
    then()


def _in_turn(batches: Any, family: Any, parts: Any, method: Any, run: Any) -> None:
    if run.clock.done:
        return
    log = run.compile_log
    graphs = sum(log.predicted().values())
    run.phase("compiling", 0, graphs)
    single = memory.size_by_size(run.config, run.device)
    run.say(sizes_told(run.config.compile, len(batches.shapes), single))
    with run.accelerator.local_main_process_first():
        before = rng.get_rng_state(run.device)
        try:
            options = run.config.compile
            every = single or options.dynamic is False or (options.records_graphs and run.device.type == "cuda")
            for kind in needed(batches.kinds(), every, log):
                _once(batches.example(kind), family, parts, method, run)
        except Exception as error:
            if not blocks.is_compile_error(error):
                raise
            give_up(run, error)
        finally:
            rng.set_rng_state(before, run.device)
    if not log.fallback:
        prove(run)
    run.phase("compiling", graphs, graphs)
    run.meter.pause()


def sizes_told(options: Any, number: int, single: bool = False) -> str:
    """What `compile_dynamic` came to, and why; `single` where one graph could not serve several sizes."""
    if number == 1 and not options.dynamic:
        return "All images have one size, which the graphs are made for."
    if single:
        return (
            f"Each of {number} sizes of image gets a graph of the whole model, which cannot be made for varying ones."
        )
    if options.dynamic is False:
        return f"Each of {number} sizes of image gets graphs of its own, as compile_dynamic = false says."
    why = "as compile_dynamic = true says" if options.dynamic else "so that there is nothing to compile at a new one"
    which = f"all {number} sizes of image at once" if number > 1 else "any size of image"
    return f"The graphs are made for {which}, {why}."


def needed(kinds: Counter[Kind], every: bool, log: CompileLog) -> Iterator[Kind]:
    """The kinds of batches to compile for, the most frequent first, as its size is the one that kernels are tuned for.

    One graph serves all sizes of image, unless they are compiled, or recorded, one by one (`every`). The largest size
    comes second: it shows whether the memory will do. The others follow only as long as each still needed a graph.
    """
    order = [kind for kind, _ in kinds.most_common()]
    first = [next(kind for kind in order if kind[0] == number) for number in dict.fromkeys(n for n, _, _ in order)]
    largest = max(order, key=lambda kind: kind[0] * kind[1] * kind[2])
    order = list(dict.fromkeys([*first, largest, *order]))
    for number, kind in enumerate(order, start=1):
        made = len(log.events)
        yield kind
        if not every and number > len(first) and len(log.events) == made:
            return


def _once(batch: Any, family: Any, parts: Any, method: Any, run: Any) -> None:
    run.compile_log.bucket = batch.bucket
    rehearse(batch, family, parts, method, run)
    note(run)


def rehearse(batch: Any, family: Any, parts: Any, method: Any, run: Any) -> None:
    """Forward and backward as in a step, without a trace: no gradient is kept, and no hook of a weight runs."""
    wrong = loss.of(batch, family, parts, method, run)
    torch.autograd.grad(wrong, _enough(method, run.config.adapters), allow_unused=True)


def _enough(method: Any, adapters: bool) -> list[nn.Parameter]:
    """Weights whose gradients take a backward pass through all blocks, and little memory."""
    every = method.parameters()
    return every if adapters else [p for p in every if p.dim() < 2] or every


def bare(parts: Any) -> Any:
    """The parts without the wrapping that averages gradients over processes."""

    def inner(network: nn.Module) -> nn.Module:
        return network.module if isinstance(network, nn.parallel.DistributedDataParallel) else network

    encoders = {name: inner(encoder) for name, encoder in parts.encoders.items()}
    return dataclasses.replace(parts, denoiser=inner(parts.denoiser), encoders=encoders)


def note(run: Any) -> bool:
    """Write down what was compiled since the last time, and say whether that was anything."""
    made = run.compile_log.drain()
    for event in made:
        run.event("compile", step=run.clock.step, **dataclasses.asdict(event))
    return bool(made)


def prove(run: Any) -> None:
    """Compiling that silently does not happen is the oldest trap: by now every kind of block has its graph."""
    log = run.compile_log
    if not log.active or log.waiting:
        return
    if missing := log.unproven():
        names = ", ".join(missing)
        if not run.config.compile.compile_fallback:
            raise ConfigError(f"compile: no graph was made for {names}, though it ran; switch compile off")
        log.fallback = f"no graph was made for {names}"
        run.warn(f"compile: {log.fallback}; these blocks run without it.")
        return
    if broken := log.graph_breaks():
        run.warn(f"compile: a block does not fit into one graph ({broken[0]}), so it runs eagerly in parts; "
                 "compile_fullgraph stops there and shows the place")  # fmt: skip
    total = log.summary()
    shown = ", ".join(f"{n} for {total['blocks'].get(k, 0)} {k}" for k, n in total["graphs"].items())
    run.say(f"Compiled: {total['num_graphs']} graphs ({shown}) in {total['seconds']:.1f} s, "
            f"{total['recompiles']} recompiled")  # fmt: skip


def give_up(run: Any, error: BaseException) -> None:
    """From now on without compiling, or, where that is not wanted, a ConfigError that says what is wrong."""
    reason = blocks.why(error)
    if not run.config.compile.compile_fallback:
        raise ConfigError(f"compile: PyTorch could not compile a block ({reason}); "
            "add --compile_fallback to go on without, or switch compile off") from error  # fmt: skip
    run.compile_log.fallback = reason
    torch.compiler.set_stance("force_eager")
    run.forget_gradients()
    run.warn(f"Compiling failed ({reason}); the run goes on without it.")
