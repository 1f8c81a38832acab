"""Many small optimizers behind the interface of one: each steps a bundle of weights.

This serves two purposes. Weights in half precision are stepped in float32 with stochastic rounding, one bundle at a
time, so that only its copies are in float32. And an optimizer that steps within the backward pass, once a bundle has
its gradients, frees these before the next ones are computed.
"""

import functools
import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from library.config.problems import ConfigError
from library.methods.sharding import Rows, rows_of_parameter, whole_shape

Group = dict[str, Any]
WIDENED = 2**24  # most weights in float32 at a time (64 MiB); a larger tensor is its own bundle
HALF = (torch.bfloat16, torch.float16)

LOW = 1 << 16  # range of the bits that bfloat16 drops from a float32


class StepRNG:
    """Random numbers that depend only on the seed, the step and the weight, so that a resumed run draws the same."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def generator_for(self, device: torch.device, step: int, number: int) -> torch.Generator:
        """Return the generator of a step for the `number`-th weight."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        text = f"rounding {self._seed} {step} {number}".encode()
        return self._generators[device].manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8]) >> 1)


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
        stepped = []
        for (number, p), master_param in zip(self.weights, self.master_params, strict=True):
            gradient, p.grad = p.grad, None
            if gradient is not None:
                self._to_fp32(p, gradient, master_param)
                stepped.append((number, p, master_param))
        self.optimizer.step()
        for number, p, master_param in stepped:
            self._write_back(p, master_param, self._step_rng.generator_for(p.device, step, number))

    def _to_fp32(self, p: nn.Parameter, gradient: Tensor, master_param: nn.Parameter) -> None:
        wide = torch.float32 if p.dtype in HALF else p.dtype
        master_param.data = p.detach().to(wide)
        master_param.grad = gradient.to(wide)
        state = self.optimizer.state[master_param]
        for key, value in state.items():
            if _follows(value, p):  # a resumed state may still be on the weight's former device
                state[key] = value.to(p.device, wide if value.dtype in HALF else value.dtype)

    def _write_back(self, p: nn.Parameter, master_param: nn.Parameter, generator: torch.Generator) -> None:
        if p.dtype in HALF:
            rows = rows_of_parameter(p)
            write_rounded(p, master_param.data, generator, rows)
            self._narrow(master_param, p, lambda into, exact: write_rounded(into, exact, generator, rows))
        master_param.grad = None
        # Free the float32 copy until the next step.
        master_param.data = master_param.new_empty(0)

    def _narrow(self, master_param: nn.Parameter, p: nn.Parameter, put: Callable[[Tensor, Tensor], Any]) -> None:
        """Store the optimizer's states of matrices in bfloat16, too."""
        # float16 cannot hold the squares of gradients.
        if p.dtype != torch.bfloat16 or p.dim() < 2:
            return
        state = self.optimizer.state[master_param]
        for key, value in state.items():
            if _follows(value, p) and value.dtype == torch.float32:
                state[key] = torch.empty_like(value, dtype=p.dtype)
                put(state[key], value)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the optimizer's state; tensors that were stored in bfloat16 become bfloat16 again, losslessly."""
        self.optimizer.load_state_dict(state)
        for (_, p), master_param in zip(self.weights, self.master_params, strict=True):
            self._narrow(master_param, p, Tensor.copy_)


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
                p.register_post_accumulate_grad_hook(functools.partial(self._arrived, bundle))

    def _arrived(self, bundle: PartialOptimizer, p: nn.Parameter) -> None:
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
            found = ((i, whole["state"].get(numbers[id(p)])) for i, p in enumerate(params))
            bundles.append({**part, "state": {i: state for i, state in found if state}})
        groups = [
            {name: stored[name] for name in group.keys() & stored.keys() - {"params"}}
            for group, stored in zip(self.param_groups, whole["param_groups"], strict=True)
        ]
        steps = max((int(state.get("step", 0)) for state in whole["state"].values()), default=0)
        return {"steps": steps, "groups": groups, "bundles": bundles}


# ---- how a group is cut


def one_by_one(group: Group) -> Iterator[list[nn.Parameter]]:
    yield from ([p] for p in group["params"])


def by_size(group: Group) -> Iterator[list[nn.Parameter]]:
    """Yield bundles of as many tensors as may be in float32 at once."""
    bundle: list[nn.Parameter] = []
    for p in group["params"]:
        # By the size of whole weights, so that bundles do not depend on the number of ranks.
        if bundle and sum(whole_shape(b).numel() for b in (*bundle, p)) > WIDENED:
            yield bundle
            bundle = []
        bundle.append(p)
    yield bundle


def by_count(number: int, total: int) -> Callable[[Group], Iterator[list[nn.Parameter]]]:
    """Yield `number` bundles of equally many tensors among `total`; each group starts a new one."""
    size = math.ceil(total / number)

    def cut(group: Group) -> Iterator[list[nn.Parameter]]:
        params = group["params"]
        yield from (params[start : start + size] for start in range(0, len(params), size))

    return cut


def by_block(blocks: Iterable[nn.Module]) -> Callable[[Group], Iterator[list[nn.Parameter]]]:
    """Yield one bundle per block, and one for all other weights."""
    block_of = {id(p): i for i, block in enumerate(blocks, start=1) for p in block.parameters()}

    def cut(group: Group) -> Iterator[list[nn.Parameter]]:
        bundles: dict[int, list[nn.Parameter]] = {}
        for p in group["params"]:
            bundles.setdefault(block_of.get(id(p), 0), []).append(p)
        yield from bundles.values()

    return cut


def _follows(value: Any, p: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape == p.shape and value.dim() > 0


# Rounding to nearest would drop every update smaller than half a step of the dtype.
# Why: docs/decisions/2026-11-22-stochastic-rounding.md
@torch.no_grad()
def write_rounded(into: Tensor, exact: Tensor, generator: torch.Generator, rows: Rows | None = None) -> None:
    """Write float32 values into a tensor of equal shape, with stochastic rounding to bfloat16, else to the nearest.
    `rows` is the tensor's part of a weight, which is rounded as in the whole.
    """
    # float16 has three more bits, and loss scaling handles its small values, so it is rounded to nearest.
    if into.dtype != torch.bfloat16:
        into.copy_(exact)
        return
    # A scalar has no last dimension to split into halves below.
    if not exact.dim():
        into, exact = into.view(1), exact.view(1)
    # A bfloat16 is the upper half of a float32. Adding a number below 2^16 to the whole carries into that half exactly
    # as often as the lower half is large.
    # Draw for the whole weight, so that rounding does not depend on the number of processes.
    shape = rows.shape if rows else exact.shape
    drawn = torch.empty(shape, dtype=torch.int32, device=exact.device).random_(0, LOW, generator=generator)
    bits = rows.own(drawn) if rows else drawn
    bits += exact.view(torch.int32)
    upper = 1 if sys.byteorder == "little" else 0
    into.copy_(bits.view(torch.bfloat16).unflatten(-1, (-1, 2))[..., upper])
    # The carry can turn a NaN into a number, which would hide it; zero times a NaN brings it back.
    into.add_(exact, alpha=0)
