"""Read LoRA files for a network: tensors by adapter, and the adapters that do not fit the network."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from library.adapter_files import adapters as adapter_files
from library.adapter_files.changes import LayerChange
from library.adapter_files.names import ALPHA, DOWN, TENSOR_ROLES, UP, cleaned
from library.config.problems import ConfigError, Message, Problem
from library.methods.small_files import read_tensors, read_unchecked, refuse_damaged, unused_alphas

log = logging.getLogger(__name__)

NOT_PLAIN = ": {path} is {kind}, not a plain LoRA: choose a LoRA"
OF_ANOTHER_MODULE = (
    ": {path} is {kind}, not a plain LoRA: choose a LoRA, or the network_module that it was trained with"
)
PARTS_OF_ADAPTERS = {*TENSOR_ROLES.values()} - {ALPHA}
FACTORS = {DOWN: "lora_down.weight", UP: "lora_up.weight"}


@dataclass
class Unmatched:
    """Names of adapters that only the network or only the file has, or that are for layers of another size."""

    missing: list[str] = field(default_factory=list)  # in the network, but not in the file: they keep their values
    unexpected: list[str] = field(default_factory=list)  # in the file, but not in the network: not used
    misfits: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misfits)

    def __str__(self) -> str:
        texts = [("not in the file", self.missing), ("in the file only, not used", self.unexpected)]
        return "; ".join(f"{len(names)} {text}: {_some(names)}" for text, names in texts if names)


def report_unmatched(option: str, path: Any, unmatched: Unmatched, num_adapters: int) -> None:
    """Warn of adapters that only the file or only the model has. Raises ConfigError if they have none in common, or if
    sizes differ.
    """
    if unmatched.misfits:
        template = ": {path}: {name} has another size than this model's layer: it is for another model"
        raise ConfigError(Problem(option, template, path=path, name=unmatched.misfits[0]))
    if len(unmatched.unexpected) >= num_adapters:
        names = f" ({_some(unmatched.unexpected)})" if unmatched.unexpected else ""
        template = ": nothing in {path} fits this model{names}; choose a file made for it"
        raise ConfigError(Problem(option, template, path=path, names=names))
    if unmatched:
        log.warning("%s %s: %s", option, path, unmatched)


def file_of(path: str | Path, family: str, read: Callable[..., dict[str, Tensor]] = read_tensors) -> dict[str, Tensor]:
    """Return the tensors of a LoRA file for a family, .safetensors, .pt or .ckpt, by kohya's names.

    Files of diffusers (PEFT) and of ComfyUI's module tree are renamed; if they have separate adapters for the parts of
    a layer of FLUX.1, the rank is the sum of the parts'. Raises ConfigError if the file is missing, damaged or no LoRA
    file.
    """
    path = Path(path)
    tensors = read(path, "a LoRA file")
    return adapter_files.rename_for_kohya(path, tensors, family) if path.suffix == ".safetensors" else tensors


def plain_file(option: str, path: str | Path, family: str) -> dict[str, Tensor]:
    """Return the tensors of a plain LoRA file, as `file_of`. Raises ConfigError for adapters of another kind, and for a
    damaged file: with half of an adapter, or with NaN or infinity.
    """
    tensors = file_of(path, family, read_unchecked)  # values below, as here alphas count as well
    for key in tensors:
        if kind := adapter_files.other_kind(key):
            template = OF_ANOTHER_MODULE if option == "network_weights" else NOT_PLAIN
            raise ConfigError(Problem(option, template, path=path, kind=kind))
    for name, parts in by_name(tensors).items():
        _refuse_half(option, path, name, parts)
    refuse_damaged(tensors, path, option)
    return tensors


def adapters_of(option: str, path: str | Path, family: str) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a file of LoRA or of any kind of LyCORIS by adapter, as `by_name`, without what belongs to
    none. Raises ConfigError as `plain_file`.
    """
    tensors = file_of(path, family, read_unchecked)
    adapters, others = dict[str, dict[str, Tensor]](), []
    for name, parts in by_name(tensors).items():
        _refuse_half(option, path, name, parts)
        change = LayerChange({TENSOR_ROLES.get(part, part): tensor for part, tensor in parts.items()})
        if not change.parts.keys() & PARTS_OF_ADAPTERS:
            others.append(name)
        elif change.missing:
            raise ConfigError(Problem(option, ": {path}: {error}", path=path, error=change.problem(name)))
        else:
            adapters[name] = parts
    if others and not adapters:
        template = ": {path} holds {name}, which is neither LoRA nor a kind of LyCORIS"
        raise ConfigError(Problem(option, template, path=path, name=others[0]))
    unused = unused_alphas(tensors)
    refuse_damaged({name: tensor for name, tensor in tensors.items() if name not in unused}, path, option)
    return adapters


def _refuse_half(option: str, path: Path | str, name: str, parts: Mapping[str, Tensor]) -> None:
    missing = [ending for ending in FACTORS if FACTORS[ending] not in parts]
    if len(missing) == 1:
        why = Message(adapter_files.HALF, name=name, matrix=missing[0])
        raise ConfigError(Problem(option, ": {path}: {error}", path=path, error=why))


def by_name(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a file by adapter: {name: {"lora_down.weight": ..., "lora_up.weight": ..., "alpha": ...}}.

    `_orig_mod` in names, which other programs leave in files of compiled models, is removed.
    """
    adapters: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, role = cleaned(key).partition(".")
        adapters.setdefault(name, {})[role] = tensor
    return adapters


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
