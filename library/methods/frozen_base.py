"""Common parts of methods that train new parameters beside a frozen model."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.methods.base import TrainingMethod


class FrozenBaseMethod(TrainingMethod):
    """Parameters by the names that they have in a saved state; one learning rate for all of them."""

    def __init__(self, config: RunConfig, label: str, trained: tuple[str, ...], nothing: str) -> None:
        """`label` names them in curves, `trained` are the parts of the model that gradients come to; `nothing` is said
        where the learning rate is 0."""
        self._rate, self._label = config.optim.learning_rate, label
        if not self._rate:
            raise ConfigError(nothing)
        self.trained_parts = dict.fromkeys(trained, True)

    @abstractmethod
    def named(self) -> dict[str, nn.Parameter]:
        """All trained parameters."""

    def groups(self) -> list[dict[str, Any]]:
        """One group, as upstream: {"params", "lr", "name"}."""
        return [{"params": self.parameters(), "lr": self._rate, "name": self._label}]

    def parameters(self) -> list[nn.Parameter]:
        """All trained parameters."""
        return list(self.named().values())

    def state_dict(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """What the file holds, on the CPU."""
        return {name: p.detach().to("cpu", dtype or p.dtype).contiguous() for name, p in self.named().items()}

    def train(self, mode: bool = True) -> "FrozenBaseMethod":
        """Nothing to do: both modes compute the same."""
        return self
