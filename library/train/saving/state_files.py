"""The files of a state folder: how they are written, read, and checked against their checksums.

`SHA256SUMS` lists every file; `sha256sum --check SHA256SUMS` can verify it.
"""

import contextlib
import functools
import hashlib
import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from library.adapter_files.storage import FilePlan
from library.compiler.torch_private import LazyTensor, pytree
from library.config.environment import first_process, lacks_memory
from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import check_regular, open_regular, read_regular
from library.config.outside_text import with_line_feeds
from library.config.problems import ConfigError, Message, Problem, join_messages
from library.files import STATE_FACTS, need_space, write_folder_atomic
from library.train.saving.state_contents import state_refusal, wrong_facts

WEIGHTS, OPTIMIZER, SCHEDULER = "model.safetensors", "optimizer.bin", "scheduler.bin"
AVERAGE, SCALER = "ema.safetensors", "scaler.pt"
VERSION = 1  # version of the format of STATE_FACTS
SUMS = "SHA256SUMS"
CHECKED = "checksums"  # marks a state that has checksums
STEP_KEY = "saved_after_step"  # stored in every file except JSON and text
# Files that a resume reads if they exist.
RESUME_FILES = re.compile(
    r"model\.safetensors|optimizer\.bin|scheduler\.bin|ema\.safetensors|scaler\.pt|"
    r"train_state\.json|random_states_\d+\.bin"
)
DIGEST_LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+)\n")
READER_THREADS = 4  # files read in parallel
MAX_FACT_BYTES = 64_000_000  # of a file of facts or checksums; one number per step of an epoch is the longest content


# Unpickling could run code, and without checksums files of two states once trained on silently.
# Why: docs/decisions/2026-11-20-states-are-our-own-files.md
@dataclass(frozen=True, slots=True)
class State:
    """The content of a state folder. Its tensors are those of the training, not copies."""

    tensors: Mapping[str, Mapping[str, Tensor]]  # by the name of the file
    values: JsonMapping
    facts: JsonMapping

    @property
    def size(self) -> int:
        return _tensor_bytes([self.tensors, self.values]) + 2**20

    @property
    def size_of_weights(self) -> int:
        return _tensor_bytes(self.tensors[WEIGHTS])

    def write(self, folder: Path) -> None:
        """Write the folder. It appears under its name only when complete.

        Raises ConfigError if the disk is full; an earlier folder of that name is then untouched.
        """
        need_space(folder, self.size)
        write_folder_atomic(folder, self._fill)

    def _fill(self, folder: Path) -> None:
        step = self.facts["current_step"]
        for name, tensors in self.tensors.items():
            FilePlan.of_tensors(tensors).write(folder / name, {STEP_KEY: str(step)})
        for name, value in self.values.items():
            _save({**value, STEP_KEY: step}, folder / name)
        (folder / STATE_FACTS).write_text(json.dumps({**self.facts, CHECKED: SUMS}), encoding="utf-8")
        digests = _digests(folder, sorted(os.listdir(folder)))
        text = "".join([f"# {STEP_KEY} {step}\n", *(f"{digest}  {name}\n" for name, digest in digests.items())])
        (folder / SUMS).write_text(text + _last_line(text), encoding="utf-8", newline="\n")


def randomness(rank: int) -> str:
    return f"random_states_{rank}.bin"


def read_values(path: Path, device: Any, mapped: bool = False) -> Any:
    """Load values without unpickling objects (weights_only)."""
    # A state folder may come from an untrusted source.
    check_regular(path)
    with _readable(path):
        values = torch.load(path, map_location=device, weights_only=True, mmap=mapped)
    if isinstance(values, dict):
        values.pop(STEP_KEY, None)
    return values


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Load the tensors of a .safetensors file. Raises ConfigError for a damaged one, a pipe or a device."""
    check_regular(path)
    with _readable(path):
        return load_file(path)


def has_checksums(folder: Path) -> bool:
    # Older versions wrote no list.
    return (folder / SUMS).is_file()


def damage(folder: Path) -> list[Problem]:
    """Return one problem that lists missing, damaged, foreign and added files of a state; [] if it is intact.

    States of older versions without a list pass. Reads every file, but unchanged ones only once per process; only the
    first process reads.
    """
    if not has_checksums(folder):
        return [_refused(folder, [Message("{file} is missing", file=SUMS)])] if _expects_checksums(folder) else []
    step, listed = _listed_files(folder / SUMS)
    if not listed:
        return [_refused(folder, [Message("{file} is damaged", file=SUMS)])]
    missing = [name for name in listed if not (folder / name).is_file()]
    present = [name for name in listed if name not in missing] if first_process() else []
    differing = [name for name, digest in _digests(folder, present).items() if digest != listed[name]]
    faults = [Message("{file} is missing", file=name) for name in missing]
    faults += [_difference(folder / name, step) for name in differing]
    added = sorted(name for name in os.listdir(folder) if RESUME_FILES.fullmatch(name) and name not in listed)
    faults += [Message("{file} is not in {list}, so it is of another state", file=name, list=SUMS) for name in added]
    return [_refused(folder, faults)] if faults else []


def _refused(folder: Path, faults: list[Message]) -> Problem:
    return Problem(
        "resume",
        ": {folder} cannot be resumed, as {files}; choose another -state folder",
        folder=folder,
        files=join_messages(faults),
    )


def _difference(path: Path, step: int) -> Message:
    """Describe a file whose checksum differs, in a state of this step."""
    other = _step_of(path)
    if other is None or other == step:
        return Message("{file} is damaged", file=path.name)
    return Message("{file} is of step {other} and not of step {step}", file=path.name, other=other, step=step)


def _step_of(path: Path) -> int | None:
    """Return the step recorded in a file; None if it is unreadable."""
    try:
        check_regular(path)
        if path.suffix == ".json":
            return int(_facts_of(path)["current_step"])
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return int(file.metadata()[STEP_KEY])
        return int(torch.load(path, map_location="meta", weights_only=True)[STEP_KEY])
    except Exception:  # damaged files raise all kinds of errors
        return None


def _expects_checksums(folder: Path) -> bool:
    try:
        facts = _facts_of(folder / STATE_FACTS)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(facts, dict) and CHECKED in facts


def _facts_of(path: Path) -> Any:
    return json.loads(read_regular(path, MAX_FACT_BYTES).decode("utf-8"))


def _listed_files(path: Path) -> tuple[int, dict[str, str]]:
    """Return the step of a list, and the SHA-256 of each file by name; no files if the list itself is damaged."""
    try:
        text = with_line_feeds(read_regular(path, MAX_FACT_BYTES).decode("utf-8"))
        first, *lines, last = text.splitlines(keepends=True)
    except (OSError, ValueError):
        return 0, {}
    step, matches = re.fullmatch(rf"# {STEP_KEY} (\d+)\n", first), [DIGEST_LINE.fullmatch(line) for line in lines]
    if step is None or None in matches or last != _last_line("".join([first, *lines])):
        return 0, {}
    return int(step[1]), {match[2]: match[1] for match in matches if match}


def _last_line(text: str) -> str:
    # The checksum of the list itself, a comment to `sha256sum`.
    return f"# {hashlib.sha256(text.encode()).hexdigest()}\n"


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of files by name, "" for an unreadable one."""
    paths = [folder / name for name in names]
    with ThreadPoolExecutor(READER_THREADS) as pool:  # hashing releases the GIL
        return {path.name: digest for path, digest in zip(paths, pool.map(_file_digest, paths), strict=True)}


def _file_digest(path: Path) -> str:
    try:
        status = path.stat()
        return _digest_of(path, status.st_size, status.st_mtime_ns, status.st_ino)
    except OSError:
        return ""


@functools.lru_cache(maxsize=64)  # both the check and the training read them
def _digest_of(path: Path, *_version: int) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _save(value: Any, path: Path) -> None:
    """Like torch.save, but write tensors that are gathered from several processes one at a time."""
    if not hasattr(os, "posix_fallocate"):  # on Windows and macOS all of them are gathered in memory
        value = pytree.tree_map_only(LazyTensor, lambda tensor: tensor.make(), value)
    leaves = pytree.tree_leaves(value)
    if not any(isinstance(leaf, LazyTensor) for leaf in leaves):
        with open(path, "wb") as file:  # PyTorch itself does not report a full disk when it opens the path
            torch.save(value, file)
        return
    with open(path, "wb") as file, torch.serialization.skip_data():  # writes the layout without the tensor data
        torch.save(pytree.tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), value), file)
    with open(path, "r+b") as file:  # allocate the file now: with mmap a full disk would end the process by SIGBUS
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        targets = pytree.tree_leaves(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    for target, leaf in zip(targets, leaves, strict=True):
        if isinstance(leaf, Tensor):
            target.copy_(leaf)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn any error of reading a damaged file into one ConfigError."""
    try:
        yield
    except Exception as e:
        if lacks_memory(e):
            raise
        raise ConfigError(
            Problem(
                "resume",
                ": {path} cannot be read ({kind}); choose another -state folder",
                path=path,
                kind=type(e).__name__,
            )
        ) from e


def _tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors in nested mappings and lists."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_tensor_bytes, value.values()))
    return sum(map(_tensor_bytes, value)) if isinstance(value, list | tuple) else 0


def read_progress(folder: Path) -> JsonObject:
    """Return where the run stood: current_step, current_epoch, seed and more. Raises ConfigError for foreign states,
    and for facts of another form than this trainer writes."""
    facts: JsonObject = {}
    with contextlib.suppress(OSError, ValueError, RecursionError):
        read = _facts_of(folder / STATE_FACTS)
        facts = read if isinstance(read, dict) else {}
    if facts.get("version") != VERSION:
        raise ConfigError(
            Problem(
                "resume",
                ": {folder} was not written by this trainer, and cannot be resumed exactly; start "
                "from its weights instead (network_weights for a LoRA)",
                folder=folder,
            )
        )
    if wrong := wrong_facts(facts):
        raise state_refusal(folder / STATE_FACTS, ", ".join(wrong))
    return facts
