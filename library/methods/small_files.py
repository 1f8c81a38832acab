"""Files of weights trained beside a model: their tensors, whatever program wrote them."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from library.adapter_files.storage import is_finite
from library.config import environment
from library.config.problems import ConfigError, Message, Problem, counted


def read_tensors(path: str | Path, what: str, option: str = "") -> dict[str, Tensor]:
    """Return the tensors of a .safetensors, .pt or .ckpt file by name. Raises ConfigError about the option that names
    it, if it is missing, not `what`, or holds NaN or infinity.
    """
    try:
        tensors = read_unchecked(path, what)
    except ConfigError as e:
        raise ConfigError(*(_about(option, problem) for problem in e.problems)) from e
    unused = unused_alphas(tensors)
    refuse_damaged({name: value for name, value in tensors.items() if name not in unused}, path, option)
    return tensors


def refuse_damaged(tensors: Mapping[str, Any], path: str | Path, option: str = "") -> None:
    """Raise ConfigError if a tensor of a file has NaN or infinity."""
    values = ((name, value) for name, value in tensors.items() if isinstance(value, Tensor))
    if broken := [name for name, value in values if not is_finite(value)]:
        template = "{path} is damaged: {tensors} with NaN or infinity, first {tensor}; choose another file"
        problem = Message(template, path=path, tensor=broken[0], tensors=counted(len(broken), "tensor"))
        raise ConfigError(_about(option, problem))


def _about(option: str, problem: Message) -> Message:
    return Problem(option, ": {problem}", problem=problem) if option else problem


def unused_alphas(names: Collection[str]) -> set[str]:
    """Return the alphas of LoKr adapters whose matrices are both whole: they have no rank, so readers ignore alpha.

    LyCORIS writes network_dim there, which is huge if it was set to request whole matrices, and infinite in float16.
    """
    layers = (name.removesuffix(".alpha") for name in names if name.endswith(".alpha"))
    return {f"{layer}.alpha" for layer in layers if f"{layer}.lokr_w1" in names and f"{layer}.lokr_w2" in names}


def read_unchecked(path: str | Path, what: str) -> dict[str, Tensor]:
    """Return the same without a look at the values. Tensors in 8 bits become float32, as PyTorch hardly computes with
    them.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError("{path} does not exist", path=path)
    try:
        if path.suffix == ".safetensors":
            tensors = load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
            tensors = tensors.get("state_dict", tensors)
        return {name: _computable(value) for name, value in tensors.items()}
    except Exception as e:  # every reader has its own exceptions for foreign files
        if environment.lacks_memory(e):
            raise
        # PyTorch's own message about files with more than tensors is a page long and ends with the advice to trust
        # them.
        why = "it holds more than tensors, or is damaged" if path.suffix != ".safetensors" else e
        raise ConfigError("{path} is not {what}: {why}", path=path, what=what, why=why) from e


def _computable(value: Any) -> Any:
    in_8_bits = isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize == 1
    return value.float() if in_8_bits else value


def tensor_names_of(path: str | Path) -> set[str]:
    """Return the tensor names of such a file; of .safetensors from its header alone. Raises ConfigError as above."""
    path = Path(path)
    if path.suffix != ".safetensors" or not path.is_file():
        return set(read_unchecked(path, "a file of tensors"))
    try:
        with safe_open(path, "pt") as file:
            return set(file.keys())
    except Exception as e:
        raise ConfigError("{path} is not {what}: {why}", path=path, what="a file of tensors", why=e) from e
