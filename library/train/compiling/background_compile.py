"""Compiling beside the run: the first steps run eagerly while another process compiles the blocks into the cache."""

import threading
import time
from typing import Any, Protocol

import torch
from torch import nn

from library import families
from library.compiler import block_calls, blocks, cudagraph, torch_private
from library.compiler.block_calls import BlockCall, NotDescribed
from library.compiler.log import CompileLog
from library.config.problems import MessageLike, counted
from library.config.run_config import RunConfig
from library.data.loading import Batches, latent_area
from library.distributed.world import World
from library.memory.prepare import BYTES_OF_ADAM
from library.train.choices import Choices
from library.train.compiling.compile_process import CompileProcess, job_of
from library.train.step import rng
from library.train.step.clock import Clock
from library.train.step.loss import LossFunction

GIB = 2**30
INSTEAD = "compile_warmup = true compiles them before the first step"
BEFORE = "Blocks are compiled before the first step, not beside the first ones: {why}"
# Of a step whose CUDA graphs were recorded eagerly, compiling saves 22 % (SDXL) to 29 % (FLUX.1), measured on an H200.
SAVES = 0.2
TAKE_SECONDS = 1.0  # to load a graph from the cache into this process
RECORD_PASSES = 10  # recording a size takes as long: 24 recorded ones of SDXL, 6 of FLUX.1 on an H200
CACHED = 0.2  # of the seconds of compiling, where the cache has it all: 13 of 75 (SDXL), 3.4 of 14.7 (FLUX.1)
BESIDE = 2.0  # compiling takes this many times as long beside a training (FLUX.1 on an H200: 42 s instead of 20)
CONTEXT = 1.5 * GIB  # of the GPU, which a process with its libraries takes before it does anything
COPIES = 3  # of the largest block: its weights, their gradients, and what inductor tries
ACTIVATIONS = 80  # values that a pass over a block keeps for each value of its largest input
OTHER_SIZES = 0.6  # memory of all other recorded sizes, relative to the first


class Reporter(Protocol):
    """Receives log lines and events."""

    def say(self, text: str) -> None:
        """A line."""
        ...

    def event(self, kind: str, **facts: Any) -> None:
        """Something for the record."""
        ...


# Why: docs/decisions/2026-11-22-compile-beside-the-run.md
class BackgroundCompiler:
    """Decides whether blocks are compiled beside the run, and brings their graphs into it between steps."""

    def __init__(
        self, config: RunConfig, world: World, journal: Reporter, log: CompileLog, clock: Clock, choices: Choices
    ) -> None:
        self._config, self._world, self._journal = config, world, journal
        self._log, self._clock, self._choices = log, clock, choices
        self._calls: list[BlockCall] = []
        self._loaded = 0  # number of calls whose graphs are loaded into this process
        self._step_seconds, self._sizes = 0.0, 1
        self._process: CompileProcess | None = None
        self._imports: threading.Thread | None = None  # imports the compiler into this process
        self._begun = 0  # the step before the first one
        self._pauses: list[float] = []  # seconds between steps that bringing graphs in took

    @property
    def _forced(self) -> bool:
        return self._config.compile.compile_warmup == "beside"

    # ---- before the first step

    def why_not(self, denoiser: nn.Module) -> MessageLike:
        """Why blocks are compiled before the first step instead, "" if not; before anything is recorded."""
        if why := self._config.compile.why_not_in_background(self._config):
            return why
        if self._world.ranks > 1:
            return "not used with several processes"
        if self._choices.compiled_from:
            return "the run that is continued had compiled blocks"
        if self._forced:
            return ""
        if self._config.compile.compile_autotune:
            return "compile_autotune has compiled them"
        if self._world.device.type != "cuda":
            return "steps are recorded on a GPU alone"
        recorder = cudagraph.recorder_of(denoiser)
        return "" if recorder and not recorder.why_not else "steps are not recorded"

    def begin(self, batches: Batches, compute_loss: LossFunction) -> bool:
        """Record the steps eagerly, and let another process begin to compile. False where that cannot be: all blocks
        are then set up to be compiled before the first step.

        Where compiling would take longer than it saves, blocks stay as they are. Nothing that is drawn changes.
        """
        denoiser, log, device = compute_loss.components.denoiser, self._log, self._world.device
        recorder = cudagraph.recorder_of(denoiser)
        if why := self.why_not(denoiser):
            if self._forced and not self._config.compile.why_not_in_background(self._config):  # the check has told that
                self._journal.say(BEFORE.format(why=why))
            return False
        blocks.postpone(denoiser, log)
        _, compiling = families.compiling(self._config)
        if self._choices.stays_eager == self._clock.total:
            self._journal.say(f"Blocks stay eager, as in the run that is continued. {INSTEAD}")
            return True
        before, no_room = rng.get_rng_state(device), ""
        try:
            self._calls = self._record_calls(batches, compute_loss)
            why = no_room = self._why_no_room(denoiser)
        except NotDescribed as error:
            why = f"blocks are called with {error}"
        except torch.OutOfMemoryError:  # compiled blocks keep fewer activations than eager ones
            why = "the GPU's memory is too small for steps without compiled blocks"
        finally:
            rng.set_rng_state(before, device)
        if not self._forced and recorder and recorder.why_not:
            why = "steps are not recorded"
        # Eager steps fit. Whether the cache has what would be compiled is not known: that it has is the better case.
        if why and why == no_room and not self._saves_time(standing=CACHED * compiling):
            return True
        if why:
            self._journal.say(BEFORE.format(why=why))
            if recorder and (recorder.lacks_memory or not recorder.why_not):
                recorder.begin_again()
            blocks.begin_due(log, {}, 0)
            return False
        if self._saves_time(beside=BESIDE * compiling):
            self._calls = block_calls.costliest_first(self._calls, denoiser)
            text_learns = any(map(compute_loss.method.trained_parts.get, compute_loss.components.encoders))
            self._begun = self._clock.step
            self._process = CompileProcess(job_of(self._config, [*batches.kinds()], text_learns, self._calls, device))
            if recorder:
                recorder.free_others = self.make_room
            self._journal.say(
                f"The first steps run without compiled blocks, and were measured to take {self._step_seconds:.3g} s "
                f"each; beside them a process compiles {counted(len(self._calls), 'graph')} of blocks"
            )
        return True

    def _record_calls(self, batches: Batches, compute_loss: LossFunction) -> list[BlockCall]:
        """What blocks are called with, for every size that needs graphs of its own; the sizes are recorded on the way.

        The largest is recorded first, as the others find room in its memory. Its graphs come last: those that serve all
        sizes are tuned for the most frequent one.
        """
        kinds = batches.kinds()
        self._sizes = len(kinds)
        wanted = [kind for kind, _ in kinds.most_common()]
        if self._config.compile.dynamic is not False:
            wanted = [next(k for k in wanted if k[0] == number) for number in dict.fromkeys(kind[0] for kind in wanted)]
        found: dict[tuple[int, ...], list[BlockCall]] = {}
        for kind in dict.fromkeys([max(kinds, key=latent_area), *wanted]):
            with block_calls.noted(compute_loss.components.denoiser, self._log) as found[kind]:
                compute_loss.warm_up(batches.example(kind), self._world.device)
        self._wait()
        began = time.perf_counter()
        compute_loss.warm_up(batches.example(wanted[0]), self._world.device)
        self._wait()
        self._step_seconds = time.perf_counter() - began
        self._step_seconds *= self._config.steps.gradient_accumulation_steps
        return [call for kind in wanted for call in found[kind]]

    def _why_no_room(self, denoiser: nn.Module) -> str:
        """Why a second process would have too little of the GPU's memory beside the training, "" if there is enough."""
        device = self._world.device
        if device.type != "cuda" or self._forced:
            return ""
        torch.cuda.empty_cache()
        left = torch.cuda.mem_get_info(device)[0] - cudagraph.SPARE_BYTES
        left -= OTHER_SIZES * cudagraph.peak(device) if self._sizes > 1 else 0
        if not self._config.optim.stepped_early:
            left -= BYTES_OF_ADAM * sum(p.numel() for p in denoiser.parameters() if p.requires_grad)
        need = CONTEXT + max(
            COPIES * sum(p.nbytes for p in denoiser.get_submodule(call.path).parameters())
            + ACTIVATIONS * call.largest_tensor
            for call in self._calls
        )
        if left >= need:
            return ""
        return f"that needs {need / GIB:.1f} GiB of the GPU, and the training leaves {max(left, 0) / GIB:.1f} GiB"

    def _saves_time(self, beside: float = 0.0, standing: float = 0.0) -> bool:
        """Whether compiled blocks save more of the steps that are left than switching to them takes, or are asked for.

        They have to be compiled first: in `beside` seconds, in which steps run eagerly, or in `standing` seconds, in
        which none does. A training that they do not pay for keeps its eager blocks, and so do those that continue it.
        """
        steps = self._clock.total - self._clock.step
        saves = max(steps * self._step_seconds - beside, 0.0) * SAVES
        costs = standing or TAKE_SECONDS * (len(self._calls) - self._loaded)
        costs += RECORD_PASSES * self._step_seconds * self._sizes
        if self._forced or saves > costs:
            return True
        self._choices.stays_eager = self._clock.total
        after = f"begin after about {beside:.0f} s of compiling beside them, " if beside else ""
        self._journal.say(
            f"Blocks are not compiled: a step was measured to take {self._step_seconds:.3g} s without it, and "
            f"{steps} are left. Compiled ones would {after}save {saves:.0f} s, and need {costs:.0f} s to "
            f"{'be made from the cache alone' if standing else 'switch to'}"
        )
        return False

    # ---- between steps

    def import_compiler(self) -> None:
        """After the first step, import on a thread what bringing graphs in needs, so that no step waits for it."""
        if self._process and self._imports is None and self._clock.step > self._begun + 1:
            self._imports = threading.Thread(target=torch_private.import_inductor, name="compiler", daemon=True)
            self._imports.start()

    @property
    def due(self) -> bool:
        """Whether a graph is ready to be loaded, or the process has failed."""
        process = self._process
        return process is not None and (process.compiled > self._loaded or bool(process.failure))

    def load_next_graph(self, denoiser: nn.Module) -> bool:
        """Between two steps: load one graph from the cache into this process. True once all are loaded and it pays.

        Blocks still run eagerly: the loaded graphs are used later.
        """
        if self._process and self._process.compiled <= self._loaded:
            return self.give_up(self._process.failure)
        call, began = self._calls[self._loaded], time.perf_counter()
        before = rng.get_rng_state(self._world.device)
        try:
            if self._imports:
                self._imports.join()
            with blocks.compiled_alone(denoiser.get_submodule(call.path), self._log):
                block_calls.repeat(denoiser, call, self._world.device)
            self._wait()
        except Exception as error:
            if not blocks.is_compile_error(error) and not isinstance(error, torch.OutOfMemoryError):
                raise
            return self.give_up(blocks.why(error))
        finally:
            rng.set_rng_state(before, self._world.device)
        self._loaded += 1
        self._pauses.append(time.perf_counter() - began)
        if self._loaded < len(self._calls):
            return False
        self.stop()
        return self._saves_time()

    def log_switch(self, seconds: float) -> None:
        """Log that blocks are compiled from this step on, which waited `seconds` for them."""
        step, self._choices.compiled_from = self._clock.step, self._clock.step
        longest, total = max(self._pauses), sum(self._pauses)
        self._journal.event("takeover", step=step, seconds=seconds, pauses=self._pauses)
        self._journal.say(
            f"Compiled blocks take over from step {step} on, which waited {seconds:.1f} s for them; the steps before "
            f"waited {total:.1f} s in {len(self._pauses)} pauses of at most {longest:.1f} s. Without them a step was "
            f"measured to take {self._step_seconds:.3g} s before the first one"
        )

    def give_up(self, why: str) -> bool:
        """Stop compiling and keep eager blocks to the end of the training; returns False."""
        self.stop()
        self._choices.stays_eager = self._clock.total
        self._journal.say(f"Blocks stay eager, as they could not be compiled beside the run: {why}. {INSTEAD}")
        return False

    def make_room(self) -> bool:
        """End the other process, as the GPU's memory has become too small; returns whether it was still running."""
        if self._process is None or not self._process.running:
            return False
        self.give_up("the GPU's memory is too small for both")
        return True

    def unused(self) -> str:
        """At the end of a run: that it ended before its compiled blocks could be used, "" if it did not."""
        if self._process is None:
            return ""
        ready = f"{self._process.compiled} of {counted(len(self._calls), 'graph')} ready"
        return f"The training ended before its blocks were compiled beside it ({ready}), so they ran eagerly. {INSTEAD}"

    def stop(self) -> None:
        """End the other process, if there is one."""
        if self._process:
            self._process.stop()
        self._process = None

    def _wait(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
