"""What learns beside a model that stays as it is: what all such trainings answer alike."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.methods import snapshot
from library.methods.sharding import ShardedModel


class BesideModel:
    """Parameters by the names that they have in a saved state; one learning rate for all of them."""

    denoiser: nn.Module | None = None
    block_classes: tuple[str, ...] = ()
    shards: ShardedModel | None = None

    def __init__(self, config: RunConfig, label: str, trained: tuple[str, ...], nothing: str) -> None:
        """`label` names them in curves, `trained` are the parts of the model that gradients come to; `nothing` is said
        where the learning rate is 0."""
        self._rate, self._label = config.optim.learning_rate, label
        if not self._rate:
            raise ConfigError(nothing)
        self.trained_parts = dict.fromkeys(trained, True)

    def named(self) -> dict[str, nn.Parameter]:
        """All that learns."""
        raise NotImplementedError

    def groups(self) -> list[dict[str, Any]]:
        """One group, as upstream: {"params", "lr", "name"}."""
        return [{"params": self.parameters(), "lr": self._rate, "name": self._label}]

    def parameters(self) -> list[nn.Parameter]:
        """All that learns."""
        return list(self.named().values())

    def state_dict(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """What the file holds, on the CPU."""
        return {name: p.detach().to("cpu", dtype or p.dtype).contiguous() for name, p in self.named().items()}

    def snapshot(self) -> dict[str, Tensor]:
        """All that learns, as it is, for a saved state; not copied."""
        return snapshot.take(self.named())

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put a snapshot back, bit for bit. ConfigError when it is of another network."""
        snapshot.put_back(self.named(), tensors)

    def train(self, mode: bool = True) -> "BesideModel":
        """What learns is the same in both modes."""
        return self

    def note_gradients(self) -> None:
        """Nothing is taken from the gradients."""

    def mean_gradient(self) -> Tensor | None:
        """Upstream shows none."""
        return None

    def limit_norms(self, maximum: float) -> dict[str, Tensor]:
        """Only adapters are limited."""
        return {}


def dtype_of(config: RunConfig) -> torch.dtype:
    """What lies beside a model learns in float32, unless everything shall be in half precision."""
    if config.precision.full_bf16:
        return torch.bfloat16
    return torch.float16 if config.precision.full_fp16 else torch.float32
