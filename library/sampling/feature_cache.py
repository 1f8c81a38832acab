"""Skip most blocks of a denoiser in steps that change little (`sample_cache`).

The first block always runs. If the change that it makes has hardly moved since the last pass in which all blocks ran,
the change made by the others is not computed but predicted: by a first-order Taylor step over the last two of those
passes. Sources of the formulas: TeaCache (arXiv 2411.19108) compares relative L1 distances, TaylorSeer (arXiv
2503.06923) extrapolates features by finite differences, DeepCache (arXiv 2312.00858) keeps the deep part of a U-Net.

The denoiser iterates over stand-ins for its blocks, which decide on the host between two blocks: blocks may be
compiled, swapped or wrapped, and no decision is part of a graph. A whole pass cannot be recorded as one CUDA graph.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from library.config.sections.sampling import AUTO, OFF, CacheThreshold
from library.families.base import BlockChain, Family, SampleRequest
from library.families.capabilities import HasBlockChain
from library.families.shared.sampler import Sampler

logger = logging.getLogger(__name__)

FULL_PASSES = 2  # at the beginning: the first Taylor step needs two
MIN_BLOCKS = 2  # the first always runs, the last adds what was skipped


def block_chain(family: Family) -> BlockChain | None:
    return family.block_chain if isinstance(family, HasBlockChain) else None


@dataclass
class ChainState:
    """The state kept between the passes of one batch of images."""

    number: int = 0  # of the current pass
    skips: bool = False  # in the current pass
    in_a_row: int = 0  # skipped passes
    first_change: Tensor | None = None  # by the first block, in the last full pass
    head: tuple[Tensor, ...] = ()  # outputs of the first block in the current pass
    # Number of a full pass and what the skipped blocks changed in it: of the last two.
    full: list[tuple[int, tuple[Tensor, ...]]] = field(default_factory=list)

    def add_full(self, change: tuple[Tensor, ...]) -> None:
        self.full = [*self.full[-1:], (self.number, change)]

    def end_pass(self) -> None:
        self.number, self.head = self.number + 1, ()

    def predicted(self) -> tuple[Tensor, ...]:
        """Return what the skipped blocks would change, extrapolated from the last two full passes."""
        (before, older), (last, newer) = self.full
        ahead = (self.number - last) / (last - before)
        return tuple(new + (new - old) * ahead for old, new in zip(older, newer, strict=True))


# Why: docs/decisions/2026-11-28-own-feature-cache.md
class FeatureCache:
    """The cache of one denoiser."""

    def __init__(self, denoiser: nn.Module, chain: BlockChain | None, threshold: CacheThreshold) -> None:
        """`chain` names the blocks; without one, or if the threshold is "off", nothing is ever skipped."""
        self._denoiser, self._chain = denoiser, chain
        self._threshold = chain.threshold if chain and threshold == AUTO else threshold
        self.skipped, self.passes = 0, 0  # of all batches so far

    @property
    def is_on(self) -> bool:
        return self._chain is not None and self._threshold != OFF

    def draw(self, sampler: Sampler, requests: Sequence[SampleRequest]) -> list[Image.Image]:
        """Generate images, one batch, whose steps skip blocks."""
        with self.active(2 if sampler.one_by_one else 1):
            return sampler.images(requests)

    @contextlib.contextmanager
    def active(self, passes_per_step: int = 1) -> Iterator[None]:
        """Skip blocks within this context, which is that of one batch of images.

        A step may take several passes with different prompts, always in the same order; each has a state of its own.
        """
        if self._chain is None or not self.is_on:
            yield
            return
        lists = [(name, getattr(self._denoiser, name)) for name in self._chain.lists]
        blocks = [block for _, blocks in lists for block in (blocks if isinstance(blocks, nn.ModuleList) else [blocks])]
        skippable = blocks[:-1] if self._chain.is_unet else blocks
        if len(skippable) < MIN_BLOCKS:
            yield
            return
        run = _Run([ChainState() for _ in range(passes_per_step)], float(self._threshold), self._chain.max_skipped)
        stand_ins = iter([*_stand_ins(skippable, self._chain, run), *blocks[len(skippable) :]])
        for name, members in lists:
            # In the instance's dictionary it hides the list among the modules, whose names and states stay.
            is_list = isinstance(members, nn.ModuleList)
            self._denoiser.__dict__[name] = [next(stand_ins) for _ in members] if is_list else next(stand_ins)
        try:
            yield
        finally:
            for name, _ in lists:
                del self._denoiser.__dict__[name]
            self.skipped, self.passes = self.skipped + run.skipped, self.passes + run.passes

    def log_savings(self) -> None:
        """Log what was skipped since the last call."""
        if self.passes:
            logger.info("sample_cache skipped most blocks in %d of %d passes", self.skipped, self.passes)
        self.skipped = self.passes = 0


@dataclass
class _Run:
    """One batch of images: the states of its passes, used in turn."""

    states: list[ChainState]
    threshold: float
    max_skipped: int  # passes in a row
    passes: int = 0
    skipped: int = 0
    state: ChainState = field(default_factory=ChainState)

    def begin_pass(self) -> None:
        self.state = self.states[self.passes % len(self.states)]
        self.passes += 1

    def decide(self, change: Tensor) -> None:
        """Decide whether the other blocks are skipped, by the change that the first block has made [B, ...]."""
        state = self.state
        may_skip = len(state.full) == FULL_PASSES and state.in_a_row < self.max_skipped
        # The image of a batch that has moved most decides for all.
        state.skips = may_skip and bool(distance(change, state.first_change) < self.threshold)
        state.in_a_row = state.in_a_row + 1 if state.skips else 0
        self.skipped += state.skips
        if not state.skips:
            state.first_change = change


def distance(change: Tensor, before: Tensor | None) -> Tensor:
    """Return the largest relative L1 distance between the changes [B, ...] of two passes."""
    assert before is not None
    dims = tuple(range(1, change.ndim))
    moved = (change.float() - before.float()).abs().mean(dims)
    return (moved / before.float().abs().mean(dims).clamp_min(torch.finfo(torch.float32).tiny)).max()


class _StandIn:
    """A block as the denoiser sees it: one between the first and the last of a transformer.

    Its streams are the first arguments of a block and all of its outputs. A skipped block passes them on.
    """

    def __init__(self, block: nn.Module, run: _Run) -> None:
        self._block, self._run = block, run
        self._outputs = 0  # number of outputs in a tuple, 0 for a single tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._run.state.skips:
            return args[: self._outputs] if self._outputs else args[0]
        output = self._block(*args, **kwargs)
        self._outputs = len(output) if isinstance(output, tuple) else 0
        return output


class _First(_StandIn):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._run.begin_pass()
        output = self._block(*args, **kwargs)
        self._run.state.head = _streams(output)
        self._run.decide(self._run.state.head[0] - args[0])
        return output


class _Last(_StandIn):
    """Adds what all skipped blocks would have changed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self._run.state
        if state.skips:
            streams = tuple(stream + change for stream, change in zip(args, state.predicted(), strict=False))
            state.end_pass()
            return streams if self._outputs else streams[0]
        output = super().__call__(*args, **kwargs)
        # The second of two lists reads both streams as one, the text first.
        head = state.head if len(_streams(output)) == len(state.head) else (torch.cat(state.head[::-1], dim=1),)
        state.add_full(tuple(end - begin for end, begin in zip(_streams(output), head, strict=True)))
        state.end_pass()
        return output


class _Remembered(_StandIn):
    """A block of a U-Net between the first and the last that is skipped. The outputs of its last full pass have the
    sizes that the denoiser expects; nothing reads their values.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._run.state.skips:
            self._output = self._block(*args, **kwargs)
        return self._output


class _UnetFirst(_StandIn):
    """Compares the change by its first layer, whose output is the first of those for the decoder."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._run.begin_pass()
        output = self._block(*args, **kwargs)
        self._run.decide(output[1][0] - kwargs["hidden_states"])
        return output


class _UnetLast(_StandIn):
    """Returns the predicted input of the blocks that always run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self._run.state
        if state.skips:
            (output,) = state.predicted()
        else:
            output = self._block(*args, **kwargs)
            state.add_full((output,))
        state.end_pass()
        return output


def _stand_ins(blocks: Sequence[nn.Module], chain: BlockChain, run: _Run) -> list[_StandIn]:
    kinds = (_UnetFirst, _Remembered, _UnetLast) if chain.is_unet else (_First, _StandIn, _Last)
    return [
        kinds[0](blocks[0], run),
        *(kinds[1](block, run) for block in blocks[1:-1]),
        kinds[2](blocks[-1], run),
    ]


def _streams(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)
