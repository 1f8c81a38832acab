"""Reports of a training besides its files: run record, console, trackers, uploads."""

import datetime
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from library.config.json_types import JsonMapping
from library.config.problems import Message, MessageLike, Report, counted
from library.config.run_config import RunConfig
from library.config.schema import changed
from library.data.loading import Batches
from library.distributed.process_watch import ProcessWatch
from library.distributed.world import World
from library.outputs import paths
from library.outputs.hub import Uploads
from library.outputs.trackers import Trackers
from library.runs.record import Record, error_sentence
from library.sampling.prompts import Prompt
from library.sampling.recorded_prompts import images_by_field
from library.train import errors
from library.train.step.clock import Clock
from library.train.stop_requests import ControlRequests, Stopped

MIN_SHOWN = 0.05  # seconds that a part of the start has to take
LOG_INTERVAL = 5.0  # minimum seconds between two progress lines of the same work


class Journal:
    """Writes the record, console, trackers and uploads of a training. As a context manager it records the outcome.

    Only the first process writes; in the others all calls do nothing.
    """

    def __init__(self, config: RunConfig, world: World, seed: int, began: float = 0) -> None:
        """`began` is the start of the process in seconds since 1970; by default now."""
        self._config, self._world = config, world
        # Finished phases before the first step, and when they ended, by the monotonic clock.
        start = time.monotonic() - max(time.time() - began, 0.0) if began else time.monotonic()
        self._marks: list[tuple[MessageLike, float]] = [("", start)]
        self.record: Record | None = None
        if world.main:
            options = changed(config, secrets=True)  # the record removes secrets from its files
            save = config.save
            self.record = Record.start(options, config.script, save.output_dir or "", save.output_name, config.title)
            self.record.note(seed=seed, hardware=world.memory.hardware(world.ranks))
        self.trackers: Trackers | None = None
        self.uploads = Uploads(config, self)
        self._to_upload: list[Path] = []
        self.process_watch = ProcessWatch(world, self.record)
        self.requests = ControlRequests(self.record, config.save.save_state_every_n_minutes, self.process_watch)
        self.doing = Message("")  # current phase, or "step 12", for error messages
        self.completed = False  # whether all steps are done, even if a stop was requested during the last one
        self.newest: dict[str, Path] = {}  # "file" and "state" -> what was saved last
        self._progress = Progress(self.say)
        self._began, self._previews = self._marks[0][1], (0, 0.0)  # number of images, and their seconds

    def __enter__(self) -> "Journal":
        self.requests.listen()
        self.process_watch.watch(self._process_gone, self.requests.stopped_early)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.requests.end()
        explained = errors.explain_error(error, self._config, self.doing, self.newest) if error else None
        if isinstance(error, Exception) and self.requests.interrupted:
            explained = Stopped()  # the signal interrupted C code, which raised its own error
        # Each backend raises a different error for a lost process.
        lost = explained is error and isinstance(error, RuntimeError) and self.process_watch.gone
        if lost or isinstance(explained, errors.ProcessGone):
            explained = self._process_gone(explained)
            self.process_watch.tell(explained)
        elif isinstance(explained, Exception) and self._world.messages and not self._world.main:
            self._world.messages.report_failure(error_sentence(explained))  # the first process prints its own
        self.process_watch.leave()
        if explained is not None and explained is not error:
            explained.__cause__ = error  # for the traceback in the log
        try:
            self.upload_saved()
            self.uploads.finish()
            if self.record:
                self.record.note(**self._world.memory.peaks())
                if error is None and self.completed:
                    self.record.finish("finished")
                self.record.__exit__(type(explained) if explained else None, explained, trace)
            if self.trackers:
                self.trackers.close()
        finally:
            self.requests.forget()
        if explained is not None and explained is not error:
            raise explained from error

    def _process_gone(self, error: BaseException | None = None) -> errors.ProcessGone:
        newest = self.newest or self.process_watch.newest
        reported = self._world.messages.reported_failure() if self._world.messages else ""
        if isinstance(error, errors.ProcessSilent) and not reported:
            return errors.process_silent(self.doing, newest)
        return errors.process_gone(self.doing, newest, reported)

    def begin(self, remarks: Sequence[Message], notes: Sequence[Message]) -> None:
        """Open trackers and uploads, and log remarks and notes; `notes` are already printed."""
        for note in notes:
            self.event("warning", text=note)
        if self.record:
            self.trackers = Trackers(self._config, self.record.folder, self.warn)
            self.uploads.begin()
        for remark in remarks:
            self.warn(remark)

    @property
    def has_curves(self) -> bool:
        # Some numbers are computed only for trackers.
        return self.trackers is not None and self.trackers.open

    def say(self, text: str) -> None:
        if self.record:
            self.record.say(text)

    def warn(self, text: Message, **facts: str) -> None:
        self.event("warning", text=text, **facts)
        self.say(f"Warning: {text}")

    def event(self, kind: str, **facts: Any) -> None:
        if self.record:
            self.record.event(kind, **facts)

    def note(self, **facts: Any) -> None:
        if self.record:
            self.record.note(**facts)

    def phase(self, name: Message, done: int | None = None, total: int | None = None) -> None:
        """Report the current phase outside of steps. Before the first step, raise Stopped if a stop was requested."""
        if self._marks and name != self.doing:
            self.mark(self.doing or "imports and checks")
        self.doing = name
        if self.record:
            self.record.phase(name, done, total)
            self._progress(name, done, total)
        self.requests.check()

    def mark(self, done: MessageLike) -> None:
        self._marks.append((done, time.monotonic()))

    def ready(self) -> None:
        """Print how the time before the first step was spent."""
        self.mark("the rest")
        spent: dict[str, float] = {}
        for (_, before), (name, now) in itertools.pairwise(self._marks):
            spent[str(name)] = spent.get(str(name), 0.0) + now - before
        shares = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent.items() if seconds >= MIN_SHOWN)
        self.say(f"Ready for the first step after {sum(spent.values()):.1f} s: {shares}")
        self._marks.clear()

    @property
    def on_graph(self) -> Report | None:
        # The compiler may call it from another thread, when a graph begins.
        return self.record.phase if self.record else None

    def plan(self, clock: Clock, data: JsonMapping, batches: Batches) -> None:
        """Report the numbers of images, batches, steps and epochs."""
        self.mark(self.doing)
        if self.record:
            self.record.plan(clock.total, epochs=clock.epochs, data=data)
        images, sizes = counted(data["images"], "image"), counted(len(batches.shapes), "size")
        in_epoch = "1 batch" if len(batches) == 1 else f"{len(batches)} batches"
        steps, epochs = counted(clock.total, "step"), counted(clock.epochs, "epoch")
        self.say(f"{images}, {in_epoch} per epoch in {sizes}; {steps} in {epochs}")
        if lengths := sorted(set(batches.text_lengths.values())):
            span = f"{lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else lengths[0]
            self.say(f"Steps read {span} tokens of each caption; validation and samples read all")

    def step(self, line: JsonMapping, total: int) -> None:
        """Log the numbers of a step to record and trackers, and about 100 times per training on the console."""
        if not self.record or not self.trackers:
            return
        self.record.step(line)
        self.trackers.log(line)
        step = line["step"]
        if step in (1, total) or step % max(total // 100, 1) == 0:
            pace = f", {pace_of(line['s_it'])} s/it, {clock_time(line['eta'])} left" if "s_it" in line else ""
            self.say(
                f"step {step}/{total}, epoch {line['epoch']}, loss {line['loss']:.4f} "
                f"(average {line['avr_loss']:.4f}){pace}"
            )

    def sampled(self, step: int, number: int, path: Path, image: Any, prompt: Prompt) -> None:
        """Report that a sample image was saved."""
        images = {"images": shown} if (shown := images_by_field(prompt)) else {}
        self.event("sample", file=str(path), step=step, prompt=prompt.prompt, number=number, seed=prompt.seed, **images)
        if self.trackers:
            self.trackers.image(f"sample_{number}", image, step)

    def previewed(self, step: int, images: int, seconds: float) -> None:
        """Report the time that a set of samples took, and what all of them have cost so far."""
        total = self._previews = self._previews[0] + images, self._previews[1] + seconds
        share = min(total[1] / max(time.monotonic() - self._began, 1e-3), 1.0)
        self.event("preview", step=step, pictures=images, seconds=round(seconds, 3), share=round(share, 4))
        self.note(previews={"pictures": total[0], "seconds": round(total[1], 3), "share": round(share, 4)})
        self.say(
            f"{counted(images, 'sample image')} in {seconds:.1f} s; samples took {share:.0%} of the training so far"
        )

    def saving(self, state: Path, step: int) -> None:
        # The record then names it even if the process is killed meanwhile.
        self.event("saving", file=str(state), step=step)

    def saved(self, path: Path, step: int, **checked: Any) -> None:
        """Report that a file or state is complete; `checked` is the result of `verify_saved_file`."""
        self.newest[paths.saved_kind(path)] = path
        size = sum(f.stat().st_size for f in (path.rglob("*") if path.is_dir() else [path]) if f.is_file())
        self.event("saved", file=str(path), step=step, bytes=size, **checked)
        if not checked.get("backup"):
            self._to_upload.append(path)

    def upload_saved(self) -> None:
        # Uploading only now keeps the network from delaying a save of the same step.
        while self._to_upload:
            self.uploads.add(self._to_upload.pop(0))

    def validated(self, when: str, clock: Clock, losses: Mapping[str, float], average: float) -> None:
        """Report a validation at the end of a "step" or an "epoch": `losses` by noise level, and training's `average`
        loss.
        """
        loss = sum(losses.values()) / len(losses)
        divergence, number = loss - average, getattr(clock, when)
        facts = {"when": when, "loss": loss, "divergence": divergence, "by_timestep": losses}
        self.event("validation", step=clock.step, epoch=clock.epoch, **facts)
        self.say(
            f"validation after {when} {number}: loss {loss:.4f}, "
            f"{abs(divergence):.4f} {'above' if divergence > 0 else 'below'} training's average"
        )
        if self.trackers:
            self.trackers.validated(when, number, loss, divergence)


class Progress:
    """Prints the progress of long work: at its start, its end and every few seconds.

    Call it with the name of the work, the number of finished items, and the total.
    """

    def __init__(self, say: Callable[[str], object], min_seconds: float = 0.0) -> None:
        self._say, self._min_seconds = say, min_seconds
        self._name, self._since, self._before, self._said = "", 0.0, 0, 0.0

    def __call__(self, name: MessageLike, done: int | None = None, total: int | None = None) -> None:
        """Report progress, unless the last line is less than LOG_INTERVAL old."""
        name = str(name)
        now = time.monotonic()
        if not total:
            self._name = ""
            self._say(name)
            return
        done, begins = done or 0, name != self._name
        if begins:
            self._name, self._since, self._before = name, now, done
        if now - self._since < self._min_seconds:
            return
        if begins or done == total or now - self._said >= LOG_INTERVAL:
            self._said = now
            self._say(f"{name}: {done} of {total}{self._left(done, total, now)}")

    def _left(self, done: int, total: int, now: float) -> str:
        """Return the estimated remaining time."""
        if done in (self._before, total):
            return ""
        seconds = (now - self._since) / (done - self._before) * (total - done)
        return f", {clock_time(seconds)} left"


def pace_of(seconds: float) -> str:
    """Return seconds per step, exact to 1 % from 0.05 s on."""
    return f"{seconds:.{2 if seconds >= 1 else 3}f}"


def clock_time(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))  # h:mm:ss
