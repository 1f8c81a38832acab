"""From gradients to new weights: average over processes, clip, step, limit norms, zero_grad, EMA.

With an optimizer that steps within the backward pass (`fused_step`) most of this has happened by then.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from library.compiler import torch_private
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.distributed import gradients
from library.distributed.world import World
from library.memory import swapping
from library.memory.prepare import is_sharded
from library.methods import FullFinetune, TrainingMethod
from library.methods.sharding import State, own_state, rows_of
from library.optim import optimizers, resuming
from library.optim.ema import ExponentialMovingAverage
from library.optim.fused_step import PartitionedOptimizer
from library.optim.lr_schedule import schedule

NORMS = {"keys_scaled": "max_norm/keys_scaled", "maximum": "max_norm/max_key_norm", "average": "norm/avg_key_norm"}


class NonFiniteGuard:
    """Skips the optimizer step when loss or gradient norm is not finite, without a device sync.

    On a CPU the step is left out. On a GPU a fused optimizer leaves it out by itself, told by a flag that never leaves
    the device. Any other optimizer there spoils its weights, but only in memory: the training ends as soon as the
    numbers have arrived on the host, and no file is written before they have.

    `on_host` says that an optimizer beside a GPU steps weights in host memory, after it has waited for the GPU.
    """

    def __init__(self, optimizer: Any, device: torch.device, scaled: bool, on_host: bool = False) -> None:
        self._scaled = scaled  # a gradient scaler checks gradients itself
        self.waits = on_host or device.type == "cpu"  # whether reading a number needs no device sync
        inner = [part.optimizer for part in optimizer.bundles] if hasattr(optimizer, "bundles") else [optimizer]
        if on_host:
            # torch 2.11 to 2.13 copy the flag to the host without waiting for it (torch/optim/adam.py, _fused_adam):
            # what its memory held before decides whether weights there are stepped. A scaler sets it for these alone.
            for one in inner:
                one._step_supports_amp_scaling = False
        self._flagged = [one for one in inner if getattr(one, "_step_supports_amp_scaling", False)]

    def should_step(self, *numbers: Tensor) -> bool:
        """Whether to step, as far as the host knows; on a GPU the optimizer gets a flag for the rest."""
        if self._scaled or not (self.waits or self._flagged):
            return True
        finite = torch.stack([number.detach().float() for number in numbers]).isfinite().all()
        if self.waits:
            return bool(finite)
        for optimizer in self._flagged:
            optimizer.found_inf = (~finite).float()
        return True


class Updates:
    """Optimizer and schedule of a training, stepped together, and the average of its weights."""

    def __init__(self, method: TrainingMethod, config: RunConfig, world: World, seed: int, total_steps: int) -> None:
        if isinstance(method, FullFinetune) and is_sharded(config):
            method.shard(world.device)
        self._world, self._method, self._parameters = world, method, method.parameters()
        self._limit = config.optim.max_grad_norm
        self._norm_limit = config.network.scale_weight_norms if isinstance(config, AdapterRun) else None
        self._early = bool(config.optim.stepped_early)
        self._shards, self._averager = method.shards, None
        if world.ranks > 1 and not self._early:  # an optimizer that steps early averages its gradients itself
            gradients.broadcast(p.detach() for p in self._parameters if not rows_of(p))
            whole = [p for p in gradients.by_arrival(method) if not rows_of(p)]
            self._averager = gradients.GradientAverager(whole, world.ranks)
        # Without accelerate's wrapper, which `optimizer` is.
        self.raw_optimizer = optimizers.optimizer(method, config, seed)
        if self._early:
            self.raw_optimizer.step_early(self._limit, world.average if world.ranks > 1 else None)
        # Swapped blocks, if they are trained; adapters never leave the device.
        self._swap = swapping.find_trainable_swap(method.denoiser) if method.denoiser else None
        on_host = self._swap is not None and self._swap.learn == "host"
        if world.scaler is not None and ((half := config.precision.full_fp16) or on_host):
            world.accelerator.scaler = torch_private.GradScaler(world.device.type, half, on_host)
        # As in accelerate, the schedule advances once per process in each step: warm-up steps are counted like that.
        self.schedule = schedule(self.raw_optimizer, config, total_steps * world.ranks)
        self.optimizer = world.accelerator.prepare_optimizer(self.raw_optimizer, device_placement=False)
        self.average = ExponentialMovingAverage.wanted(method, config, world.device, world.main)
        self._guard = NonFiniteGuard(self.raw_optimizer, world.device, world.scaler is not None, on_host)
        self.groups = resuming.described(self.raw_optimizer)  # as the config has them
        optimizers.train_mode(self.raw_optimizer)

    def expect_gradients(self, last: bool) -> None:
        """Call before each backward pass; gradients are reduced over processes in the `last` one of a step."""
        if self._averager:
            self._averager.expect(last)
        if self._shards:
            self._shards.expect_gradients(last)

    @property
    def gradients_sent(self) -> bool:
        """Whether gradients of this step were sent to other processes already, so that the step cannot be repeated."""
        return bool(self._averager and self._averager.begun)

    def average_gradients(self) -> None:
        """After the last backward pass of a step: make the gradients the mean of all processes'."""
        if self._averager:
            self._averager.finish()
        if self._shards:
            self._shards.take_gradients()

    def clip(self) -> dict[str, Tensor]:
        """Clip the gradients to max_grad_norm; returns their norm before, {} where it is not known."""
        if self._swap:
            self._swap.sync_to_host()
        if self._early:  # each gradient was clipped by itself within the backward pass
            return {} if (norm := self.raw_optimizer.norm()) is None else {"grad_norm": norm}
        if not self._limit:
            return {}
        if self._shards:
            return {"grad_norm": self._shards.clip(self._parameters, self._limit)}
        norm: Any = self._world.accelerator.clip_grad_norm_(self._parameters, self._limit)
        return {"grad_norm": norm.to(self._world.device)}

    def should_step(self, *numbers: Tensor) -> bool:
        """Whether to step: not if loss or norm are NaN or infinite, as far as the host knows."""
        return self._guard.should_step(*numbers)

    def step(self, watched: bool = False) -> dict[str, Tensor]:
        """Step the optimizer and its schedule. Where it is `watched`, returns how large the gradients are on average,
        as upstream shows it for some networks."""
        norms = {}
        if watched and not self._norm_limit and (mean := self._method.mean_gradient()) is not None:
            norms["norm/avg_grad_norm"] = mean.to(self._world.device)
        self._method.note_gradients()
        self.optimizer.step()
        for _ in range(self._world.ranks):
            self.schedule.step()
        return norms

    def limit_norms(self) -> dict[str, Tensor]:
        """`scale_weight_norms`: shrink adapters above the limit; returns how many, and their average and maximum
        norm."""
        if not self._norm_limit:
            return {}
        return {NORMS[name]: value for name, value in self._method.limit_norms(self._norm_limit).items()}

    def zero_grad(self) -> None:
        """Release all gradients."""
        self.raw_optimizer.zero_grad(set_to_none=True)  # accelerate's wrapper inspects the signature in each call
        if self._swap:
            self._swap.forget_gradients()

    def average_weights(self, step: int) -> None:
        """Update the moving average of the weights, if there is one."""
        if self.average:
            self.average.update(step)

    def state_dict(self) -> State:
        """The optimizer's state as for whole weights; a collective: every process has to call it."""
        state = self.raw_optimizer.state_dict()
        return self._by_part(state, self._shards.offered_state) if self._shards else state

    def load_state_dict(self, state: State) -> None:
        """Load this process' part of a state. Raises what optimizers raise for a state that does not fit."""
        self.raw_optimizer.load_state_dict(self._by_part(state, own_state) if self._shards else state)

    def resume(self, saved: resuming.Saved, config: RunConfig) -> None:
        """Continue with a saved optimizer and schedule; what the config has changed applies. Raises what optimizers
        raise for a state that does not fit."""
        resuming.take_over(self.raw_optimizer, self.schedule, saved, config, self.load_state_dict)

    def _by_part(self, state: State, change: Callable[[State, Sequence[nn.Parameter]], State]) -> State:
        """The states of all optimizers that this one is made of, changed by the weights that each steps."""
        if not isinstance(self.raw_optimizer, PartitionedOptimizer):
            return change(state, self._parameters)
        pairs = zip(state["bundles"], self.raw_optimizer.bundles, strict=True)
        return {**state, "bundles": [change(known, [p for _, p in bundle.weights]) for known, bundle in pairs]}

    def rates(self) -> dict[str, float]:
        """Learning rates by the group's name; for an optimizer with its own step size also their product."""
        found = {}
        for i, group in enumerate(self.raw_optimizer.param_groups):
            name, rate = group.get("name") or f"group{i}", float(group["lr"])
            found[name] = rate
            if "d" in group:
                found[f"d*lr/{name}"] = float(group["d"]) * rate
        return found
