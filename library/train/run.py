"""One training on this machine: its processes, its device, its random numbers, its clock and its diary."""

import contextlib
import datetime
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor, nn

from library.compiler import blocks
from library.compiler.log import CompileLog
from library.config.schema import ConfigError, changed
from library.memory.quantization import fp8_storage
from library.outputs.hub import Uploads
from library.runs.record import Record
from library.train import compiling, errors, footprint, rng
from library.train.clock import Clock, windows
from library.train.meter import Batch, Line, Meter
from library.train.place import Place, place
from library.train.progress import Progress, clock
from library.train.step_timer import StepTimer
from library.train.stop_requests import ASKED, ControlRequests, WorkCancelled
from library.train.trackers import Trackers

logger = logging.getLogger(__name__)


class Run:
    """What all parts of a training share. Use it as a context manager: it closes the diary with the outcome."""

    def __init__(self, config: Any) -> None:
        self.config = config
        mixed = config.precision.mixed_precision
        no_gpu = not torch.cuda.is_available()  # unless told so, several processes on a CPU do not find each other
        self.accelerator = Accelerator(mixed_precision=mixed, cpu=no_gpu, kwargs_handlers=_handlers(config))
        self.device: torch.device = self.accelerator.device
        if self.device.type == "cpu":  # of several processes it has a number, which torch.load does not understand
            self.device = torch.device("cpu")
        self.main = self.accelerator.is_main_process
        self.rank: int = self.accelerator.process_index
        self.ranks: int = self.accelerator.num_processes
        self.storage, self.compute = fp8_storage.storage_type(config), fp8_storage.compute_type(config)
        self.seed = rng.seed_everything(config.steps.seed, self.ranks)
        self.generator = torch.Generator(self.device)
        self.encoding = torch.Generator(self.device)  # of the VAE's own noise, for latents that are not cached
        self.record = self._record() if self.main else None
        self.trackers: Trackers | None = None
        self.clock = Clock(total=0, per_epoch=1, epochs=1)
        self.meter = Meter(total=0, per_epoch=1)
        self.split = StepTimer(self.device)
        self._footprint = footprint.Footprint(self.device)
        self._non_finite = errors.NonFiniteWatch(scaled=self.accelerator.scaler is not None)
        self.uploads = Uploads(config, self)
        self.wishes = ControlRequests(self.record, config.save.save_state_every_n_minutes)
        self.stopping = False
        self._place: Place | None = None  # where it stood before this step, if the step can be dropped
        self.wished: set[str] = set()  # what somebody wants to be done after this step
        self._progress = Progress(self.say)
        self.doing = ""  # what goes on outside of the steps
        self.newest: dict[str, Path] = {}  # "file" and "state" -> what was saved last
        self.optimizer: Any = None  # set once there is one
        self.forget_gradients: Callable[[], None] = lambda: None
        self._learning: list[Any] = []  # networks in the wrapping that averages their gradients
        self._batches: list[Batch] = []  # of the last step
        self._asked: dict[str, Tensor] = {}  # with several processes: what one of them was asked for
        self.compile_log = CompileLog(self.record.phase if self.record else None)

    def __enter__(self) -> "Run":
        self.wishes.listen()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        told = errors.explain_error(error, self) if error else None
        if told is not None and told is not error:
            told.__cause__ = error  # whose traceback belongs into the log
        try:
            self._end(told, trace)
        finally:
            self.compile_log.close()
            self.wishes.forget()
        if told is not None and told is not error:
            raise told from error

    def _end(self, error: BaseException | None, trace: Any) -> None:
        self.uploads.finish()
        if self.record:
            for line, _ in self.meter.lines():
                self._write({name: value for name, value in line.items() if name not in ASKED})
            self.record.note(compile=self.compile_log.summary(), **self._footprint.peaks())
            if sentence := self.compile_log.sentence():
                self.say(sentence)
            if error is None and self.clock.done:  # a wish to stop that came during the last step changed nothing
                self.record.finish("finished")
            self.record.__exit__(type(error) if error else None, error, trace)
        if self.trackers:
            self.trackers.close()
        if self.ranks > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    # Talking to whoever watches.

    def say(self, text: str) -> None:
        """A line for the user, once, whatever the number of processes."""
        if self.record:
            self.record.say(text)

    def begin(self, remarks: Sequence[str], notes: Sequence[str] = ()) -> None:
        """Say what should be known about this run before it starts; `notes` are on the console already."""
        for note in notes:
            self.event("warning", text=note)
        if self.record:
            self.trackers = Trackers(self.config, self.record.folder)
        if self.main:
            self.uploads.begin()
        for remark in remarks:
            self.warn(remark)

    def warn(self, text: str) -> None:
        """A sentence that should not be overlooked."""
        if self.record:
            self.record.event("warning", text=text)
            self.record.say(f"Warning: {text}")

    def event(self, kind: str, **facts: Any) -> None:
        """Something for the run's record."""
        if self.record:
            self.record.event(kind, **facts)

    def sampled(self, number: int, path: Path, image: Any, prompt: Any) -> None:
        """A sample image is on the disk."""
        if self.record and self.trackers:
            self.record.event("sample", file=str(path), step=self.clock.step, prompt=prompt.prompt, number=number)
            self.trackers.image(f"sample_{number}", image, self.clock.step)

    def saved(self, path: Path, **checked: Any) -> None:
        """A file or the folder of a state is on the disk, whole; `checked` is what `readback` found."""
        self.newest[errors.kind_of(path)] = path
        size = sum(f.stat().st_size for f in (path.rglob("*") if path.is_dir() else [path]) if f.is_file())
        self.event("saved", file=str(path), step=self.clock.step, bytes=size, **checked)
        if not checked.get("backup"):
            self.uploads.add(path)

    def state_saved(self) -> None:
        """A state of this step is saved, or could not be: the next one is due later."""
        self.wished.discard("backup")
        self.wishes.state_saved()

    def validated(self, when: str, losses: dict[str, float]) -> None:
        """The held back images were measured, at the end of a "step" or an "epoch": the loss by noise level."""
        loss = sum(losses.values()) / len(losses)
        divergence = loss - self.meter.average
        clock, facts = self.clock, {"when": when, "loss": loss, "divergence": divergence, "by_timestep": losses}
        self.event("validation", step=clock.step, epoch=clock.epoch, **facts)
        self.say(f"validation after {when} {getattr(clock, when)}: loss {loss:.4f}, "
                 f"{abs(divergence):.4f} {'above' if divergence > 0 else 'below'} training's average")  # fmt: skip
        if self.trackers:
            self.trackers.validated(when, getattr(clock, when), loss, divergence)

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """What is going on outside of the steps. Before the first one this is also where a wish to stop is heard."""
        self.doing = name
        if self.record:
            self.record.phase(name, done, total)
            self._progress(name, done, total)
        self.wishes.check()

    # The machine.

    @property
    def compiled(self) -> bool:
        """Whether blocks are compiled, for which short batches are filled up."""
        return self.config.compile.compile and not self.compile_log.fallback

    def autocast(self) -> contextlib.AbstractContextManager:
        """Mixed precision, as asked for. It stays around compiled blocks, never inside of them."""
        return self.accelerator.autocast()

    def place(self, parts: Any, method: Any, keep_vae: bool) -> None:
        """Encoders that have nothing left to do leave; the others move to the device. The denoiser's place is decided
        in `memory.prepare`."""
        if not self.config.cache.latents:
            parts.vae.to(self.device)
        elif not keep_vae:
            parts.vae = None
        for name in list(parts.encoders):
            if self.config.cache.text and not method.trained_parts.get(name):
                parts.encoders.pop(name).to("cpu")  # a model that learns keeps them for its file
            else:
                parts.encoders[name].to(self.device)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def distribute(self, parts: Any, method: Any) -> None:
        """Let several processes average the gradients of what learns."""
        for name, encoder in parts.encoders.items():
            if method.trained_parts.get(name):
                parts.encoders[name] = self._shared(encoder, whole=False)
        if method.trained_parts.get("denoiser"):
            parts.denoiser = self._shared(parts.denoiser, whole=True)

    def _shared(self, network: nn.Module, whole: bool) -> nn.Module:
        if self.accelerator.num_processes == 1 or self.config.optim.stepped_early:  # which averages by itself
            return network
        options = self.config.distributed
        ids = [self.device.index] if self.device.type == "cuda" else None
        network = nn.parallel.DistributedDataParallel(
            network,
            device_ids=ids,
            # The last layers of a text encoder do not take part: families read an earlier one.
            find_unused_parameters=not whole,
            gradient_as_bucket_view=options.ddp_gradient_as_bucket_view,
            static_graph=options.ddp_static_graph,
        )
        self._learning.append(network)
        return network

    def average(self, tensor: Tensor) -> None:
        """Make a tensor the mean of all processes', in place."""
        torch.distributed.all_reduce(tensor)
        tensor /= self.ranks

    def gathered(self, value: Any) -> list[Any]:
        """The value of every process, in order."""
        found = [value] * self.ranks
        if self.ranks > 1:
            torch.distributed.all_gather_object(found, value)
        return found

    # The steps.

    def plan(self, batches: Any, summary: dict[str, Any]) -> None:
        """Set the clock to the length of this training, and say what lies ahead."""
        self.start(batches)
        self.meter = Meter(self.clock.total, self.clock.per_epoch)
        if self.record:
            self.record.plan(self.clock.total, epochs=self.clock.epochs, data=summary)
        sizes = len(batches.shapes)
        self.say(
            f"{summary['images']} images, {len(batches)} batches per epoch in {sizes} size{'s' * (sizes != 1)}; "
            f"{self.clock.total} steps in {self.clock.epochs} epochs"
        )

    def start(self, batches: Any) -> None:
        """Go to where the config says that the training begins, which is nearly always its first step."""
        self.clock = Clock.of(self.config, len(batches))
        batches.go_to(self.clock.epoch, self.clock.in_epoch * self.config.steps.gradient_accumulation_steps)

    def steps(self, batches: Any) -> Iterator[list[Any]]:
        """The batches of each optimizer step, from where the clock stands to the end, or until someone says stop."""
        size = self.config.steps.gradient_accumulation_steps
        self.wishes.defer_signals()
        while not self.clock.done and not self.stopping:
            if self.clock.epoch_ended:
                batches.set_epoch(self.clock.epoch + 1)
            self._place = place(self, batches)
            for window in self.split.waited(windows(batches, size)):
                self.clock.tick()
                self.doing = ""
                yield window
                if self.clock.done or self._asked_to_stop():
                    break
                self._place = place(self, batches)

    def learn(self, window: Sequence[Any], wrong: Callable[[Any], Tensor]) -> Tensor | None:
        """Forward and backward over the batches of one step; returns their mean loss over all processes.

        None when somebody cannot wait for the end of the step: it is dropped, and all is as before it.
        When compiling fails, the whole step is done again without it (`--compile_fallback`), from the same random
        numbers: forward and backward must never differ in this.
        """
        try:
            return self._over_all(self._learned(window, wrong))
        except WorkCancelled:
            self.stopping = self._place is not None and self._place.go_back(self)
            return None

    def _learned(self, window: Sequence[Any], wrong: Callable[[Any], Tensor]) -> Tensor:
        if not self.compile_log.active:
            return self._accumulate(window, wrong)
        before = rng.get_rng_state(self.device)
        try:
            return self._accumulate(window, wrong)
        except Exception as error:
            if not blocks.is_compile_error(error):
                raise
            compiling.give_up(self, error)
        rng.set_rng_state(before, self.device)
        return self._accumulate(window, wrong)

    def _accumulate(self, window: Sequence[Any], wrong: Callable[[Any], Tensor]) -> Tensor:
        self._batches = []
        for number, batch in enumerate(window, start=1):
            if self._place:
                self.wishes.hurry()
            with contextlib.ExitStack() as stack:
                if number < len(window):
                    for network in self._learning:
                        stack.enter_context(network.no_sync())
                self._reseed(number)
                self.compile_log.bucket = batch.bucket
                loss = wrong(self.split.moved(batch))
                self.accelerator.backward(loss / len(window) if len(window) > 1 else loss)
            self._batches.append((loss.detach(), batch.paths))
        losses = [loss for loss, _ in self._batches]
        return torch.stack(losses).mean() if len(losses) > 1 else losses[0]

    def _over_all(self, loss: Tensor) -> Tensor:
        """The mean over all processes, and on the way whether one of them was asked for something."""
        if self.ranks == 1:
            return loss
        all_ = torch.stack([loss, *(torch.full_like(loss, float(said)) for said in self.wishes.flags())])
        self.average(all_)
        self._asked = dict(zip(ASKED, all_[1:], strict=True))
        return all_[0]

    def log(self, loss: Tensor, extra: dict[str, Tensor], rates: dict[str, float]) -> None:
        """Note the step, which is done. The numbers stay on the device until they are ready to be read."""
        self.wishes.learned()
        made = compiling.note(self)
        line = {"step": self.clock.step, "epoch": self.clock.epoch, "lr": rates}
        line |= {**self._footprint.now(), **self.compile_log.curves()}
        odd, values = made or self.compile_log.waiting, {"loss": loss, **extra, **self._asked}
        self.meter.push(line, values, self._batches, compiled=odd, moments=self.split.ended())
        self.compile_log.note_step(self.clock.step, None if made else self.meter.took)
        if made or (self.clock.step == 1 and not self.config.compile.ahead):
            compiling.prove(self)
        self._read_lines(self.meter.lines() if self.ranks == 1 else self.meter.lines_until(self.clock.step - 1))

    def settle(self) -> None:
        """What comes next is no step, and relies on all before it: read their numbers, raise where one is none."""
        self.meter.pause()
        self._read_lines(self.meter.lines(wait=True))

    def _read_lines(self, lines: Sequence[Line]) -> None:
        """Write down what has arrived. Several processes read the lines of a step at the same time, and all stop."""
        for line, images in lines:
            self.wished |= {name for name in ASKED if line.pop(name, 0.0) > 0}
            self.stopping |= "stop" in self.wished
            self._write(line)
            if odd := self._non_finite.check(line):
                every = [path for own in self.gathered(images) for path in own]
                raise ConfigError(errors.non_finite_message(odd, line, every, self))

    def _write(self, line: dict[str, Any]) -> None:
        if self.record and self.trackers:
            self.record.step(line)
            self.trackers.log(line)
            self._print(line)

    def _print(self, line: dict[str, Any]) -> None:
        """A line now and then; the page and progress.jsonl have every step."""
        step, total = line["step"], self.clock.total
        if step in (1, total) or step % max(total // 100, 1) == 0:
            pace = f", {line['s_it']:.2f} s/it, {clock(line['eta'])} left" if "s_it" in line else ""
            self.say(f"step {step}/{total}, epoch {line['epoch']}, loss {line['loss']:.4f} "
                     f"(average {line['avr_loss']:.4f}){pace}")  # fmt: skip

    def _asked_to_stop(self) -> bool:
        if self.ranks == 1:  # of several, all have read the same answer in the lines of the step before
            self.stopping = self.wishes.asked()
            self.wished |= self.wishes.pop()
        return self.stopping

    def granted(self, wish: str) -> bool:
        """Whether "sample", "save" or "backup" is wanted after this step; asked once, it is forgotten."""
        found = wish in self.wished
        self.wished.discard(wish)
        return found

    def _reseed(self, number: int) -> None:
        """The noise of a batch depends on the seed, the step and the batch's number in it, and on nothing before."""
        text = f"{self.seed} {self.clock.step} {number}"
        self.generator.manual_seed(rng.derive_seed(text))
        self.encoding.manual_seed(rng.derive_seed(f"{text} {self.rank}"))

    # The diary.

    def _record(self) -> Record:
        config = self.config
        known = changed(config, secrets=True)  # so that they can be kept out of whatever is written
        record = Record.start(known, config.script, config.save.output_dir, config.save.output_name, config.title)
        record.note(seed=self.seed, hardware=footprint.facts(self.device, self.ranks))
        return record


def _handlers(config: Any) -> list[Any]:
    options = config.distributed
    handlers: list[Any] = [DistributedDataParallelKwargs(gradient_as_bucket_view=options.ddp_gradient_as_bucket_view)]
    if options.ddp_timeout:
        handlers.append(InitProcessGroupKwargs(timeout=datetime.timedelta(minutes=options.ddp_timeout)))
    return handlers
