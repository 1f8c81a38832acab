"""Common parts of methods that train new parameters beside a frozen model."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.methods.base import TrainingMethod


class FrozenBaseMethod(TrainingMethod):
    """Trained parameters by their names in a saved state; all share one learning rate."""

    def __init__(self, config: RunConfig, label: str, trained: tuple[str, ...], nothing: str) -> None:
        """`label` names them in curves, `trained` lists the parts of the model that get gradients; `nothing` is the
        message for learning rate 0.
        """
        self._rate, self._label = config.optim.learning_rate, label
        if not self._rate:
            raise ConfigError(nothing)
        self.trained_parts = dict.fromkeys(trained, True)

    @abstractmethod
    def named(self) -> dict[str, nn.Parameter]:
        """Return all trained parameters by their names in a saved state."""

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": self.parameters(), "lr": self._rate, "name": self._label}]

    def parameters(self) -> list[nn.Parameter]:
        return list(self.named().values())

    def state_dict(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        return {name: p.detach().to("cpu", dtype or p.dtype).contiguous() for name, p in self.named().items()}

    def train(self, mode: bool = True) -> "FrozenBaseMethod":
        # Both modes compute the same.
        return self
