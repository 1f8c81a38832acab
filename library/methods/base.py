"""What training methods have in common: parameter groups, and snapshots of trained values."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from library.config.run_config import RunConfig
from library.methods import snapshot
from library.methods.factor_cache import FactorCache
from library.methods.sharding import ShardedModel


class BaseMethod(ABC):
    """Keeps trained parameters in groups, each with its learning rate; subclasses name them (`named`)."""

    denoiser: nn.Module | None = None  # if its own weights are trained
    block_classes: tuple[str, ...] = ()
    shards: ShardedModel | None = None
    factor_caches: Sequence[FactorCache] = ()
    _groups: list[dict[str, Any]]

    @abstractmethod
    def named(self) -> Mapping[str, Tensor]:
        """Tensors of a saved state by name: trained parameters, and buffers that change with them."""

    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups: {"params", "lr", "name"}. A group with rate 0 is left out."""
        return [dict(group) for group in self._groups]

    def parameters(self) -> list[nn.Parameter]:
        """All trained parameters, in the order of the groups."""
        return [p for group in self._groups for p in group["params"]]

    def snapshot(self) -> dict[str, Tensor]:
        """The values of `named`; not copied."""
        return snapshot.take_values(self.named())

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a snapshot, bit for bit. ConfigError when it is of another network."""
        snapshot.restore_values(self.named(), tensors)

    def note_gradients(self) -> None:  # noqa: B027 - most methods take nothing from the gradients
        """Before a step: take from the gradients what the next forward pass needs of them."""

    def mean_gradient(self) -> Tensor | None:
        """Before a step: the mean size of the gradients; upstream shows it for some adapters only."""
        return None

    def limit_norms(self, maximum: float) -> dict[str, Tensor]:
        """`scale_weight_norms`, which only adapters have."""
        return {}


def trained_dtype(config: RunConfig) -> torch.dtype:
    """The dtype of parameters beside a frozen model: float32, unless full_fp16 or full_bf16 asks for half precision."""
    if config.precision.full_bf16:
        return torch.bfloat16
    return torch.float16 if config.precision.full_fp16 else torch.float32
