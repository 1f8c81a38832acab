"""`compile_autotune`: time a few steps of this training in several ways, and go on with the fastest that fits.

Weights and random numbers do not change: each candidate is timed on the training's own images and then undone. Results
are stored, so that the next start of such a training measures nothing.
"""

import contextlib
import functools
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

import torch

from library import families
from library.compiler import blocks, cudagraph, torch_private
from library.compiler.log import CompileLog
from library.config import building, schema
from library.config.problems import ConfigError, Message
from library.config.run_config import RunConfig
from library.data.loading import Batches, Kind
from library.distributed.world import World
from library.measuring.candidates import NAMED, Overrides, checkpointing_less, shown, swapping_less
from library.measuring.result import MEMORY_MARGIN, Measured
from library.measuring.timing import GIB, failure, measure_passes
from library.memory import attention
from library.memory.prepare import prepare_denoiser, restored_after
from library.train.choices import Choices
from library.train.compiling import autotune_cache
from library.train.journal import Journal, duration
from library.train.step import rng
from library.train.step.clock import Clock
from library.train.step.loss import LossFunction

TIMED = 3  # passes over each size, after one that compiles
SIZES = 3  # sizes of images that are timed, the most frequent ones
FEW = 4  # sizes of images up to which graphs for each of them are worth a try
WAIT = 0.5  # seconds between two checks whether the main process has finished
# The largest share of a step that each kind of candidate can save: it is tried if that is more than the trial takes.
COMPILED_SAVES, RECORDED_SAVES, OTHERS_SAVE = 0.5, 0.8, 0.3
KERNELS_SAVE, KERNELS = 0.1, 120.0  # the same for max-autotune, and its seconds: it tries many variants of a kernel
NOISE = 0.01  # a candidate has to be better by this share to be preferred to a simpler one
ADAM_BYTES = 12  # for each trained parameter: its gradient and two states, which are not there yet
ENDLESS = 10**9  # passes of a training so long that the time of compiling does not matter


# Why: docs/decisions/2026-11-22-autotune-tries-ways-in-turn.md
@dataclass
class Tuner:
    """Times candidates for a training that is about to begin, and chooses one."""

    batches: Batches
    compute_loss: LossFunction  # with the config as it was given
    clock: Clock
    world: World
    journal: Journal
    results: list[Measured] = field(default_factory=list)
    kernels: attention.AttentionRecorder | None = None  # which attention the model calls, once a pass was recorded
    complete: bool = True  # whether every candidate was tried, also those that pay only in longer trainings

    @property
    def passes(self) -> int:
        """Forward and backward passes of the whole training."""
        return int(self.clock.total * self.config.steps.gradient_accumulation_steps)

    @property
    def config(self) -> RunConfig:
        """The config as it was given."""
        return self.compute_loss.config

    @property
    def compiles(self) -> bool:
        """Whether any compiled candidate could be used."""
        return any(result.changes.get("compile") and not result.why for result in self.results)

    def decide(self) -> Overrides:
        """Measure, or read what an earlier start has measured; choose, and log the reason."""
        name = autotune_cache.fingerprint(self)
        if known := autotune_cache.read(name, self.passes):
            self.results = [Measured(**result) for result in known]
            for result in self.results:  # other options of this training may exclude what was possible then
                try:
                    building.replace(self.config, **result.changes)
                except ConfigError as refused:
                    result.why = result.why or refused.problems[0]
        else:
            self.measure_all()
            if self.compiles:  # else that may be mended by the next start, and shall not be kept
                autotune_cache.write(name, [asdict(result) for result in self.results], self.passes, self.complete)
        chosen = fastest(self.results, self.passes)
        text = summary(chosen, self.results, self.passes, known=bool(known))
        rows = [asdict(result) for result in self.results]
        self.journal.event("tuned", chosen=chosen.changes, results=rows, remembered=bool(known), text=text)
        for r in self.results:
            text += f"\n  {r.sentence(of_steps=False)}"
        self.journal.say(text)
        return chosen.changes

    def measure_all(self) -> None:
        """Try eager and compiled first, then change one option at a time of the best so far."""
        before = rng.get_rng_state(self.world.device)
        cudagraph.leave_default_stream()  # some candidates are recorded, and all of them share their weights
        self.compute_loss.method.train()
        try:
            for number, candidates in enumerate(self.candidate_rounds()):
                for changes in candidates:
                    _, compiling = families.compiling(self.config)
                    if number == 0 and changes["compile"] and not self._is_worth(COMPILED_SAVES, compiling):
                        return
                    self.journal.phase(Message("trying {settings}", settings=short(changes)), len(self.results) + 1)
                    self.results.append(self.measure_candidate(changes))
                if number == 0 and not self.compiles:
                    return  # where compiling does not work there is nothing to choose about it
        finally:
            rng.set_rng_state(before, self.world.device)

    def candidate_rounds(self) -> Iterator[list[Overrides]]:
        """Candidates by round. Each round varies the fastest so far, not counting its time of compiling: stored results
        shall serve longer trainings too."""
        config, options = self.config, self.config.compile

        def on_best(*changes: Overrides) -> list[Overrides]:
            best, set_already = fastest(self.results, ENDLESS).changes, schema.values(config)
            differing = [{name: v for name, v in one.items() if set_already[name] != v} for one in changes]
            return [best | one for one in differing]

        def worth(found: list[Overrides], share: float = OTHERS_SAVE) -> list[Overrides]:
            pays = self._is_worth(share, len(found) * fastest(self.results, ENDLESS).compiling)
            self.complete &= pays
            return found if pays else []

        def compiled() -> bool:
            return bool(fastest(self.results, ENDLESS).changes["compile"])

        yield [{"compile": False}, {"compile": True}]
        if self.kernels and config.memory.attention_kernel == "auto":
            yield worth(on_best(*({"attention_kernel": name} for name in self.kernels.others())))
        usual = options.compile_mode == "default" and options.compile_backend == "inductor"
        if usual and compiled() and self.world.device.type == "cuda":
            kernels = self._is_worth(KERNELS_SAVE, KERNELS)
            self.complete &= kernels
            for name in ["max-autotune"] * kernels + ["cuda-graphs"] * (self.world.ranks == 1):
                yield worth(on_best({"compile_mode": NAMED[name].options["compile_mode"]}), RECORDED_SAVES)
        if options.dynamic is None and 1 < len(self.batches.shapes) <= FEW and compiled():
            yield worth(on_best({"compile_dynamic": "false"}))
        if config.adapters:
            if not config.memory.cpu_offload_checkpointing:
                yield worth(on_best(*checkpointing_less(config)))
            yield worth(on_best(*swapping_less(config)))

    # Why: docs/decisions/2026-11-22-balanced-times-eager-steps-first.md
    def _is_worth(self, share: float, seconds: float) -> bool:
        """Whether this training is so long that saving a share of its time is worth these seconds of compiling."""
        return self.passes * fastest(self.results, self.passes).seconds * share > seconds

    def measure_candidate(self, changes: Overrides) -> Measured:
        """Time a few passes with these options, and undo what they changed."""
        result, asked = Measured(changes), self.compute_loss
        if self.kernels and (why := self.kernels.why_not(changes.get("attention_kernel"))):
            result.why = why
            return result
        try:
            at_once = {"compile_compare_steps": 0, "compile_from_step": None}
            always = {"compile_autotune": False, "compile_fallback": False, **at_once}
            config = building.replace(asked.config, **changes | always)
        except ConfigError as refused:
            result.why = refused.problems[0]
            return result
        undone = restored_after(asked.components.denoiser, asked.family.block_classes)
        with CompileLog(self.journal.on_graph) as log, undone:
            try:
                self.time_candidate(replace(asked, config=config, compile_log=log), result)
            except Exception as error:
                # A kernel of attention may have promised too much.
                kernel = "attention_kernel" in changes and isinstance(error, RuntimeError)
                usual = isinstance(error, torch.OutOfMemoryError | MemoryError | ConfigError)
                if not kernel and not usual and not blocks.is_compile_error(error):
                    raise
                result.why = failure(error)
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        return result

    def time_candidate(self, compute_loss: LossFunction, result: Measured) -> None:
        """Prepare the denoiser as its config says, and time passes over the most frequent sizes of batches."""
        device, log, config = self.world.device, compute_loss.compile_log, compute_loss.config
        components, method = compute_loss.components, compute_loss.method
        texts = any(map(method.trained_parts.get, components.encoders))
        sizes = self.batches.kinds()
        prepare_denoiser(components.denoiser, compute_loss.family, config, device, sizes, texts, log)
        kinds = Counter(dict(sizes.most_common(SIZES)))
        passes = ((self._pass_over(compute_loss, kind), number / kinds.total()) for kind, number in kinds.items())
        result.seconds, first, result.peak = measure_passes(passes, TIMED, device)
        result.compiling = first if config.compile.compile else 0.0
        log.drain()
        if missing := log.unproven():
            result.why = f"no graph was made for {', '.join(missing)}"
        elif broken := log.graph_breaks():
            result.why = f"a block does not fit into one graph ({broken[0]})"
        if device.type == "cuda":
            room = MEMORY_MARGIN * torch.cuda.get_device_properties(device).total_memory / GIB
            room -= ADAM_BYTES * sum(p.numel() for p in method.parameters()) / GIB
            if result.peak > room:
                result.why = f"needs {result.peak:.1f} GiB, and with the optimizer there are {room:.1f} GiB"

    def _pass_over(self, compute_loss: LossFunction, kind: Kind) -> Callable[[], None]:
        call = functools.partial(compute_loss.warm_up, self.batches.example(kind), self.world.device)
        if not compute_loss.config.compile.compile:  # calls of attention can only be recorded in eager blocks
            self.kernels = self.kernels or attention.AttentionRecorder(self.world.device)
            with self.kernels:
                call()
        return call


def best_config(  # noqa: PLR0913 - a training that is about to begin, and what it chooses
    batches: Batches, compute_loss: LossFunction, clock: Clock, world: World, journal: Journal, choices: Choices
) -> RunConfig:
    """The config to train with: the one asked for, or with `compile_autotune` the fastest of it on this machine.

    Of several processes one measures for all. A resumed run keeps the choice of the run before, and measures again only
    if that choice is no longer valid.
    """
    config = compute_loss.config
    if not config.compile.compile_autotune:
        return config
    if choices.tuned is not None:
        with contextlib.suppress(ConfigError):
            compute_loss.family.config = building.replace(config, **choices.tuned)
            journal.say(f"compile_autotune: {shown(choices.tuned)}, as in the run that is continued")
            return compute_loss.family.config
    found = [Tuner(batches, compute_loss, clock, world, journal).decide() if world.main else None]
    if world.ranks > 1:
        # Measuring takes longer than PyTorch lets processes wait for each other.
        store, done = torch_private.process_store(), "compile_autotune"
        if world.main:
            store.set(done, "1")
        while not store.check([done]):
            journal.requests.check()
            time.sleep(WAIT)
        torch.distributed.broadcast_object_list(found)
    choices.tuned = found[0] or {}
    compute_loss.family.config = building.replace(config, **choices.tuned)
    return compute_loss.family.config


def fastest(results: list[Measured], passes: int) -> Measured:
    """The result with the shortest total time of the training, compiling included; of equals, the earlier (simpler)
    one."""
    usable = [result for result in results if not result.why]
    if not usable:
        return Measured({})  # the config as given; its problem is reported when the training begins
    found = usable[0]
    for result in usable[1:]:
        if result.total(passes) < (1 - NOISE) * found.total(passes):
            found = result
    return found


def summary(chosen: Measured, results: list[Measured], passes: int, known: bool) -> str:
    """The choice and its reason, for the log."""
    tried = f"compile_autotune: {len(results)} ways {'remembered' if known else 'tried'}"
    if len(results) == 1 and not results[0].changes.get("compile") and chosen.seconds:
        return (
            f"compile_autotune: eager steps take {chosen.seconds:.3g} s, so the whole training takes "
            f"{duration(chosen.total(passes))}: compiling would take longer than it saves"
        )
    if not chosen.seconds:
        return f"{tried}, none of which could be used; continuing {shown(chosen.changes) or 'as it was asked for'}"
    eager = next((r for r in results if r.changes.get("compile") is False and not r.why), None)
    against = f" instead of {eager.seconds:.3g} s eagerly" if eager and eager is not chosen else ""
    why = f"With it the whole training takes {duration(chosen.total(passes))}"
    if others := [result for result in results if not result.why and result is not chosen]:
        second = min(others, key=lambda result: result.total(passes))
        why += f", and {duration(second.total(passes))} with the next best, {short(second.changes)}"
    fast = f"{shown(chosen.changes)}: {chosen.seconds:.3g} s a batch{against}"
    return f"{tried}; the fastest is {fast}. {why}, compiling included."


def short(changes: Overrides) -> str:
    """A candidate in words."""
    words = [
        name.removeprefix("compile_") if value is True else f"{name.removeprefix('compile_')} {value}"
        for name, value in changes.items()
        if name != "compile"
    ]
    return ", ".join(["compiled" if changes.get("compile") else "eager", *words])
