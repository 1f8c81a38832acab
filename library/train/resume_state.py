"""Everything a run needs to go on as if it had never stopped."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from library.config.problems import ConfigError, Problem
from library.families.shared.weights import header
from library.files import need_space, write_folder_atomic
from library.optimizers import spec_of
from library.outputs.paths import names
from library.outputs.writer import TensorLayout
from library.tools.names import family_of
from library.train import resume_diff, rng

VERSION = 1
WHOLE = ("denoiser", "clip_l", "clip_g", "t5xxl")  # what a whole model's tensors begin with
RANK = 4  # where network_dim is not set
AVERAGE = "ema.safetensors"
WEIGHTS, OPTIMIZER, SCHEDULER, PROGRESS = "model.safetensors", "optimizer.bin", "scheduler.bin", "train_state.json"
SCALER = "scaler.pt"
OTHER_OPTIMIZER = Problem("resume",
    ": the state is of a run with another optimizer, or with other learning rates for other parts; "
    "resume with its own config")  # fmt: skip


@dataclass(frozen=True, slots=True)
class State:
    """What a state folder will hold. Its tensors are those of the training, not copies."""

    tensors: Mapping[str, Mapping[str, Tensor]]  # by the name of the file
    values: Mapping[str, Any]
    facts: Mapping[str, Any]

    @property
    def size(self) -> int:
        """Bytes on the disk, a little too many."""
        return _size([self.tensors, self.values]) + 2**20

    @property
    def size_of_weights(self) -> int:
        """Of these, the weights that learn."""
        return _size(self.tensors[WEIGHTS])

    def write(self, folder: Path) -> None:
        """Write the folder. It appears under its name only when it is complete.

        Raises ConfigError when the disk is full; an earlier folder of that name is then untouched.
        """
        need_space(folder, self.size)
        write_folder_atomic(folder, self._fill)

    def _fill(self, place: Path) -> None:
        for name, named in self.tensors.items():
            TensorLayout(named, lambda _, tensor: tensor.dtype).write(place / name, {})
        for name, value in self.values.items():
            with open(place / name, "wb") as file:  # by itself, PyTorch would not say that the disk is full
                torch.save(value, file)
        (place / PROGRESS).write_text(json.dumps(self.facts), encoding="utf-8")


def collect(run: Any, method: Any, updates: Any, batches: Any) -> State | None:
    """The state as it is now, in the main process; every process must ask."""
    sources = run.gathered(rng.get_rng_state(run.device))
    if not run.main:
        return None
    tensors = {WEIGHTS: method.snapshot()}
    values = {OPTIMIZER: updates.bare.state_dict(), SCHEDULER: updates.schedule.state_dict()}
    values |= {_randomness(rank): source for rank, source in enumerate(sources)}
    if updates.average:
        tensors[AVERAGE] = updates.average.state_dict()
    if run.accelerator.scaler:
        values[SCALER] = run.accelerator.scaler.state_dict()
    facts = {"version": VERSION, **run.clock.state(), "seed": run.seed, "losses": run.meter.state()}
    facts |= {"batches": batches.state_dict(), "settings": resume_diff.settings(run.config, run.clock.total)}
    return State(tensors, values, facts)


def load(folder: Path, run: Any, method: Any, updates: Any, batches: Any) -> None:
    """Take over a state folder written by `State.write`. ConfigError when it does not fit this run."""
    device = run.device
    facts = read_progress(folder)
    if not run.config.steps.moved and (why := finished(folder, facts, run.clock.total, names(run.config).last)):
        raise ConfigError(why)
    method.restore(_tensors(folder / WEIGHTS))
    try:
        updates.bare.load_state_dict(_read(folder / OPTIMIZER, device))
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError) as e:  # groups or memories of another kind
        raise ConfigError(OTHER_OPTIMIZER) from e
    updates.schedule.load_state_dict(_read(folder / SCHEDULER, "cpu"))
    if updates.average:
        _load_average(folder, run, updates)
    if run.accelerator.scaler:
        run.accelerator.scaler.load_state_dict(_read(folder / SCALER, device))
    _compare(facts, run, batches.load_state_dict(facts["batches"]))
    run.seed = facts["seed"]
    if run.config.steps.moved:
        run.start(batches)
    else:
        _go_on(facts, run, batches)
    if (folder / _randomness(run.rank)).is_file():
        rng.set_rng_state(_read(folder / _randomness(run.rank), "cpu"), device)


def _go_on(facts: Mapping[str, Any], run: Any, batches: Any) -> None:
    """Set the clock to where the state was saved."""
    run.clock.step, run.clock.epoch = facts["current_step"], facts["current_epoch"]
    # Of other data, or other steps, the epoch may already be over at this place.
    steps = math.ceil(batches.index / run.config.steps.gradient_accumulation_steps)
    run.clock.in_epoch = min(steps, run.clock.per_epoch) if batches.epoch == run.clock.epoch else run.clock.per_epoch
    run.meter.load(facts["losses"][: run.clock.per_epoch])


def _load_average(folder: Path, run: Any, updates: Any) -> None:
    if (folder / AVERAGE).is_file():
        updates.average.load_state_dict(_tensors(folder / AVERAGE))
    else:
        updates.average.start()
        run.warn("resume: the state has no averaged weights; the average starts again")


def _compare(facts: Mapping[str, Any], run: Any, data: str) -> None:
    """Say all that keeps this run from going on exactly as the saved one would have."""
    found = list(resume_diff.differences(facts.get("settings", {}), resume_diff.settings(run.config, run.clock.total)))
    given = run.config.steps.seed
    if given is not None and given != facts["seed"]:
        found.append(f"the seed stays {facts['seed']}, {given} is not used")
    if found or data:
        run.warn(f"resume: the training continues, but not bit-exactly: {'; '.join([*found, *([data] * bool(data))])}")


def problems(folder: Path, config: Any = None, total: int | None = None) -> list[Problem]:
    """Why a folder cannot be resumed, without loading a model; by the run of this config, if there is one, which has
    `total` steps, where its epochs have been counted."""
    if not folder.is_dir():
        told = ": there is no folder {folder}; give the path of a folder that ends in -state"
        return [Problem("resume", told, folder=folder)]
    missing = [name for name in (WEIGHTS, OPTIMIZER, SCHEDULER, PROGRESS) if not (folder / name).is_file()]
    if missing:
        told = ": {folder} is no complete state (it lacks {missing}); choose another -state folder"
        return [Problem("resume", told, folder=folder, missing=", ".join(missing))]
    try:
        facts = read_progress(folder)
    except ConfigError as e:
        return e.problems
    try:
        header(folder / WEIGHTS)
    except ConfigError:
        return [Problem("resume", ": {folder} is damaged; choose another -state folder", folder=folder)]
    if config is None:
        return []
    if other := [*_other_training(folder, facts, config)]:
        return other
    # Who says where to begin, need not begin there.
    if config.steps.moved:
        return []
    if total is None:
        if config.steps.max_train_epochs:
            return []
        total = int(config.steps.max_train_steps)
    return [why] if (why := finished(folder, facts, total, names(config).last)) else []


def _other_training(folder: Path, facts: Mapping[str, Any], config: Any) -> Iterator[Problem]:
    """What the state says of itself that cannot go on with this config, whatever the model is."""
    stored, known = header(folder / WEIGHTS), facts.get("settings", {})
    whole = any(name.startswith(f"{part}.") for name in stored for part in WHOLE)
    advice = "resume with its own config"
    if whole == config.adapters:
        kinds = ("a whole model", "adapters") if whole else ("adapters", "a whole model")
        yield Problem("resume",
            ": {folder} is the state of a training of {saved}, and this one trains {now}; {advice}",
            folder=folder, saved=kinds[0], now=kinds[1], advice=advice)  # fmt: skip
        return
    with contextlib.suppress(ConfigError):  # of neither family, as far as names tell
        layers = (name.removeprefix("denoiser.") if whole else name.partition(".")[0] for name in stored)
        if family_of(layers, {}) != config.family:
            yield Problem("resume",
                ": {folder} is the state of a training of another family than {title}; {advice}",
                folder=folder, title=config.title, advice=advice)  # fmt: skip
            return
    saved = str(known.get("optimizer_type", config.optim.optimizer_type) or "")
    if _memory(saved) != _memory(config.optim.optimizer):
        now = config.optim.optimizer
        yield Problem("resume",
            ": {folder} was saved with optimizer_type {saved}, and this is {now}; {advice}", folder=folder,
            saved=saved or "AdamW", now=now, advice=advice)  # fmt: skip
    if not config.adapters:
        return
    network = config.network
    if str(known.get("network_module") or network.module) != network.module:
        before = known["network_module"]
        yield Problem("resume",
            ": {folder} was saved with network_module {before}, and this is {module}; {advice}",
            folder=folder, before=before, module=network.module, advice=advice)  # fmt: skip
    elif network.module.startswith("networks.") and not network.dim_from_weights:
        ranks = {shape[0] for name, shape in stored.items() if name.endswith("lora_down.weight")}
        before, now = known.get("network_dim", network.network_dim) or RANK, network.network_dim or RANK
        if before != now and ranks and now not in ranks:
            yield Problem("resume",
                ": {folder} was saved with network_dim {before}, and this is {now}; {advice}",
                folder=folder, before=before, now=now, advice=advice)  # fmt: skip


def _memory(optimizer: str) -> tuple[str, str]:
    """What decides which memory an optimizer has: its class. Paged ones have that of the others."""
    made = spec_of(optimizer or "AdamW")
    return made.module.split(".")[0], made.name.removeprefix("Paged").lower()


def counts(folder: Path) -> list[int]:
    """How many weights each group of the saved optimizer has; nothing where it does not say. Reads no numbers."""
    saved = _read(folder / OPTIMIZER, "meta")
    groups = saved.get("param_groups", []) if isinstance(saved, dict) else []
    return [len(group["params"]) for group in groups]


def finished(folder: Path, facts: Mapping[str, Any], total_steps: int, result: Path) -> Problem | None:
    """The problem of a training that has nothing left to do, not even to write its result."""
    if facts["current_step"] < total_steps or (facts["current_step"] == total_steps and not result.exists()):
        return None
    return Problem("resume",
        ": {folder} was saved after step {step}, and this training has {total} steps, so nothing is left to do; "
        "raise max_train_steps or max_train_epochs to go on", folder=folder, step=facts["current_step"],
        total=total_steps)  # fmt: skip


def read_progress(folder: Path) -> dict[str, Any]:
    """Where the run stood: current_step, current_epoch, seed and more. ConfigError for a state of another program."""
    try:
        facts = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        if facts["version"] == VERSION:
            return facts
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ConfigError(Problem("resume",
        ": {folder} was not written by this trainer, and cannot be resumed exactly; start "
        "from its weights instead (network_weights for a LoRA)", folder=folder))  # fmt: skip


def _randomness(rank: int) -> str:
    return f"random_states_{rank}.bin"


def _read(path: Path, device: Any) -> Any:
    """Tensors and plain values only: a state folder may come from anyone."""
    with _readable(path):
        return torch.load(path, map_location=device, weights_only=True)


def _tensors(path: Path) -> dict[str, Tensor]:
    with _readable(path):
        return load_file(path)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file makes its reader say into one sentence."""
    try:
        yield
    except Exception as e:
        raise ConfigError(Problem("resume",
            ": {path} cannot be read ({kind}); choose another -state folder", path=path,
            kind=type(e).__name__)) from e  # fmt: skip


def _size(value: Any) -> int:
    """Bytes of all tensors in something nested."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0
