"""Values of trained parameters: taken for a saved state, and restored bit for bit."""

from collections.abc import Mapping

import torch
from torch import Tensor

from library.config.problems import ConfigError, Problem
from library.methods.sharding import own_part, whole_shape


def take(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters' values by name; not copied."""
    return {name: parameter.detach() for name, parameter in named.items()}


def differing(here: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]]) -> Problem | None:
    """The problem if names or shapes of trained and saved tensors differ."""
    odd = sorted(here.keys() ^ saved.keys()) or sorted(n for n in here if here[n] != saved[n])
    if not odd:
        return None
    return Problem("resume",
        ": the state was made with other networks than this config describes ({layer} differs); "
        "resume with its own config", layer=odd[0])  # fmt: skip


@torch.no_grad()
def put_back(named: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy saved values into the parameters. ConfigError, and nothing changed, when names or shapes differ."""
    shapes = ({name: tuple(whole_shape(tensor)) for name, tensor in some.items()} for some in (named, tensors))
    if problem := differing(*shapes):
        raise ConfigError(problem)
    for name, parameter in named.items():
        parameter.copy_(own_part(tensors[name], parameter))
