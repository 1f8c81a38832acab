"""Many small optimizers behind the interface of one: each steps a bundle of weights.

This serves two purposes. Weights in half precision are stepped in float32 with stochastic rounding, one bundle at a
time, so that only its copies are in float32. And an optimizer that steps within the backward pass, once a bundle has
its gradients, frees these before the next ones are computed.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from library.config.problems import ConfigError
from library.methods.sharding import rows_of_parameter, whole_shape
from library.optim.stochastic_rounding import HALF, Rounding, StepRNG, widened, write_all_rounded

Group = dict[str, Any]
WIDENED = 2**24  # most weights in float32 at a time (64 MiB); a larger tensor is its own bundle
Stepped = tuple[int, nn.Parameter, nn.Parameter]  # number, weight, master parameter


# One optimizer per part works with any optimizer whose state belongs to single weights, without touching their memory,
# dtype or hooks.
# Why: docs/decisions/2026-11-22-optimizer-steps-in-parts.md
class PartialOptimizer:
    """Weights that are stepped together by their own optimizer.

    It steps master parameters, which during the step are the weights, or copies of them in float32. So the weights'
    memory, dtype and place in the autograd graph never change.
    """

    def __init__(
        self, group: Group, weights: Sequence[tuple[int, nn.Parameter]], make: Callable, step_rng: StepRNG
    ) -> None:
        """`group` is the group of the whole optimizer, whose learning rate applies; weights come with their index in
        it.
        """
        self.group, self.weights, self._step_rng = group, weights, step_rng
        self.waiting: set[int] = set()  # ids of weights that have no gradient yet
        self.stepped = -1  # the last step that was taken
        settings = {key: value for key, value in group.items() if key != "params"}
        # Empty, but with the weights' number of dimensions, by which an optimizer may sort them.
        self.master_params = [nn.Parameter(torch.empty((0,) * max(1, p.dim()), device=p.device)) for _, p in weights]
        self.optimizer = make([{**settings, "params": self.master_params}])

    def wait(self) -> None:
        self.waiting = {id(p) for _, p in self.weights}

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Update the weights that have a gradient, and free the gradients."""
        self.stepped = step
        for group in self.optimizer.param_groups:  # several, if the optimizer has sorted the weights
            group["lr"] = self.group["lr"]
        stepped = [
            (number, p, master_param)
            for (number, p), master_param in zip(self.weights, self.master_params, strict=True)
            if p.grad is not None
        ]
        stored = self._widen(stepped)
        self.optimizer.step()
        self._write_back(stepped, stored, step)

    def _widen(self, stepped: Sequence[Stepped]) -> dict[tuple[int, str], Tensor]:
        """Give the master parameters the weights' values, gradients and states in float32, and free the gradients.
        Returns the states that were stored in bfloat16, by master parameter and name."""
        weights = widened([p.detach() for _, p, _ in stepped])
        gradients = widened([p.grad for _, p, _ in stepped if p.grad is not None])
        for (_, p, master_param), weight, gradient in zip(stepped, weights, gradients, strict=True):
            p.grad = None
            master_param.data, master_param.grad = weight, gradient
        states = [
            (master_param, key, value.to(p.device))  # a resumed state may still be on the weight's former device
            for _, p, master_param in stepped
            for key, value in self.optimizer.state[master_param].items()
            if _follows(value, p)
        ]
        for (master_param, key, _), wide in zip(states, widened([value for *_, value in states]), strict=True):
            self.optimizer.state[master_param][key] = wide
        return {(id(master_param), key): value for master_param, key, value in states if value.dtype in HALF}

    def _write_back(self, stepped: Sequence[Stepped], stored: dict[tuple[int, str], Tensor], step: int) -> None:
        """Round the weights, and the optimizer's states of matrices, which are bfloat16 too. Frees the float32 copies
        until the next step."""
        roundings = [
            (
                number,
                [
                    Rounding(p, master_param.data, rows_of_parameter(p)),
                    *self._store_in_bfloat16(p, master_param, stored),
                ],
            )
            for number, p, master_param in stepped
            if p.dtype in HALF
        ]
        write_all_rounded(roundings, self._step_rng, step)
        for _, _, master_param in stepped:
            master_param.grad = None
            master_param.data = master_param.new_empty(0)

    def _store_in_bfloat16(
        self, p: nn.Parameter, master_param: nn.Parameter, stored: dict[tuple[int, str], Tensor]
    ) -> Iterator[Rounding]:
        """Replace the float32 states of a weight by bfloat16 tensors; yields how to fill these."""
        state = self.optimizer.state[master_param]
        for key in _narrow_states(state, p):
            exact, into = state[key], stored.get((id(master_param), key))
            state[key] = torch.empty_like(exact, dtype=p.dtype) if into is None else into
            yield Rounding(state[key], exact, rows_of_parameter(p))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the optimizer's state; tensors that were stored in bfloat16 become bfloat16 again, losslessly."""
        self.optimizer.load_state_dict(state)
        for (_, p), master_param in zip(self.weights, self.master_params, strict=True):
            own = self.optimizer.state[master_param]
            own |= {key: own[key].to(p.dtype) for key in _narrow_states(own, p)}


class PartitionedOptimizer(torch.optim.Optimizer):
    """All bundles as one optimizer, with the groups and learning rates of the whole."""

    def __init__(
        self, groups: list[Group], bundles: Callable[[Group], Iterable[list[nn.Parameter]]], make: Callable, seed: int
    ) -> None:
        """`bundles` splits a group's weights; `make` creates an optimizer from parameter groups."""
        super().__init__(groups, {"lr": None})
        self.steps = 0
        self.limit = 0.0  # norm limit of each gradient when stepping within the backward pass
        self._norms: list[Tensor] = []
        self._share: Callable[[Tensor], Any] | None = None
        # Over all groups: a weight's random numbers must not depend on how groups are split into bundles.
        numbers = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        step_rng = StepRNG(seed)
        self.bundles = [
            PartialOptimizer(group, [(numbers[p], p) for p in cut], make, step_rng)
            for group in self.param_groups
            for cut in bundles(group)
        ]

    def step_early(self, limit: float, share: Callable[[Tensor], Any] | None = None) -> None:
        """Step each bundle within the backward pass from now on, once its last gradient has arrived. `share` averages a
        gradient over all processes.
        """
        # Each gradient is clipped alone to the norm `limit` (0: off), as the common norm is not known yet.
        self.limit, self._share = limit, share
        for bundle in self.bundles:
            bundle.wait()
            for _, p in bundle.weights:
                p.register_post_accumulate_grad_hook(functools.partial(self._count_arrived_gradient, bundle))

    def _count_arrived_gradient(self, bundle: PartialOptimizer, p: nn.Parameter) -> None:
        """A gradient has arrived: step the bundle when it is the last one."""
        if bundle.stepped == self.steps:  # already done, if a failed compilation repeats the step
            p.grad = None
            return
        if self._share and p.grad is not None:
            self._share(p.grad)
        if self.limit:
            self._norms.append(nn.utils.clip_grad_norm_([p], self.limit))
        bundle.waiting.discard(id(p))
        if not bundle.waiting:
            bundle.step(self.steps)
            bundle.wait()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        """Step the bundles that were not stepped within the backward pass."""
        for bundle in self.bundles:
            if any(p.grad is not None for _, p in bundle.weights):
                bundle.step(self.steps)
        self.steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free all gradients, and wait for every one again."""
        super().zero_grad(set_to_none)
        for bundle in self.bundles:
            bundle.wait()

    def norm(self) -> Tensor | None:
        """Return the norm, before clipping, of all gradients stepped within the last backward pass."""
        norms, self._norms = self._norms, []
        return torch.stack(norms).square().sum().sqrt() if norms else None

    def state_dict(self) -> dict[str, Any]:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"steps": self.steps, "groups": groups, "bundles": [b.optimizer.state_dict() for b in self.bundles]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of all bundles, or that of a single optimizer of the same weights. Raises ConfigError if the
        weights are bundled, grouped or stored differently.
        """
        if "bundles" not in state_dict and self._has_weights_of(state_dict):
            state_dict = self._split(state_dict)
        if len(state_dict.get("bundles", ())) != len(self.bundles):
            raise ConfigError("resume: the state is of a run with another optimizer; resume with its own config")
        self.steps = state_dict["steps"]
        for group, stored_group in zip(self.param_groups, state_dict["groups"], strict=True):
            group.update(stored_group)
        for bundle, stored_group in zip(self.bundles, state_dict["bundles"], strict=True):
            bundle.load_state_dict(stored_group)

    def _has_weights_of(self, whole: dict[str, Any]) -> bool:
        """Whether a single optimizer had groups of as many weights, and kept numbers for matrices in their dtype."""
        stored_groups = whole.get("param_groups", ())
        if [len(group["params"]) for group in stored_groups] != [len(group["params"]) for group in self.param_groups]:
            return False
        weights = [p for group in self.param_groups for p in group["params"]]
        return all(
            value.dtype == weights[number].dtype
            for number, state in whole["state"].items()
            for value in state.values()
            if weights[number].dim() > 1 and _follows(value, weights[number])
        )

    # Before 2026-11-27 weights that load in bf16 were stepped by one optimizer without bundles.
    def _split(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Return the state of one optimizer of all weights as the state of bundles."""
        bundles = []
        for bundle in self.bundles:
            numbers = {id(p): number for (number, _), p in zip(bundle.weights, bundle.master_params, strict=True)}
            part = bundle.optimizer.state_dict()
            params = (p for group in bundle.optimizer.param_groups for p in group["params"])
            states = ((i, whole["state"].get(numbers[id(p)])) for i, p in enumerate(params))
            bundles.append({**part, "state": {i: state for i, state in states if state}})
        groups = [
            {name: stored[name] for name in group.keys() & stored.keys() - {"params"}}
            for group, stored in zip(self.param_groups, whole["param_groups"], strict=True)
        ]
        steps = max((int(state.get("step", 0)) for state in whole["state"].values()), default=0)
        return {"steps": steps, "groups": groups, "bundles": bundles}


# ---- how a group is cut


def one_by_one(group: Group) -> Iterator[list[nn.Parameter]]:
    yield from ([p] for p in group["params"])


def bundles_by_size(group: Group) -> Iterator[list[nn.Parameter]]:
    """Yield bundles of as many tensors as may be in float32 at once."""
    bundle: list[nn.Parameter] = []
    for p in group["params"]:
        # By the size of whole weights, so that bundles do not depend on the number of ranks.
        if bundle and sum(whole_shape(b).numel() for b in (*bundle, p)) > WIDENED:
            yield bundle
            bundle = []
        bundle.append(p)
    yield bundle


def bundles_by_count(number: int, total: int) -> Callable[[Group], Iterator[list[nn.Parameter]]]:
    """Yield `number` bundles of equally many tensors among `total`; each group starts a new one."""
    size = math.ceil(total / number)

    def cut(group: Group) -> Iterator[list[nn.Parameter]]:
        params = group["params"]
        yield from (params[start : start + size] for start in range(0, len(params), size))

    return cut


def bundles_by_block(blocks: Iterable[nn.Module]) -> Callable[[Group], Iterator[list[nn.Parameter]]]:
    """Yield one bundle per block, and one for all other weights."""
    block_of = {id(p): i for i, block in enumerate(blocks, start=1) for p in block.parameters()}

    def cut(group: Group) -> Iterator[list[nn.Parameter]]:
        bundles: dict[int, list[nn.Parameter]] = {}
        for p in group["params"]:
            bundles.setdefault(block_of.get(id(p), 0), []).append(p)
        yield from bundles.values()

    return cut


def _narrow_states(state: dict[str, Any], p: nn.Parameter) -> list[str]:
    """Return which float32 states of a weight are stored in bfloat16."""
    # float16 cannot hold the squares of gradients.
    if p.dtype != torch.bfloat16 or p.dim() < 2:
        return []
    return [key for key, value in state.items() if _follows(value, p) and value.dtype == torch.float32]


def _follows(value: Any, p: nn.Parameter) -> bool:
    """Whether a value of the optimizer's state has an element for each of the weight's, and moves with it."""
    # The driver moves paged states, which bitsandbytes keeps in host memory.
    is_paged = getattr(value, "is_paged", False)
    return isinstance(value, Tensor) and value.shape == p.shape and value.dim() > 0 and not is_paged
