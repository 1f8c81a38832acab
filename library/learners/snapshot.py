"""What learns, as it is: taken for a saved state, and put back bit for bit."""

from collections.abc import Mapping

import torch
from torch import Tensor

from library.config.schema import ConfigError


def take(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters' values by name; not copied."""
    return {name: parameter.detach() for name, parameter in named.items()}


@torch.no_grad()
def put_back(named: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy saved values into the parameters. ConfigError, and nothing changed, when names or shapes differ."""
    odd = sorted(named.keys() ^ tensors.keys())
    odd += [name for name in named.keys() & tensors.keys() if named[name].shape != tensors[name].shape]
    if odd:
        raise ConfigError(
            f"resume: the state was made with other networks than this config describes ({odd[0]} differs); "
            "resume with its own config"
        )
    for name, parameter in named.items():
        parameter.copy_(tensors[name])
