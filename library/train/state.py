"""Everything a run needs to go on as if it had never stopped."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from library.config.schema import ConfigError
from library.train import chance

VERSION = 1
AVERAGE = "ema.safetensors"
WEIGHTS, OPTIMIZER, SCHEDULER, PROGRESS = "model.safetensors", "optimizer.bin", "scheduler.bin", "train_state.json"


def save(folder: Path, run: Any, learner: Any, updates: Any, batches: Any) -> Path:
    """Write a state folder. It appears under its name only when it is complete."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    if run.main:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    run.accelerator.wait_for_everyone()
    torch.save(chance.state(run.device), unfinished / f"random_states_{run.accelerator.process_index}.bin")
    if run.main:
        save_file({n: t.contiguous() for n, t in learner.snapshot().items()}, unfinished / WEIGHTS)
        torch.save(updates.bare.state_dict(), unfinished / OPTIMIZER)
        torch.save(updates.schedule.state_dict(), unfinished / SCHEDULER)
        if updates.average:
            save_file(updates.average.state_dict(), unfinished / AVERAGE)
        if run.accelerator.scaler:
            torch.save(run.accelerator.scaler.state_dict(), unfinished / "scaler.pt")
        facts = {"version": VERSION, **run.clock.state(), "seed": run.seed, "losses": run.meter.state()}
        (unfinished / PROGRESS).write_text(json.dumps(facts | {"batches": batches.state_dict()}), encoding="utf-8")
    run.accelerator.wait_for_everyone()
    if run.main:
        _replace(unfinished, folder)
    return folder


def load(folder: Path, run: Any, learner: Any, updates: Any, batches: Any) -> None:
    """Take over a state folder written by `save`. ConfigError when it does not fit this run."""
    device = run.device
    facts = read_progress(folder)
    learner.restore(load_file(folder / WEIGHTS))
    updates.bare.load_state_dict(_read(folder / OPTIMIZER, device))
    updates.schedule.load_state_dict(_read(folder / SCHEDULER, "cpu"))
    if updates.average:
        if (folder / AVERAGE).is_file():
            updates.average.load_state_dict(load_file(folder / AVERAGE))
        else:
            updates.average.start()
            run.warn("resume: the state has no averaged weights; the average starts anew")
    if run.accelerator.scaler:
        run.accelerator.scaler.load_state_dict(_read(folder / "scaler.pt", device))
    run.clock.step = facts["current_step"]
    run.clock.epoch, run.clock.in_epoch = facts["current_epoch"], facts["step_in_epoch"]
    run.meter.load(facts["losses"])
    if why := batches.load_state_dict(facts["batches"]):
        run.warn(f"resume: {why}")
    randomness = folder / f"random_states_{run.accelerator.process_index}.bin"
    if randomness.is_file():
        chance.restore(_read(randomness, "cpu"), run.device)
    else:
        run.warn(f"resume: {folder} was written by fewer processes; this one starts with fresh random numbers.")


def problems(folder: Path) -> list[str]:
    """Why a folder cannot be resumed, without loading a model."""
    if not folder.is_dir():
        return [f"resume: there is no folder {folder}; give the path of a folder that ends in -state"]
    missing = [name for name in (WEIGHTS, OPTIMIZER, SCHEDULER, PROGRESS) if not (folder / name).is_file()]
    if missing:
        return [f"resume: {folder} is no complete state (it lacks {', '.join(missing)}); choose another -state folder"]
    try:
        read_progress(folder)
    except ConfigError as e:
        return [str(e)]
    return []


def read_progress(folder: Path) -> dict[str, Any]:
    """Where the run stood: current_step, current_epoch, seed and more. ConfigError for a state of another program."""
    try:
        facts = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        if facts["version"] == VERSION:
            return facts
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ConfigError(
        f"resume: {folder} was not written by this trainer, and cannot be resumed exactly; "
        "start from its weights instead (network_weights for a LoRA)"
    )


def _read(path: Path, device: Any) -> Any:
    """Tensors and plain values only: a state folder may come from anyone."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as e:
        raise ConfigError(f"resume: {path} cannot be read ({type(e).__name__}); choose another -state folder") from e


def _replace(new: Path, final: Path) -> None:
    """Put a finished folder in its place; one that is there already goes only after the new one has arrived."""
    old = final.with_name(final.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)
