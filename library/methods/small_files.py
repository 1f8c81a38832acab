"""Files of weights trained beside a model: their tensors, whatever program wrote them."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from library.config import environment
from library.config.problems import ConfigError


def read_tensors(path: str | Path, what: str) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors, .pt or .ckpt file by name. Raises ConfigError if it is missing, or not
    `what`.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError("{path} does not exist", path=path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        return tensors.get("state_dict", tensors)
    except Exception as e:  # every reader has its own exceptions for foreign files
        if environment.lacks_memory(e):
            raise
        # PyTorch's own message about files with more than tensors is a page long and ends with the advice to trust
        # them.
        why = "it holds more than tensors, or is damaged" if path.suffix != ".safetensors" else e
        raise ConfigError("{path} is not {what}: {why}", path=path, what=what, why=why) from e


def tensor_names_of(path: str | Path) -> set[str]:
    """Return the tensor names of such a file; of .safetensors from its header alone. Raises ConfigError as above."""
    path = Path(path)
    if path.suffix != ".safetensors" or not path.is_file():
        return set(read_tensors(path, "a file of tensors"))
    try:
        with safe_open(path, "pt") as file:
            return set(file.keys())
    except Exception as e:
        raise ConfigError("{path} is not {what}: {why}", path=path, what="a file of tensors", why=e) from e
