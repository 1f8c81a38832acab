"""`kohya probe`: run a few real steps of a training at its largest bucket, including sampling and saving, and find what
fits.

Each try is a training in a separate process, on single-colour images in a temporary folder, so that nothing of the
user's is touched and running out of memory harms nothing else. Only measured settings are proposed.
"""

import contextlib
import dataclasses
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from library import data
from library.check import estimate, preflight
from library.check.report import graphics, largest_bucket
from library.config.arguments import Arguments
from library.config.building import build_config, replace_options
from library.config.formats import read_toml, to_toml
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike, join_messages, raise_if_any
from library.config.run_config import RunConfig
from library.config.schema import options_of
from library.families import RUNS, config_class
from library.files import write_atomic
from library.jobs.work import JobRecord, join_work
from library.measuring import candidates
from library.measuring.candidates import Overrides
from library.measuring.result import MEMORY_MARGIN, Measured
from library.outputs import paths
from library.runs import explain, layout, reader
from library.runs.launcher import launch_command

WARM, TIMED = 3, 2  # steps; the first load kernels and compile, so they are excluded from the speed
TRIES = 6
CAPTION = "an image of one colour, and as many words about it as fit into a long caption,  " * 8

# Switched off in a try, as it affects neither memory nor speed.
WITHOUT_EXTRAS = {
    "dataset_config": None,
    "in_json": None,
    "reg_data_dir": None,
    "enable_bucket": False,
    "resume": None,
    "validation_split": 0,
    "validate_every_n_steps": None,
    "validate_every_n_epochs": None,
    "logging_dir": None,
    "log_with": None,
    "log_tracker_config": None,
    "huggingface_repo_id": None,
    "save_state_to_huggingface": False,
    "save_state": False,
    "save_state_on_train_end": False,
    "save_state_every_n_minutes": None,
    "save_every_n_steps": None,
    "save_every_n_epochs": None,
    "save_n_epoch_ratio": None,
    "max_train_epochs": None,
    "save_at_steps": (),
    "save_from_step": None,
    "early_stop_patience": None,
    "lr_warmup_steps": 0,
    "lr_decay_steps": 0,
    "compile_compare_steps": 0,
    "compile_autotune": False,
    "compile_from_step": None,
    "face_crop_aug_range": None,
    "sample_at_first": False,
    "sample_every_n_epochs": None,
    "console_log_file": None,
    "caption_extension": ".txt",
}


Attempt = Callable[[Any], Measured]


class Probe:
    """Tries of one config, and the best so far. `report` receives each new message."""

    def __init__(
        self,
        config: RunConfig,
        size: tuple[int, int],
        memory: float | None,
        attempt: Attempt,
        report: Callable[["Probe"], None] = lambda probe: None,
    ) -> None:
        self.config, self.size, self.memory, self._attempt, self._report = config, size, memory, attempt, report
        self.tries: list[Measured] = []
        self.state, self.doing = "running", ""

    def run(self) -> "Probe":
        """Make it fit first, then make it fast; at most `TRIES` tries."""
        changes: Overrides = {}
        while (trial := self._try(changes)).lacks_memory and len(self.tries) < TRIES:
            smaller = next(candidates.saving_memory(self._changed(changes)), None)
            if smaller is None:
                break
            changes = {**changes, **smaller}
        for faster in self._faster() if not trial.why else ():
            if len(self.tries) < TRIES:
                self._try(faster)
        self.state, self.doing = "done", ""
        self._report(self)
        return self

    @property
    def best(self) -> Measured | None:
        # Compare by images per second, as batch sizes may differ.
        successful = [trial for trial in self.tries if not trial.why]
        return min(successful, key=lambda trial: trial.seconds / self._batch(trial.changes), default=None)

    def _batch(self, changes: JsonMapping) -> int:
        return int(changes.get("train_batch_size", self.config.data.train_batch_size))

    def _changed(self, changes: JsonMapping) -> Any:
        return replace_options(self.config, **changes)

    def _try(self, changes: Overrides) -> Measured:
        self.doing = f"Try {len(self.tries) + 1}: {candidates.format_changes(changes) or 'the settings as they are'}"
        self._report(self)
        self.tries.append(dataclasses.replace(self._attempt(self._changed(changes)), changes=changes))
        return self.tries[-1]

    def _faster(self) -> Iterator[Overrides]:
        """Yield changes that should save time and, by the measurements, still fit; each on top of the best so far."""
        if self.memory is None:
            return
        compiled = {**candidates.COMPILE_CHANGES, "compile_fallback": True}
        ideas = candidates.swapping_less(self.config)
        ideas += [] if self.config.compile.compile else [compiled]
        ideas += [] if self.config.memory.blocks_to_swap else candidates.checkpointing_less(self.config)
        ideas += candidates.keeping_all(self.config)
        for changes in ideas:
            combined = {**(self.best.changes if self.best else {}), **changes}
            with contextlib.suppress(ConfigError):
                if self._would_fit(combined) and combined not in [trial.changes for trial in self.tries]:
                    yield combined

    def _would_fit(self, changes: JsonMapping) -> bool:
        """Return whether changes fit by the estimate, corrected by the best try's actual memory."""
        best = self.best
        if best is None or not best.peak or self.memory is None:
            return False
        estimate_now = estimate.estimate(self._changed(best.changes), self.size).peak
        estimate_then = estimate.estimate(self._changed(changes), self.size).peak
        return best.peak * estimate_then / estimate_now <= self.memory * MEMORY_MARGIN

    def largest_batch(self) -> int:
        """Return the largest batch that should fit with the best settings."""
        # Not tried, since another batch size changes the training.
        best, batch = self.best, self._batch(self.best.changes if self.best else {})
        while best and batch < 64 and self._would_fit({**best.changes, "train_batch_size": batch * 2}):
            batch *= 2
        return batch

    def as_json(self) -> JsonObject:
        """Return the tries and the best changes for the page."""
        best = self.best
        return {
            "state": self.state,
            "doing": self.doing,
            "tries": [{**dataclasses.asdict(trial), "text": trial.sentence()} for trial in self.tries],
            "best": best.changes if best else None,
            "text": self.sentence(),
        }

    def sentence(self) -> MessageLike:
        """Return the proposal in words."""
        best = self.best
        if best is None and self.tries and not self.tries[-1].lacks_memory:
            template = "It failed, but not for lack of memory: {reason}"
            return Message(template, reason=self.tries[-1].why)
        if best is None:
            nothing = Message("Nothing that was tried fits: lower the resolution, or train on a larger GPU.")
            return nothing if self.tries else ""
        template = "Proposed: {settings} ({found})." if best.changes else "The settings fit as they are ({found})."
        measurements = [Message("{memory} GB at its peak", memory=f"{best.peak:.1f}")]
        if best.seconds:
            measurements.append(Message("{seconds} s a step", seconds=f"{best.seconds:.3g}"))
        proposal = Message(
            template, settings=candidates.format_changes(best.changes), found=join_messages(measurements)
        )
        if (larger := self.largest_batch()) > self._batch(best.changes):
            return Message("{proposed} A batch of {number} should fit, too.", proposed=proposal, number=larger)
        return proposal


# ---- one try


def measure_in_own_process(config: RunConfig, size: tuple[int, int], parent: Path, how: JsonMapping) -> Measured:
    """Train some steps on generated images below `parent`, and read the result."""
    folder = parent / secrets.token_hex(4)
    write_atomic(folder / "run.toml", to_toml(prepare_try(config, size, folder)))
    arguments, variables = launch_command(folder / "run.toml", config.script, **how)
    environment = {**os.environ, **variables, "KOHYA_HOME": str(folder / "home")}
    with (folder / "log.txt").open("wb") as log:
        code = subprocess.run(
            arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False
        ).returncode
    output = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    run_folders = sorted((folder / "out" / "runs").glob("*")) if (folder / "out").is_dir() else []
    facts = layout.load_facts(run_folders[-1] / layout.RUN) if run_folders else {}
    trial = Measured({}, peak=facts.get("peak_memory_gb") or facts.get("peak_ram_gb") or 0.0)
    if code or facts.get("state") != "finished":
        trial.why = facts.get("error") or explain.cause(output) or Message("it ended with code {code}", code=code)
        return trial
    if failed := [event for event in reader.read_events(run_folders[-1]) if event.get("kind") == "sample_failed"]:
        trial.why = failed[0]["text"]  # the training continues without samples, but the config wants them
        return trial
    compiled = facts.get("compile") or {}
    trial.seconds = _pace(run_folders[-1], facts) or 0.0
    trial.graphs, trial.compiling = compiled.get("num_graphs", 0), compiled.get("seconds", 0.0)
    return trial


def prepare_try(config: RunConfig, size: tuple[int, int], folder: Path) -> Any:
    """Return the config of a try: the same, but some steps on images of `size` generated in `folder`. With reference
    images, each image has one, and both together have that size.
    """
    steps, pictures_option = WARM + TIMED, _pictures_beside(config)
    images_folder = folder / "images" / f"{steps * config.steps.gradient_accumulation_steps}_probe"
    if pictures_option == "control_directory":
        size = (size[0], max(1, size[1] // 2 // config.grid) * config.grid)
    for images in (images_folder, *[folder / "beside"] * bool(pictures_option)):
        images.mkdir(parents=True)
        for number in range(config.data.train_batch_size):
            Image.new("RGB", size, (40 + 40 * (number % 5), 90, 140)).save(images / f"{number}.png")
    for number in range(config.data.train_batch_size):
        (images_folder / f"{number}.txt").write_text(CAPTION, encoding="utf-8")
    options: JsonObject = {
        **{name: value for name, value in WITHOUT_EXTRAS.items() if name in options_of(type(config))},
        "train_data_dir": str(folder / "images"),
        "resolution": f"{size[0]},{size[1]}",
        "max_train_steps": steps,
        "output_dir": str(folder / "out"),
        "output_name": "probe",
        "max_data_loader_n_workers": 0,
    }
    if pictures_option:
        options[pictures_option] = str(folder / "beside")
    if config.optim.lr_scheduler.split(":")[0] != "adafactor":
        options |= {"lr_scheduler": "constant", "lr_scheduler_type": "", "lr_scheduler_args": ()}
    sample = config.sample
    can = sample.wanted and (not sample.sample_prompts or Path(sample.sample_prompts).is_file())
    options |= {"sample_images": can, "sample_every_n_steps": steps if can else None}
    return replace_options(config, **options)


def _pictures_beside(config: RunConfig) -> str:
    """Return the option for the folder of reference or control images, "" without."""
    if config.control_images.guided:
        return "conditioning_data_dir"
    has_references = getattr(config.data, "control_directory", None) or config.control_images.least
    return "control_directory" if has_references else ""


def _pace(folder: Path, facts: JsonMapping) -> float | None:
    """Return seconds of a steady step."""
    # A GPU may receive a few steps before it has done the first, so its own clock counts, not the host's.
    if facts.get("peak_memory_gb"):
        steps = [event for event in reader.read_events(folder) if event.get("kind") == "step"]
        parts = ("data_s", "transfer_s", "compute_s")
        seconds = [sum(step[part] for part in parts) for step in steps[-TIMED:] if parts[-1] in step]
        if seconds:
            return sum(seconds) / len(seconds)
    return reader.progress(folder).update().last.get("s_it")


# ---- the command


def main(argv: list[str], script_of: Callable[[Path], str]) -> int:
    """Run `kohya probe RUN.toml`. Returns 0 if something fits, else 1. `script_of` guesses a file's script."""
    parser = Arguments(
        "kohya probe", description="Run some steps of a training, and propose settings that fit into memory."
    )
    if len(argv) > 1 and argv[0] in RUNS:  # `kohya probe SCRIPT FILE`, like `kohya train`
        argv = ["--script", *argv]
    parser.add_argument("file", type=Path, help="the TOML of a training")
    parser.add_argument(
        "--script",
        choices=list(RUNS),
        metavar="SCRIPT",
        help="the training script (default: detected from the file)",
    )
    parser.add_argument("--cpu", action="store_true", help="on the CPU, even if there is a GPU")
    arguments = parser.parse_args(argv)
    with join_work("probe") as work:
        config = build_config(
            config_class(arguments.script or script_of(arguments.file)), read_toml(arguments.file), arguments.file.name
        )
        probe = run_probe(config, {"cpu": arguments.cpu, "mixed_precision": config.precision.mixed_precision}, work)
    print(probe.sentence())
    return 0 if probe.best else 1


def run_probe(config: RunConfig, how: JsonMapping, work: JobRecord) -> Probe:
    """Probe a config on this machine. Raises ConfigError for problems other than memory."""
    images = data.check_data(config, config.grid)
    # An existing output does not matter, as a probe leaves nothing there.
    raise_if_any([problem for problem in preflight.evaluate(config, images)[0] if problem.code != paths.THERE])
    if busy := reader.active():
        raise ConfigError(
            "{run} is still {state}, so free memory will change: wait until it has ended",
            run=busy.name,
            state=busy.state,
        )
    size = largest_bucket(images.images, config)
    memory = None if how.get("cpu") else graphics()[1]
    parent = Path(config.save.output_dir or "")
    parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".probe-", dir=parent))

    def report(current: Probe) -> None:
        work.store(current.as_json())
        if current.tries and current.doing and not work.folder:
            print(current.tries[-1].sentence(), flush=True)

    try:
        return Probe(
            config, size, memory, lambda changed: measure_in_own_process(changed, size, temporary, how), report
        ).run()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
