"""Files of a training: their names, how they are written, and which outdated ones are deleted."""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library.adapter_files.storage import FilePlan, exact, is_finite, keeps_numbers
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, Problem, counted, option_name
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun, FullSave, Save
from library.families.shared.folder_checkpoints import checkpoints
from library.files import (
    clean_up,
    nearest_existing,
    need_space,
    remove,
    remove_folder,
    write_atomic,
    write_folder_atomic,
)
from library.methods import TrainingMethod
from library.methods.sharding import collected
from library.methods.small_files import unused_alphas

log = logging.getLogger(__name__)

THERE = "outputs_there"  # problem code of already existing output files
PICKLED = (".ckpt", ".pt", ".pth")
FOLDERS = ("diffusers", "diffusers_safetensors")
DTYPES = {"float": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Names:
    """Paths of files and state folders, as sd-scripts names them."""

    folder: Path
    name: str | None
    extension: str  # with its dot; "" for a folder

    def epoch(self, epoch: int) -> Path:
        return self.folder / f"{self.name or 'epoch'}-{epoch:06d}{self.extension}"  # epochs count from 1

    def step(self, step: int) -> Path:
        return self.folder / f"{self.name or 'at'}-step{step:08d}{self.extension}"

    @property
    def last(self) -> Path:
        return self.folder / f"{self.name or 'last'}{self.extension}"

    def state(self, epoch: int | None = None, step: int | None = None) -> Path:
        """Return the folder of the state after an epoch or a step, or at the end."""
        file = self.last
        if epoch is not None:
            file = self.epoch(epoch)
        elif step is not None:
            file = self.step(step)
        return file.with_name(file.name.removesuffix(self.extension) + "-state")

    def backup(self, step: int) -> Path:
        return self.folder / f"{self.name or 'at'}-backup-step{step:08d}-state"

    def backups(self) -> list[Path]:
        """Existing backup folders, by step."""
        stem = re.escape(self.name or "at")
        pattern = re.compile(rf"{stem}-backup-step\d{{8}}-state")
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(path for path in entries if pattern.fullmatch(path.name) and path.is_dir())

    def average(self, file: Path) -> Path:
        return file.with_name(f"{file.name.removesuffix(self.extension)}-ema{self.extension}")

    def owns(self, name: str) -> bool:
        """Return whether a training of this name writes a file or folder with such a name."""
        number = r"(-\d{6}|(-backup)?-step\d{8})?"
        stems = {re.escape(self.name)} if self.name else {"epoch", "at", "last"}
        ending = rf"(?:-ema)?(?:-state|{re.escape(self.extension)})"
        return re.fullmatch(f"(?:{'|'.join(stems)}){number}{ending}", name) is not None

    def existing(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if self.owns(path.name)) if self.folder.is_dir() else []


def output_names(config: RunConfig) -> Names:
    return Names(Path(config.save.output_dir or "."), config.save.output_name, file_extension(config))


def saved_kind(path: Path) -> str:
    # A "state" can be resumed from, a "file" can be used.
    return "state" if path.is_dir() and path.name.endswith("-state") else "file"


def tidy(config: RunConfig) -> None:
    if config.save.output_dir:  # an earlier training of this name may have been killed while saving
        clean_up(config.save.output_dir, output_names(config).owns)


def file_extension(config: RunConfig) -> str:
    """Return the extension for save_model_as; by default that of the model the training starts from.

    A diffusers folder has none.
    """
    full_save = config.save if isinstance(config.save, FullSave) else None
    if full_save and full_save.only_safetensors:
        return ".safetensors"
    chosen = config.save.save_model_as
    if chosen is None:
        source = config.model.pretrained_model_name_or_path or ".safetensors"
        if source.lower().endswith(PICKLED):
            return ".safetensors" if full_save and full_save.use_safetensors else ".ckpt"
        folder = Path(source)
        holds_files = folder.is_dir() and not (folder / "model_index.json").exists() and bool(checkpoints(folder))
        return ".safetensors" if holds_files or source.lower().endswith(".safetensors") else ""
    return "" if chosen in FOLDERS else f".{chosen}"


def free_output_name(config: RunConfig) -> JsonObject:
    """Return a fix with a similar output name that no file has yet."""
    stem, number = re.sub(r"-\d+$", "", config.save.output_name or config.script), 2
    folder = Path(config.save.output_dir or ".")
    while any(folder.glob(f"{stem}-{number}[.-]*")) or any((folder / "runs").glob(f"{stem}-{number}-*")):
        number += 1
    return {"output_name": f"{stem}-{number}"}


def find_output_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield problems that prevent saving, without writing anything."""
    if not config.save.output_dir:
        yield Problem("output_dir", "is not set: choose a folder for the results")
        return
    if any(Save.check(config.save, config)):  # already reported when reading the config
        return
    names = output_names(config)
    nearest = nearest_existing(names.folder)
    if nearest is None:
        drive = names.folder.absolute().anchor
        yield Problem("output_dir", ": there is no {drive} here; choose a folder on another disk", drive=drive)
    elif not nearest.is_dir():
        yield Problem("output_dir", ": {nearest} is a file; choose a folder", nearest=nearest)
    elif not config.steps.resume and (existing := names.existing()):
        remainder = Message(" and {count} more of that name", count=len(existing) - 1) if len(existing) > 1 else ""
        yield Problem(
            "output_name",
            ": {file}{more} would be overwritten; choose another output_name or output_dir, "
            "move them away, or continue from a state with {other}",
            file=existing[0],
            more=remainder,
            other=option_name("resume"),
            fix=free_output_name(config),
            code=THERE,
        )


def write_result(
    path: Path, method: TrainingMethod, config: RunConfig, metadata: Mapping[str, str], progress: tuple[int, int]
) -> Path:
    """Write the trained weights, as a file or as a diffusers folder; see `model`."""
    if file_extension(config):
        return model(path, method.state_dict(), config, metadata, progress)
    return write_diffusers_folder(path, method, config)


def write_diffusers_folder(path: Path, method: Any, config: RunConfig) -> Path:
    """Write a whole model as a diffusers folder, which appears only when complete.

    Weights are always safetensors, written tensor by tensor. Raises ConfigError like `model`.
    """

    def put(file: Path, tensors: Mapping[str, Tensor]) -> None:
        _warn_of_nan(path, tensors)
        layout = FilePlan.of_tensors(tensors, _wide(path, _types(config)))
        need_space(file, layout.size)
        layout.write(file, {"format": "pt"})

    written = write_folder_atomic(path, lambda temporary: method.write_folder(temporary, put))
    log.info("Saved %s", written)
    return written


def model(
    path: Path,
    tensors: Mapping[str, Tensor],
    config: RunConfig,
    metadata: Mapping[str, str],
    progress: tuple[int, int] = (0, 0),
) -> Path:
    """Write an adapter or a whole model atomically, and check it before it gets its name.

    `metadata` goes only into safetensors files, and its values must be text; adapters get their hashes here. `progress`
    is (epoch, step), which whole models saved as .ckpt contain. Raises ConfigError if the disk is full, or an adapter
    has NaN; an earlier file of that name is then untouched.
    """
    unused = unused_alphas(tensors)
    _warn_of_nan(path, {n: t for n, t in tensors.items() if n not in unused}, refuse=config.adapters)
    type_of = _types(config)
    layout = FilePlan.of_tensors(
        {n: t.to(type_of(n, t)) if n in unused else t for n, t in tensors.items()}, _wide(path, type_of)
    )
    need_space(path, layout.size)
    if path.suffix == ".safetensors":
        ours = {key: value for key, value in metadata.items() if key.startswith("ss_")}
        facts = {**metadata, **(layout.hashes(ours) if isinstance(config, AdapterRun) else {})}
        written = write_atomic(path, lambda temporary: layout.write(temporary, facts))
    else:
        stored: Any = {n: t.make().detach().to("cpu", t.dtype) for n, t in layout.tensors.items()}
        if not config.adapters:
            stored = {"state_dict": stored, "epoch": progress[0], "global_step": progress[1]}
        written = write_atomic(path, lambda temporary: torch.save(stored, temporary))
    log.info("Saved %s", written)
    return written


def every_n_epochs(config: RunConfig, num_epochs: int) -> int | None:
    """Return the interval of files in epochs: save_n_epoch_ratio wins over save_every_n_epochs."""
    if ratio := config.save.save_n_epoch_ratio:
        return max(1, num_epochs // ratio)
    return config.save.save_every_n_epochs


def outdated_epoch(config: RunConfig, epoch: int, state: bool = False, period: int | None = None) -> Path | None:
    """Return the file, or state folder, that is outdated once that of `epoch` is written.

    `period` is the result of `every_n_epochs`.
    """
    last = _last(config.save, "epochs", state)
    period = period or config.save.save_every_n_epochs
    old = epoch - period * last if last and period else -1
    if old < 0:
        return None
    return output_names(config).state(epoch=old) if state else output_names(config).epoch(old)


def outdated_step(config: RunConfig, step: int, state: bool = False) -> Path | None:
    """Return the outdated step file: the newest multiple more than `save_last_n_steps` steps ago.

    Files of `save_at_steps` are kept.
    """
    last, period = _last(config.save, "steps", state), config.save.save_every_n_steps
    if not last or not period:
        return None
    old = (step - last - 1) // period * period
    if old < 0 or (state and old == 0) or old in config.save.save_at_steps:
        return None
    return output_names(config).state(step=old) if state else output_names(config).step(old)


def _last(save: Save, unit: str, state: bool) -> int | None:
    state_limit = getattr(save, f"save_last_n_{unit}_state") if state else None
    return state_limit or getattr(save, f"save_last_n_{unit}")


def remove_outdated(path: Path | None) -> None:
    """Delete an outdated file or state folder; a missing one is no error."""
    if path is None or not path.exists():
        return
    log.info("Removing %s, which is outdated", path)
    try:
        remove_folder(path) if path.is_dir() else remove(path)
    except OSError as error:  # such as a Windows program that displays the file
        log.warning("%s could not be removed: %s", path, error.strerror or error)


def _warn_of_nan(path: Path, tensors: Mapping[str, Tensor], refuse: bool = False) -> None:
    # Each process has checked its own shard; checking the whole model would send all of it again.
    own_tensors = {name: tensor for name, tensor in tensors.items() if not collected(tensor)}
    broken = [name for name, tensor in own_tensors.items() if not is_finite(tensor)]
    if broken and refuse:
        raise ConfigError(
            "{name} was not saved: {tensors} with NaN or infinity, first {broken}",
            name=path.name,
            tensors=counted(len(broken), "tensor"),
            broken=broken[0],
        )
    if broken:
        log.warning("%s: %s with NaN or infinity, first %s", path.name, counted(len(broken), "tensor"), broken[0])


def _types(config: RunConfig) -> Callable[[str, Tensor], torch.dtype]:
    """Return the stored dtype of each tensor."""
    precision = config.save.save_precision
    dtype = getattr(torch, DTYPES[precision]) if precision else None

    def type_of(name: str, tensor: Tensor) -> torch.dtype:
        # As in sd-scripts, an adapter's alpha is cast even where it is a whole number; but where that would round it,
        # the file would have another strength than was trained.
        is_alpha = name.endswith(".alpha")
        if dtype is None or not (tensor.is_floating_point() or is_alpha):
            return tensor.dtype
        return exact(tensor, dtype).dtype if is_alpha and keeps_numbers(dtype, tensor) else dtype

    return type_of


def _wide(path: Path, type_of: Callable[[str, Tensor], torch.dtype]) -> Callable[[str, Tensor], torch.dtype]:
    """Return the dtypes, but float32 for values too large for the chosen dtype."""

    def wide_enough(name: str, tensor: Tensor) -> torch.dtype:
        dtype = type_of(name, tensor)
        if keeps_numbers(dtype, tensor):
            return dtype
        log.warning("%s: %s is stored in float32, as %s cannot hold its numbers", path.name, name, dtype)
        return torch.float32

    return wide_enough
