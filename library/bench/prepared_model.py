"""A model prepared for training with one candidate, and its measurable parts."""

import contextlib
import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from library.bench.subjects import FACTOR, FamilySubject, LearnedText, Subject, TrainableModel
from library.compiler.log import CompileLog
from library.compiler.torch_private import FakeTensor
from library.config.run_config import RunConfig
from library.data.batch import Batch
from library.measuring import shapes
from library.memory import swapping
from library.memory.prepare import prepare_denoiser
from library.memory.quantization import fp8_storage
from library.methods.adapters import Adapter
from library.optim import averaging, optimizers
from library.optim.flat_adamw import clip_norm
from library.train.step.loss import LossFunction
from library.train.step.rng import StepGenerators

Size = int | tuple[tuple[int, int], ...]  # the side of square images in pixels, or several (width, height)


@dataclass(frozen=True)
class StepCost:
    """The cost of a step that follows from shapes, equal for every candidate: FLOPs, and the inputs of blocks."""

    step: int | None
    blocks: Mapping[str, tuple[str, shapes.Call]]  # kind -> path of the block, its arguments without memory
    block_flops: Mapping[str, int | None]


def count_step(subject: Subject, trainable: TrainableModel, config: RunConfig, resolution: int) -> StepCost:
    """Count a step on a copy without memory, on the CPU: shapes and dtypes are the same on every device.

    A model that depends on values, such as caption lengths, has to be run instead.
    """
    world, device = shapes.FakeTensorContext(), torch.device("cpu")
    empty = world.copy(trainable.components.denoiser, device, fp8_storage.compute_type(config))
    # A family caches tensors between calls.
    with_own_family = replace(trainable, family=copy.deepcopy(trainable.family))
    with world.inside(), warnings.catch_warnings(action="ignore"):
        step = _count_step(empty, subject.predict(with_own_family, resolution, device), with_own_family, config, device)
    if step.step is not None:
        return step
    model = trainable.components.denoiser
    device = next(model.parameters()).device
    with_own_family = replace(trainable, family=copy.deepcopy(trainable.family))
    try:
        return _count_step(model, subject.predict(with_own_family, resolution, device), with_own_family, config, device)
    finally:
        for p in model.parameters():
            p.grad = None


def _count_step(
    model: nn.Module, predict: Callable[..., Tensor], trainable: TrainableModel, config: RunConfig, device: torch.device
) -> StepCost:
    """Count a step of a model, and of each kind of its blocks."""
    total, flops_by_kind = [], {}
    quietly = isinstance(next(model.parameters()), FakeTensor)

    def step() -> None:
        with autocast(config, device):
            loss = predict(model).square().mean()
        loss.backward()

    def run(block: nn.Module, arguments: shapes.Call) -> None:
        shapes.forward_backward(block, arguments, lambda: autocast(config, device))

    caught = shapes.called_blocks(
        model, trainable.family.block_classes, lambda: total.append(shapes.flops(step, quietly))
    )
    for kind, (path, call) in caught.items() if total[0] is not None else ():
        flops_by_kind[kind] = shapes.flops(
            functools.partial(run, model.get_submodule(path), shapes.made_real(call, device))
        )
    return StepCost(total[0], caught, flops_by_kind)


def autocast(config: RunConfig, device: torch.device) -> contextlib.AbstractContextManager:
    kind = fp8_storage.compute_type(config)
    return contextlib.nullcontext() if kind == torch.float32 else torch.autocast(device.type, kind)


class PreparedModel:
    """One candidate at one or several image sizes, ready to be timed. Close it to free its memory."""

    def __init__(
        self, subject: Subject, config: RunConfig, device: torch.device, size: Size, trainable: TrainableModel
    ) -> None:
        self.subject, self.config, self.device = subject, config, device
        sides = size if isinstance(size, tuple) else ((size, size),)
        self.trainable, self.ranks, self.rank = trainable, 1, 0  # it is the `Machine` of its loss, with one process
        self.compile_log = log = CompileLog()
        text_learns = isinstance(trainable.method, LearnedText)
        latents = tuple((height // FACTOR, width // FACTOR) for width, height in sides)
        prepared = prepare_denoiser(
            trainable.components.denoiser, trainable.family, config, device, latents, text_learns, log
        )
        self.not_compiled = prepared.not_compiled
        for factors in trainable.method.factor_caches:
            factors.gather(trainable.method.groups())
        self.optimizer = optimizers.make_optimizer(trainable.method, config)
        if config.optim.stepped_early:
            self.optimizer.step_early(config.optim.max_grad_norm, None)
        self._swap = None if config.adapters else swapping.find_trainable_swap(trainable.components.denoiser)
        averaging.train_mode(self.optimizer)
        trainable.method.train()
        self._losses = itertools.cycle([self._loss(width, height) for width, height in sides])

    def autocast(self) -> contextlib.AbstractContextManager:
        return autocast(self.config, self.device)

    def _loss(self, width: int, height: int) -> Callable[[], Tensor]:
        if isinstance(self.subject, FamilySubject):
            return self._own_loss(self.subject, width, height)
        predict, denoiser = self.subject.predict(self.trainable, width, self.device), self.trainable.components.denoiser

        def loss() -> Tensor:
            with self.autocast():
                return predict(denoiser).square().mean()

        return loss

    def _own_loss(self, subject: FamilySubject, width: int, height: int) -> Callable[[], Tensor]:
        """Return the trainer's own loss: noise, target, conditions, prediction, weighting."""
        number = subject.batch
        latents = subject.latents(self.trainable, (width, height), self.device)
        shown, inpaints = subject.shown(self.trainable, latents), subject.config({}).control_images.inpaints
        batch = Batch(
            captions=[""] * number,
            paths=[""] * number,
            # SDXL's size conditioning of an image that is not cropped.
            sizes=torch.tensor([[height, width, 0.0, 0.0, height, width]] * number, device=self.device),
            weights=torch.ones(number, device=self.device),
            latents=latents,
            text=subject.text(self.trainable, self.device),
            controls=tuple(shown[:1] if inpaints else shown),
            paint=shown[1] if inpaints else None,
            is_guided=subject.config({}).control_images.guided,
        )
        trainable, generators = self.trainable, StepGenerators(0, self.device, 0)
        compute_loss = LossFunction(
            trainable.family, trainable.components, trainable.method, self.config, self, generators, self.compile_log
        )
        return lambda: compute_loss(batch)

    def step(self) -> Tensor:
        """Run forward, backward, clipping and optimizer, one size after another, as in a training. Returns the loss."""
        loss = next(self._losses)()
        loss.backward()
        if self._swap:
            self._swap.sync_to_host()
        if not self.config.optim.stepped_early:
            if self.config.optim.max_grad_norm:
                method = self.trainable.method
                clip_norm(method.parameters(), self.config.optim.max_grad_norm, gathered=bool(method.factor_caches))
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self._swap:
            self._swap.forget_gradients()
        return loss.detach()

    def block(self, path: str, call: shapes.Call) -> Callable[[], None]:
        """Run one block, forward and backward, as within the model."""
        arguments, block = shapes.made_real(call, self.device), self.trainable.components.denoiser.get_submodule(path)
        self._begin_pass(block)
        return lambda: shapes.forward_backward(block, arguments, self.autocast)

    def _begin_pass(self, block: nn.Module) -> None:
        """Do what a pass of the whole model does before its blocks."""
        # Adapters get their cast and scaled factors from the network's hook.
        with self.autocast():
            for prepared in self.trainable.method.factor_caches:
                prepared.prepare()
        for layer in block.modules():
            if isinstance(layer, Adapter) and (factors := layer.cached_factors):
                layer.cached_factors = tuple(x.detach().requires_grad_(x.requires_grad) for x in factors)
            if projected := getattr(layer, "text_projected", None):
                own: Any = layer
                own.text_projected = tuple(x.detach().requires_grad_(x.requires_grad) for x in projected)

    def compiling(self) -> dict[str, Any]:
        """Return the compiler's log since the model was prepared."""
        if not self.config.compile.compile:
            return {}
        self.compile_log.drain()
        total = self.compile_log.summary()
        counts = {name: total[name] for name in ("num_graphs", "recompiles", "seconds", "cache_hits")}
        return {"compile": counts} | ({"not_compiled": self.not_compiled} if self.not_compiled else {})

    def close(self) -> None:
        del self.trainable, self.optimizer, self._losses, self._swap
        self.compile_log.close()


@contextlib.contextmanager
def open_prepared(
    subject: Subject, config: RunConfig, device: torch.device, size: Size, model: TrainableModel | None = None
) -> Iterator[PreparedModel]:
    """Yield a prepared model, closed at the end; `size` is the side of square images, or several (width, height)."""
    prepared = PreparedModel(subject, config, device, size, model or subject.make(config, device))
    try:
        yield prepared
    finally:
        prepared.close()
