"""What happens to the weights once their gradients are there.

Most of it may already have happened by then: see `bundles`, for optimizers that step within the backward pass.
"""

from typing import Any

from torch import Tensor

from library.compiler import torch_private
from library.memory import swapping
from library.train import optimizers
from library.train.ema import ExponentialMovingAverage
from library.train.guard import NonFiniteGuard
from library.train.lr_schedule import schedule

NORMS = {"keys_scaled": "max_norm/keys_scaled", "maximum": "max_norm/max_key_norm", "average": "norm/avg_key_norm"}


class Updates:
    """Optimizer and schedule of a run, stepped together."""

    def __init__(self, method: Any, config: Any, run: Any) -> None:
        self._run, self._limit = run, config.optim.max_grad_norm
        self._learner, self._parameters = method, method.parameters()
        self._norm_limit = config.network.scale_weight_norms if config.adapters else None
        self.bare = optimizers.optimizer(method, config, run.seed)
        watched = run.trackers is not None and run.trackers.open and not self._norm_limit
        self._gradient = getattr(method, "mean_gradient", None) if watched else None
        self._notes = method.note_gradients if getattr(method, "disturbed", False) else None
        self._early = bool(config.optim.stepped_early)
        if self._early:
            self.bare.step_early(self._limit, run.average if run.ranks > 1 else None)
        if config.precision.full_fp16 and run.accelerator.scaler is not None:
            run.accelerator.scaler = torch_private.HalfGradScaler(run.device.type)
        # As accelerate has it, the schedule advances once for every process: warm-up steps are counted in its steps.
        self.schedule = schedule(self.bare, config, run.clock.total * run.ranks)
        self.optimizer = run.accelerator.prepare_optimizer(self.bare, device_placement=False)
        # Blocks that wait in host memory, if they learn; adapters never leave the device.
        self._swap = None if config.adapters else swapping.of(method.parts.denoiser)
        self.average = ExponentialMovingAverage.wanted(method, config, run)
        self._guard = NonFiniteGuard(self.bare, run)
        optimizers.train_mode(self.bare)
        run.optimizer, run.forget_gradients = self.bare, self.forget

    def apply(self, wrong: Tensor) -> dict[str, Tensor]:
        """Clip, step, schedule, forget the gradients. Returns the norm before clipping, on the device.

        Where `wrong`, the loss, or the norm is no number, the weights stay as they are.
        """
        if self._swap:
            self._swap.bring_home()
        norms = {}
        if self._early:
            norms |= {"grad_norm": norm} if (norm := self.bare.norm()) is not None else {}
        elif self._limit:
            norm = self._run.accelerator.clip_grad_norm_(self._parameters, self._limit)
            norms["grad_norm"] = norm.to(self._run.device)
        if self._guard.should_step(wrong, *norms.values()):
            if self._gradient and (mean := self._gradient()) is not None:
                norms["norm/avg_grad_norm"] = mean.to(self._run.device)
            if self._notes:
                self._notes()
            self.optimizer.step()
            for _ in range(self._run.ranks):
                self.schedule.step()
        if self._norm_limit:
            norms |= {NORMS[name]: value for name, value in self._learner.limit_norms(self._norm_limit).items()}
        self.forget()
        if self.average:
            self.average.update(self._run.clock.step)
        return norms

    def forget(self) -> None:
        """Let all gradients go."""
        self.bare.zero_grad(set_to_none=True)  # accelerate's wrapper looks up its signature every time
        if self._swap:
            self._swap.forget_gradients()

    def rates(self) -> dict[str, float]:
        """Learning rates by the group's name; of an optimizer that finds its own step, also times that."""
        found = {}
        for i, group in enumerate(self.bare.param_groups):
            name, rate = group.get("name") or f"group{i}", float(group["lr"])
            found[name] = rate
            if "d" in group:
                found[f"d*lr/{name}"] = float(group["d"]) * rate
        return found
