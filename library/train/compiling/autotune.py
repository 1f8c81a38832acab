"""`compile_autotune`: time a few steps of this training with several settings and use the fastest that fits.

Weights and random numbers do not change: each candidate is timed on the training's images and then undone. Results are
stored, so that the next start of the same training measures nothing.
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
from library.config import building, compile_modes, schema
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, counted
from library.config.run_config import RunConfig
from library.data.loading import Batches, Kind
from library.distributed.world import World
from library.measuring import stored_results
from library.measuring.candidates import Overrides, checkpointing_less, format_changes, other_modes, swapping_less
from library.measuring.result import MEMORY_MARGIN, Measured
from library.measuring.timing import BYTES_PER_GIB, measure_passes, measuring_failure
from library.memory import attention
from library.memory.prepare import prepare_denoiser, restored_after
from library.train.choices import Choices
from library.train.compiling.fingerprint import training_facts
from library.train.journal import Journal, clock_time
from library.train.step import rng
from library.train.step.clock import Clock
from library.train.step.loss import LossFunction

VERSION = 4  # of the stored results
SHARES = 20  # resolution of image-size frequencies: twentieths of all batches
TIMED = 3  # passes per size, after one that compiles
MAX_TIMED_SIZES = 3  # number of image sizes to time, most frequent first
MAX_FIXED_SIZES = 4  # separate graphs per size are tried up to this number of image sizes
WAIT = 0.5  # seconds between two polls of the main process
# The largest share of a step that each kind of candidate can save; it is tried if the training saves more than the
# trial takes.
COMPILED_SAVES, RECORDED_SAVES, OTHERS_SAVE = 0.5, 0.8, 0.3
KERNELS_SAVE, KERNELS = 0.1, 120.0  # the same for max-autotune, and the seconds it takes to try kernel variants
NOISE = 0.01  # a candidate must be faster by this share to be preferred to a simpler one
ADAM_BYTES = 12  # per trained parameter, not yet allocated: its gradient and two optimizer states
ENDLESS = 10**9  # passes of a training so long that compile time does not matter


# Varying one option at a time keeps the number of candidates small; the shortest whole training wins, compiling
# included.
# Why: docs/decisions/2026-11-22-autotune-tries-ways-in-turn.md
@dataclass
class Tuner:
    """Times candidates for a training that is about to start, and chooses one."""

    batches: Batches
    compute_loss: LossFunction  # with the user's config
    clock: Clock
    world: World
    journal: Journal
    results: list[Measured] = field(default_factory=list)
    kernels: attention.AttentionRecorder | None = None  # the model's attention calls, after the first eager pass
    complete: bool = True  # whether every candidate was tried, even those that pay only in longer trainings

    @property
    def passes(self) -> int:
        return int(self.clock.total * self.config.steps.gradient_accumulation_steps)

    @property
    def config(self) -> RunConfig:
        return self.compute_loss.config

    @property
    def compiles(self) -> bool:
        return any(result.changes.get("compile") and not result.why for result in self.results)

    def decide(self) -> Overrides:
        """Return the fastest options, measured now or at an earlier start, and log the reason."""
        name = self.fingerprint()
        if stored := read_results(name, self.passes):
            self.results = [Measured(**result) for result in stored]
            for result in self.results:  # other options of this training may exclude an earlier result
                try:
                    building.replace_options(self.config, **result.changes)
                except ConfigError as refused:
                    result.why = result.why or refused.problems[0]
        else:
            self.measure_all()
            if self.compiles:  # a failure to compile may be fixed before the next start
                facts: JsonObject = {"version": VERSION, "passes": self.passes, "complete": self.complete}
                facts["results"] = [asdict(result) for result in self.results]
                stored_results.store_result(name, facts)
        chosen = fastest_setting(self.results, self.passes)
        text = summarise_choice(chosen, self.results, self.passes, is_remembered=bool(stored))
        rows = [asdict(result) for result in self.results]
        self.journal.event("tuned", chosen=chosen.changes, results=rows, remembered=bool(stored), text=text)
        for r in self.results:
            text += f"\n  {r.sentence(of_steps=False)}"
        self.journal.say(text)
        return chosen.changes

    def fingerprint(self) -> str:
        """Identify the training by everything that the speed of its steps depends on."""
        kinds = self.batches.kinds()  # frequencies are rounded below, so that one image more changes nothing
        sizes = sorted([*kind, round(SHARES * number / kinds.total())] for kind, number in kinds.items())
        facts = training_facts(self.config, self.world, self.compute_loss)
        return stored_results.digest(facts | {"version": VERSION, "sizes": sizes})

    def measure_all(self) -> None:
        """Time eager and compiled first, then vary one option at a time of the fastest so far."""
        before = rng.get_rng_state(self.world.device)
        cudagraph.leave_default_stream()  # some candidates are recorded, and all share the weights
        self.compute_loss.method.train()
        try:
            for number, candidates in enumerate(self.candidate_rounds()):
                for changes in candidates:
                    _, compiling = families.compiling_cost(self.config)
                    if number == 0 and changes["compile"] and not self._is_worth(COMPILED_SAVES, compiling):
                        return
                    self.journal.phase(Message("trying {settings}", settings=short(changes)), len(self.results) + 1)
                    self.results.append(self.measure_candidate(changes))
                if number == 0 and not self.compiles:
                    return  # all further candidates compile
        finally:
            # Measuring must not change what the training draws.
            rng.set_rng_state(before, self.world.device)

    def candidate_rounds(self) -> Iterator[list[Overrides]]:
        """Yield the candidates of each round. A round varies the fastest so far, ignoring its compile time."""
        # Stored results must also serve longer trainings, where compile time matters less.
        config, options = self.config, self.config.compile

        def on_best(*changes: Overrides) -> list[Overrides]:
            best, set_already = fastest_setting(self.results, ENDLESS).changes, schema.option_values(config)
            differing = [{name: v for name, v in change.items() if set_already[name] != v} for change in changes]
            return [best | change for change in differing]

        def worth(candidates: list[Overrides], share: float = OTHERS_SAVE) -> list[Overrides]:
            pays = self._is_worth(share, len(candidates) * fastest_setting(self.results, ENDLESS).compiling)
            self.complete &= pays
            return candidates if pays else []

        def compiled() -> bool:
            return bool(fastest_setting(self.results, ENDLESS).changes["compile"])

        yield [{"compile": False}, {"compile": True}]
        if self.kernels and config.memory.attention_kernel == "auto":
            yield worth(on_best(*({"attention_kernel": name} for name in self.kernels.others())))
        if compile_modes.is_usual(options) and compiled() and self.world.device.type == "cuda":
            kernels = self._is_worth(KERNELS_SAVE, KERNELS)
            self.complete &= kernels
            for change in other_modes(kernels, self.world.ranks == 1):
                yield worth(on_best(change), RECORDED_SAVES)
        if options.dynamic is None and 1 < len(self.batches.shapes) <= MAX_FIXED_SIZES and compiled():
            yield worth(on_best({"compile_dynamic": "false"}))
        if config.adapters:
            if not config.memory.cpu_offload_checkpointing:
                yield worth(on_best(*checkpointing_less(config)))
            yield worth(on_best(*swapping_less(config)))

    # Compiling takes 20 s (FLUX.1) to 75 s (SDXL) on an H200, which a short training never recovers.
    # Why: docs/decisions/2026-11-22-balanced-times-eager-steps-first.md
    def _is_worth(self, share: float, seconds: float) -> bool:
        return self.passes * fastest_setting(self.results, self.passes).seconds * share > seconds

    def measure_candidate(self, changes: Overrides) -> Measured:
        """Time a few passes with these options, and undo their changes."""
        result, requested = Measured(changes), self.compute_loss
        if self.kernels and (why := self.kernels.why_not(changes.get("attention_kernel"))):
            result.why = why
            return result
        try:
            at_once = {"compile_compare_steps": 0, "compile_from_step": None}
            always = {"compile_autotune": False, "compile_fallback": False, **at_once}
            config = building.replace_options(requested.config, **changes | always)
        except ConfigError as refused:
            result.why = refused.problems[0]
            return result
        undone = restored_after(requested.components.denoiser, requested.family)
        with CompileLog(self.journal.on_graph) as log, undone:
            try:
                self.time_candidate(replace(requested, config=config, compile_log=log), result)
            except Exception as error:
                # An attention kernel may fail although PyTorch lists it as usable.
                kernel = "attention_kernel" in changes and isinstance(error, RuntimeError)
                usual = isinstance(error, torch.OutOfMemoryError | MemoryError | ConfigError)
                if not kernel and not usual and not blocks.is_compile_error(error):
                    raise
                result.why = measuring_failure(error)
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        return result

    def time_candidate(self, compute_loss: LossFunction, result: Measured) -> None:
        """Prepare the denoiser for its config, and time passes over the most frequent batch sizes."""
        device, log, config = self.world.device, compute_loss.compile_log, compute_loss.config
        components, method = compute_loss.components, compute_loss.method
        texts = any(map(method.trained_parts.get, components.encoders))
        sizes = self.batches.kinds()
        prepare_denoiser(components.denoiser, compute_loss.family, config, device, sizes, texts, log)
        kinds = Counter(dict(sizes.most_common(MAX_TIMED_SIZES)))
        passes = ((self._pass_over(compute_loss, kind), number / kinds.total()) for kind, number in kinds.items())
        result.seconds, first, result.peak = measure_passes(passes, TIMED, device)
        result.compiling = first if config.compile.compile else 0.0
        log.drain()
        if missing := log.unproven():
            result.why = f"no graph was made for {', '.join(missing)}"
        elif broken := log.graph_breaks():
            result.why = f"a block does not fit into one graph ({broken[0]})"
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory / BYTES_PER_GIB
            room = MEMORY_MARGIN * min(memory, config.memory.gpu_memory_limit or memory)
            room -= ADAM_BYTES * sum(p.numel() for p in method.parameters()) / BYTES_PER_GIB
            if result.peak > room:
                result.why = f"needs {result.peak:.1f} GiB, and with the optimizer there are {room:.1f} GiB"

    def _pass_over(self, compute_loss: LossFunction, kind: Kind) -> Callable[[], None]:
        call = functools.partial(compute_loss.warm_up, self.batches.example(kind), self.world.device)
        if not compute_loss.config.compile.compile:  # attention calls can only be recorded in eager blocks
            self.kernels = self.kernels or attention.AttentionRecorder(self.world.device)
            with self.kernels:
                call()
        return call


def find_best_config(  # noqa: PLR0913 - a training that is about to begin, and what it chooses
    batches: Batches, compute_loss: LossFunction, clock: Clock, world: World, journal: Journal, choices: Choices
) -> RunConfig:
    """Return the config to train with: the user's, or with `compile_autotune` its fastest variant on this machine.

    One process measures for all. A resumed run keeps the earlier choice, and measures again only if that is no longer
    valid.
    """
    config = compute_loss.config
    if not config.compile.compile_autotune:
        return config
    if choices.tuned is not None:
        with contextlib.suppress(ConfigError):
            compute_loss.family.config = building.replace_options(config, **choices.tuned)
            journal.say(f"compile_autotune: {format_changes(choices.tuned)}, as in the run that is continued")
            return compute_loss.family.config
    choice = [Tuner(batches, compute_loss, clock, world, journal).decide() if world.main else None]
    if world.ranks > 1:
        # Measuring takes longer than the timeout of PyTorch's collectives.
        store, done = torch_private.process_store(), "compile_autotune"
        if world.main:
            store.set(done, "1")
        while not store.check([done]):
            journal.requests.check()
            time.sleep(WAIT)
        torch.distributed.broadcast_object_list(choice)
    choices.tuned = choice[0] or {}
    compute_loss.family.config = building.replace_options(config, **choices.tuned)
    return compute_loss.family.config


def read_results(name: str, passes: int) -> list[JsonObject]:
    """Return stored results; empty if there are none, they are damaged, or were measured for a much shorter
    training.
    """
    stored = stored_results.read_result(name)
    with contextlib.suppress(KeyError, TypeError):
        # A short training skips candidates that would pay in a longer one.
        enough = stored["complete"] or passes <= stored["passes"]
        if stored["version"] == VERSION and enough and all(isinstance(r["changes"], dict) for r in stored["results"]):
            return stored["results"]
    return []


def fastest_setting(results: list[Measured], passes: int) -> Measured:
    """Return the result with the shortest training time, compiling included; of equals, the earlier (simpler) one."""
    usable = [result for result in results if not result.why]
    if not usable:
        return Measured({})  # the user's config; its problem is reported when the training starts
    fastest = usable[0]
    for result in usable[1:]:
        if result.total(passes) < (1 - NOISE) * fastest.total(passes):
            fastest = result
    return fastest


def summarise_choice(chosen: Measured, results: list[Measured], passes: int, is_remembered: bool) -> str:
    """Return the choice and its reason for the log."""
    tried = f"compile_autotune: {counted(len(results), 'setting')} {'remembered' if is_remembered else 'tried'}"
    if len(results) == 1 and not results[0].changes.get("compile") and chosen.seconds:
        return (
            f"compile_autotune: eager steps take {chosen.seconds:.3g} s, so the whole training takes "
            f"{clock_time(chosen.total(passes))}: compiling would take longer than it saves"
        )
    if not chosen.seconds:
        return f"{tried}, but none works; continuing with {format_changes(chosen.changes) or 'yours'}"
    eager = next((r for r in results if r.changes.get("compile") is False and not r.why), None)
    against = f" instead of {eager.seconds:.3g} s eagerly" if eager and eager is not chosen else ""
    why = f"With it the whole training takes {clock_time(chosen.total(passes))}"
    if others := [result for result in results if not result.why and result is not chosen]:
        second = min(others, key=lambda result: result.total(passes))
        why += f", and {clock_time(second.total(passes))} with the next best, {short(second.changes)}"
    fast = f"{format_changes(chosen.changes)}: {chosen.seconds:.3g} s a batch{against}"
    return f"{tried}; the fastest is {fast}. {why}, compiling included."


def short(changes: Overrides) -> str:
    """Describe a candidate's changes."""
    words = [
        name.removeprefix("compile_") if value is True else f"{name.removeprefix('compile_')} {value}"
        for name, value in changes.items()
        if name != "compile"
    ]
    return ", ".join(["compiled" if changes.get("compile") else "eager", *words])
