"""Exponential moving average (EMA) of the weights: averages out the noise of single steps, and is saved beside each
file.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

# AveragedModel would copy whole networks with their frozen weights, in the model's dtype and on its device.
# Why: docs/decisions/2026-11-22-ema-with-swa-utils.md
from torch.optim.swa_utils import get_ema_multi_avg_fn

from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.methods import TrainingMethod
from library.methods.sharding import ShardedModel, own_part, rows_of_parameter, whole_shape
from library.optim import averaging


# Half precision would lose the small steps of the average, and stochastic rounding would make it noisy.
# Why: docs/decisions/2026-11-22-ema-is-float32.md
class ExponentialMovingAverage:
    """The average of all trained parameters, in float32: the change per step is too small for half precision."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        config: RunConfig,
        device: torch.device,
        shards: ShardedModel | None = None,
    ) -> None:
        self._parameters, self._shards = parameters, shards
        self._decay, self._every = config.optim.ema_decay, config.optim.ema_every_n_steps
        self._device = torch.device("cpu") if config.optim.ema_device == "cpu" else device
        self.values: list[Tensor] = []
        self.start()

    @classmethod
    def wanted(
        cls, method: TrainingMethod, config: RunConfig, device: torch.device, main: bool
    ) -> "ExponentialMovingAverage | None":
        # Only the process that saves keeps it; with a sharded model each keeps the average of its rows.
        is_on = config.optim.ema_decay and (main or method.shards)
        return cls(method.parameters(), config, device, method.shards) if is_on else None

    def start(self) -> None:
        self.values = [p.detach().to(self._device, torch.float32, copy=True) for p in self._parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average after a step, if that step counts."""
        # A weight's share decays by `ema_decay` per step, and faster at first, so that the initial model is soon
        # forgotten: the n-th update keeps at most (1 + n) / (10 + n).
        if step % self._every:
            return
        number = step // self._every
        # One update stands for `every` steps.
        decay = min(self._decay**self._every, (1 + number) / (10 + number))
        # PyTorch's AveragedModel would copy whole networks in their own dtype; only its update function is used.
        lerp = get_ema_multi_avg_fn(decay)
        if all(p.dtype == torch.float32 and p.device == self._device for p in self._parameters):
            lerp(self.values, [*self._parameters], number)
            return
        # One at a time, as a copy of all may be too large.
        for value, p in zip(self.values, self._parameters, strict=True):
            lerp([value], [p.to(self._device, torch.float32)], number)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average into the networks within this context; the weights are kept in CPU memory meanwhile, and
        restored bit for bit.
        """
        with averaging.kept(self._parameters):
            averaging.fill(self._parameters, self.values)
            yield

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average by parameter index; zero-padded, so that sorted names are in the order of parameters."""
        averages = {f"{i:05d}": value.contiguous() for i, value in enumerate(self.values)}
        for name, p in zip(averages, self._parameters, strict=True):
            if self._shards and (rows := rows_of_parameter(p)):
                averages[name] = self._shards.offer(averages[name], rows)
        return averages

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a saved average. Raises ConfigError if it belongs to other weights."""
        if [tensors[name].shape for name in sorted(tensors)] != [whole_shape(p) for p in self._parameters]:
            raise ConfigError("resume: the state's average is of another model; resume with its own config")
        for name, value, p in zip(sorted(tensors), self.values, self._parameters, strict=True):
            value.copy_(own_part(tensors[name], p))
