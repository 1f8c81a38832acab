"""From gradients to new weights: average over processes, clip, step, limit norms, zero_grad, EMA.

An optimizer that steps within the backward pass (`fused_step`) has done most of this by then.
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
from library.methods.sharding import State, own_state, rows_of_parameter
from library.optim import averaging, optimizers, resuming
from library.optim.ema import ExponentialMovingAverage
from library.optim.flat_adamw import clip_norm
from library.optim.fused_step import PartitionedOptimizer
from library.optim.lr_schedule import make_schedule

NORMS = {"keys_scaled": "max_norm/keys_scaled", "maximum": "max_norm/max_key_norm", "average": "norm/avg_key_norm"}


class NonFiniteGuard:
    """Skips the optimizer step if loss or gradient norm is not finite, without synchronising.

    On a CPU the step is skipped. On a GPU a fused optimizer skips it by a flag that never leaves the device. Any other
    optimizer there spoils its weights, but only in memory: the training ends once the numbers have arrived on the host,
    and no file is written before. `on_host`: an optimizer beside a GPU steps weights in host memory, after waiting for
    the GPU.
    """

    def __init__(self, optimizer: Any, device: torch.device, scaled: bool, on_host: bool = False) -> None:
        self._scaled = scaled  # a gradient scaler checks gradients itself
        self.waits = on_host or device.type == "cpu"  # reading a number costs no further synchronisation
        inner = [part.optimizer for part in optimizer.bundles] if hasattr(optimizer, "bundles") else [optimizer]
        if on_host:
            # torch 2.11 to 2.13 copy the flag to the host without waiting for it (torch/optim/adam.py, _fused_adam):
            # what its memory held before decides whether weights there are stepped. A scaler sets it for these alone.
            for part in inner:
                part._step_supports_amp_scaling = False
        self._flagged = [part for part in inner if getattr(part, "_step_supports_amp_scaling", False)]

    def should_step(self, *numbers: Tensor) -> bool:
        """Return whether to step, as far as the host knows; on a GPU the optimizer gets a flag for the rest."""
        if self._scaled or not (self.waits or self._flagged):
            return True
        finite = torch.stack([number.detach().float() for number in numbers]).isfinite().all()
        if self.waits:
            return bool(finite)
        for optimizer in self._flagged:
            optimizer.found_inf = (~finite).float()
        return True


class Updates:
    """Optimizer and schedule of a training, stepped together, and the moving average of its weights."""

    def __init__(self, method: TrainingMethod, config: RunConfig, world: World, seed: int, total_steps: int) -> None:
        if isinstance(method, FullFinetune) and is_sharded(config):
            method.shard(world.device)
        self._world, self._method, self._parameters = world, method, method.parameters()
        self._limit, self._encoder_steps = config.optim.max_grad_norm, config.encoder_steps
        self._norm_limit = config.network.scale_weight_norms if isinstance(config, AdapterRun) else None
        self._early = bool(config.optim.stepped_early)
        self._shards, self._averager = method.shards, None
        for factors in method.factor_caches:
            factors.gather(method.groups())
        if world.ranks > 1 and not self._early:  # an optimizer that steps early averages its gradients itself
            gradients.broadcast(p.detach() for p in self._parameters if not rows_of_parameter(p))
            unsharded = [p for p in gradients.parameters_by_arrival(method) if not rows_of_parameter(p)]
            self._averager = gradients.GradientAverager(unsharded, world.ranks)
        # Not wrapped by accelerate, unlike `optimizer`.
        self.raw_optimizer = optimizers.make_optimizer(method, config, seed)
        if self._early:
            self.raw_optimizer.step_early(self._limit, world.average if world.ranks > 1 else None)
        # Only trained swapped blocks matter here; adapters never leave the device.
        self._swap = swapping.find_trainable_swap(method.denoiser) if method.denoiser else None
        on_host = self._swap is not None and self._swap.stepped_on == "host"
        if world.scaler is not None and ((half := config.precision.full_fp16) or on_host):
            world.accelerator.scaler = torch_private.GradScaler(world.device.type, half, on_host)
        # As in accelerate, the schedule advances once per process in each step: warm-up steps are counted like that.
        self.schedule = make_schedule(self.raw_optimizer, config, total_steps * world.ranks)
        self.optimizer = world.accelerator.prepare_optimizer(self.raw_optimizer, device_placement=False)
        self.average = ExponentialMovingAverage.wanted(method, config, world.device, world.main)
        self._guard = NonFiniteGuard(self.raw_optimizer, world.device, world.scaler is not None, on_host)
        self.groups = resuming.describe_groups(self.raw_optimizer)  # as configured, before a resume
        averaging.train_mode(self.raw_optimizer)

    def expect_gradients(self, last: bool) -> None:
        """Prepare for a backward pass; gradients are reduced over processes in the `last` one of a step."""
        if self._averager:
            self._averager.expect(last)
        if self._shards:
            self._shards.expect_gradients(last)

    @property
    def gradients_sent(self) -> bool:
        # Then the other processes have added them up, and the step cannot be repeated.
        return bool(self._averager and self._averager.begun)

    def average_gradients(self) -> None:
        """Average the gradients over all processes after the last backward pass of a step."""
        if self._averager:
            self._averager.finish()
        if self._shards:
            self._shards.take_gradients()

    def clip(self, done: int) -> dict[str, Tensor]:
        """Clip the gradients to max_grad_norm; return their norm before clipping, {} if it is unknown. After `done`
        steps, text encoders may not learn any more.
        """
        if self._encoder_steps is not None and done >= self._encoder_steps:
            self._method.drop_encoder_gradients()
        if self._swap:
            self._swap.sync_to_host()
        if self._early:  # each gradient was clipped by itself within the backward pass
            return {} if (norm := self.raw_optimizer.norm()) is None else {"grad_norm": norm}
        if not self._limit:
            return {}
        if self._shards:
            return {"grad_norm": self._shards.clip(self._parameters, self._limit)}
        self._world.accelerator.unscale_gradients()
        # accelerate's function would load sharded tensors first, which takes a second.
        norm = clip_norm(self._parameters, self._limit, gathered=bool(self._method.factor_caches))
        return {"grad_norm": norm.to(self._world.device)}

    def should_step(self, *numbers: Tensor) -> bool:
        return self._guard.should_step(*numbers)

    def step(self, watched: bool = False) -> dict[str, Tensor]:
        """Step the optimizer and its schedule. If `watched`, return the mean gradient size, as upstream shows it for
        some networks.
        """
        norms = {}
        if watched and not self._norm_limit and (mean := self._method.mean_gradient()) is not None:
            norms["norm/avg_grad_norm"] = mean.to(self._world.device)
        self._method.note_gradients()
        self.optimizer.step()
        # As in accelerate, the schedule counts the steps of all processes.
        for _ in range(self._world.ranks):
            self.schedule.step()
        return norms

    def limit_norms(self) -> dict[str, Tensor]:
        """`scale_weight_norms`: shrink adapters above the limit; return how many, and their average and
        maximum norm.
        """
        if not self._norm_limit:
            return {}
        return {NORMS[name]: value for name, value in self._method.limit_norms(self._norm_limit).items()}

    def zero_grad(self) -> None:
        """Release all gradients."""
        self.raw_optimizer.zero_grad(set_to_none=True)  # accelerate's wrapper inspects the signature in each call
        if self._swap:
            self._swap.forget_gradients()

    def average_weights(self, step: int) -> None:
        if self.average:
            self.average.update(step)

    def state_dict(self) -> State:
        """Return the optimizer's state for whole weights. Collective: every process must call it."""
        state = self.raw_optimizer.state_dict()
        return self._map_bundles(state, self._shards.offered_state) if self._shards else state

    def load_state_dict(self, state: State) -> None:
        # An error of the optimizer itself means that it does not fit.
        self.raw_optimizer.load_state_dict(self._map_bundles(state, own_state) if self._shards else state)

    def resume(self, saved: resuming.Saved, config: RunConfig) -> None:
        resuming.take_over(self.raw_optimizer, self.schedule, saved, config, self.load_state_dict)

    def _map_bundles(self, state: State, change: Callable[[State, Sequence[nn.Parameter]], State]) -> State:
        """Apply `change` to the state of each optimizer that this one consists of, with the weights that it steps."""
        if not isinstance(self.raw_optimizer, PartitionedOptimizer):
            return change(state, self._parameters)
        pairs = zip(state["bundles"], self.raw_optimizer.bundles, strict=True)
        return {
            **state,
            "bundles": [change(part_state, [p for _, p in bundle.weights]) for part_state, bundle in pairs],
        }

    def rates(self) -> dict[str, float]:
        """Return learning rates by group name; for an optimizer with its own step size also their product."""
        rates = {}
        for i, group in enumerate(self.raw_optimizer.param_groups):
            name, rate = group.get("name") or f"group{i}", float(group["lr"])
            rates[name] = rate
            if "d" in group:
                rates[f"d*lr/{name}"] = float(group["d"]) * rate
        return rates
