"""AdamW and clipping over weights that lie one after another in memory: one kernel for many of them.

PyTorch's fused AdamW takes a list of tensors, but its kernels are made for large ones: over the factors of a LoRA most
of a GPU waits. What lies in one run with its gradients is therefore passed as a single tensor.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from library.compiler import flat_memory

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class _Stepped:
    """A run of weights whose states lie like them."""

    weights: list[nn.Parameter]  # by address
    steps: Tensor  # of each weight, all alike
    state: dict[str, Tensor]  # of the whole run; its step is the first weight's

    @property
    def missing(self) -> int:
        return sum(p.grad is None for p in self.weights)

    def stand_in(self) -> Tensor | None:
        """Return the run as one tensor with its gradient; None if weights and gradients do not lie alike now."""
        gradients = [p.grad for p in self.weights if p.grad is not None]
        runs = [] if self.missing else flat_memory.find_runs(self.weights, gradients)
        if len(runs) != 1 or runs[0].members != list(range(len(self.weights))):
            return None
        flat, flat.grad = runs[0].flat
        return flat


class FlatAdamW(torch.optim.AdamW):
    """AdamW whose results and states are those of `torch.optim.AdamW`, with fewer kernels if it is fused."""

    _runs: list[_Stepped] | None = None  # chosen at the first step, and at the first after loading

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._runs = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyrefly: ignore[bad-override]
        """Take a step, with runs of weights as one tensor where their gradients lie like them."""
        if self._runs is None:
            self._runs = [run for group in self.param_groups for run in self._choose(group)]
        # Weights of a run without all of their gradients are stepped by themselves; then their steps differ for good.
        self._runs = [run for run in self._runs if run.missing in (0, len(run.weights))]
        pairs = [(run, flat) for run in self._runs if (flat := run.stand_in()) is not None]
        if not pairs:
            return super().step(closure)
        with self._instead_of_weights(pairs):
            result = super().step(closure)
        for run, _ in pairs:
            run.steps[1:].copy_(run.state["step"])
        return result

    @contextlib.contextmanager
    def _instead_of_weights(self, pairs: Sequence[tuple[_Stepped, Tensor]]) -> Iterator[None]:
        """Within the context, the groups and states have whole runs in place of their weights."""
        parameters = [group["params"] for group in self.param_groups]
        flat_of = {id(p): flat for run, flat in pairs for p in run.weights}
        for group in self.param_groups:
            params = [flat_of.get(id(p), p) for p in group["params"]]
            group["params"] = [*{id(p): p for p in params}.values()]  # each run once
        self.state.update({flat: run.state for run, flat in pairs})
        try:
            yield
        finally:
            for group, params in zip(self.param_groups, parameters, strict=True):
                group["params"] = params
            for _, flat in pairs:
                del self.state[flat]

    def _choose(self, group: dict[str, Any]) -> Iterator[_Stepped]:
        """Yield the runs of a group whose weights have equal numbers of steps, and move their states together."""
        if not group["fused"] or group["amsgrad"]:
            return
        learning = [p for p in group["params"] if p.grad is not None]
        for run in flat_memory.find_runs(learning, [p.grad for p in learning]):
            weights = [learning[n] for n in run.members]
            states = [self.state.get(p, {}) for p in weights]
            if len(weights) == 1 or (any(states) and not _are_alike(states)):
                continue
            steps = torch.zeros(len(weights), device=weights[0].device)
            if states[0]:
                steps.fill_(states[0]["step"])
            for p, step in zip(weights, steps.split(1), strict=True):
                self.state[p] = {"step": step.view(()).data}
            moved = {"step": self.state[weights[0]]["step"]}
            for name in MOMENTS:
                moved[name], places = flat_memory.lay_out(weights)
                moved[name].zero_()
                if states[0]:
                    flat_memory.copy_(places, [state[name] for state in states])
                for p, place in zip(weights, places, strict=True):
                    self.state[p][name] = place
            yield _Stepped(weights, steps, moved)


def clip_norm(parameters: Sequence[nn.Parameter], limit: float, gathered: bool) -> Tensor:
    """Clip gradients like `nn.utils.clip_grad_norm_`; those of `gathered` weights on a GPU by runs. Returns the norm.

    The order in which squares are added up differs there, so that the norm may differ in its last bits.
    """
    clipped: list[Tensor] = [p for p in parameters if p.grad is not None]
    if gathered and clipped and clipped[0].is_cuda:
        gradients = [run.flat[0] for run in flat_memory.find_runs([p.grad for p in clipped if p.grad is not None])]
        clipped = [gradient.detach() for gradient in gradients]
        for holder, gradient in zip(clipped, gradients, strict=True):
            holder.grad = gradient
    return nn.utils.clip_grad_norm_(clipped, limit)


def _are_alike(states: Sequence[dict[str, Tensor]]) -> bool:
    """Return whether all weights of loaded states have taken equally many steps. Waits for the device."""
    return all(states) and torch.stack([state["step"] for state in states]).unique().numel() == 1
