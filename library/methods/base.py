"""Common parts of training methods: parameter groups, and snapshots of trained values."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.methods import snapshot
from library.methods.factor_cache import FactorCache
from library.methods.sharding import ShardedModel


class AssistantSwitch:
    """Whether the frozen LoRA that only steps need takes part."""

    def __init__(self) -> None:
        self.is_on = True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Within the context, predict exactly as the model without it."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


class TrainingMethod(ABC):
    """Trained parameters in groups, each with its learning rate; subclasses define `named`."""

    trained_parts: dict[str, bool]  # part name ("denoiser", "clip_l", ...) -> has trained parameters
    adapted_parts: Collection[str] = ()  # parts that adapters from a file change, whether these learn or not
    denoiser: nn.Module | None = None  # if its own weights are trained, which may be swapped and stepped block by block
    block_classes: tuple[str, ...] = ()  # of its blocks
    shards: ShardedModel | None = None  # where several processes hold parts of the denoiser
    assistant = AssistantSwitch()  # of the LoRA of `assistant_lora`; without one it switches nothing
    factor_caches: Sequence[FactorCache] = ()  # what adapters compute once for a whole forward pass of the denoiser
    _groups: list[dict[str, Any]]

    @abstractmethod
    def named(self) -> Mapping[str, Tensor]:
        """Tensors of a saved state by name: trained parameters, and buffers that change with them."""

    @abstractmethod
    def state_dict(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the tensors of the saved file by their keys, on the CPU."""

    @abstractmethod
    def train(self, mode: bool = True) -> "TrainingMethod":
        """Switch trained modules to training or evaluation mode."""

    def differs(self, part: str) -> bool:
        """Return whether a part of the model computes something else than its files alone: caches do not serve it."""
        return bool(self.trained_parts.get(part)) or part in self.adapted_parts

    def groups(self) -> list[dict[str, Any]]:
        """Return parameter groups for the optimizer: {"params", "lr", "name"}, without those with rate 0."""
        return [dict(group) for group in self._groups]

    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self._groups for p in group["params"]]

    def snapshot(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.named().items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a snapshot, bit for bit. Raises ConfigError if it belongs to another network."""
        snapshot.restore_values(self.named(), tensors)

    def prepare_factors(self) -> None:
        """Compute what adapters compute once for a pass, for parts of a network that are called by themselves."""
        for factors in self.factor_caches:
            factors.prepare()

    def alphas(self) -> dict[str, float]:
        """Return the alphas of adapters by name where a file has set them; {} where the config decides."""
        return {}

    def take_alphas(self, alphas: Mapping[str, float]) -> None:  # noqa: B027 - most methods have none
        """Set the alphas of a saved state, which does not tell in which file they were."""

    def note_gradients(self) -> None:  # noqa: B027 - most methods take nothing from the gradients
        """Keep what the next forward pass needs of the gradients. Call it before a step."""

    def drop_encoder_gradients(self) -> None:  # noqa: B027 - only whole text encoders stop learning before the end
        """Leave whole text encoders out of the next optimizer step."""

    def mean_gradient(self) -> Tensor | None:
        """Return the mean gradient size before a step, None for most methods: sd-scripts logs it with GGPO only."""
        return None

    def limit_norms(self, maximum: float) -> dict[str, Tensor]:
        return {}


def trained_dtype(config: RunConfig) -> torch.dtype:
    """Return the dtype of parameters beside a frozen model: float32, unless full_fp16 or full_bf16 is set."""
    if config.precision.full_bf16:
        return torch.bfloat16
    return torch.float16 if config.precision.full_fp16 else torch.float32


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
