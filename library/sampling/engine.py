"""Run a denoiser for images: through compiled blocks and recorded passes, beside those of a training.

The same blocks, backends and options of torch.compile, 8-bit formats, swapped blocks and attention kernels serve a
training and its images. Images neither change nor recompile a graph of the training.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from library import families
from library.compiler import cudagraph, gpu_memory, torch_private
from library.compiler.blocks import compile_error_cause, is_compile_error
from library.compiler.log import CompileLog
from library.compiler.pass_recording import CudaPool, PassPool, PassRecorder
from library.compiler.payoff import SAVED_SHARE, SAVED_SHARE_8_BIT, Payoff
from library.compiler.plan import CompilePlan, PlanEvent, PlanState
from library.compiler.subclass import keep_class_name
from library.compiler.torch_settings import THREAD_SETTINGS, stance
from library.config.problems import ConfigError, MessageLike, counted
from library.config.run_config import RunConfig
from library.families.base import Family, SampleRequest
from library.families.shared.sampler import Sampler
from library.memory.compile_targets import Sizes
from library.memory.prepare import is_sharded
from library.sampling.image_attention import image_attention
from library.sampling.image_blocks import ImageBlocks
from library.sampling.prompts import Prompt
from library.sampling.requests import imageless_request

logger = logging.getLogger(__name__)

T = TypeVar("T")

FORWARD_SHARE = 0.4  # of the seconds of compiling, for graphs without a backward pass
COMPILER_SECONDS = 5.0  # of loading the compiler into a process that has not compiled yet
LATENT = 8  # pixels of a side of one latent
MIN_PASSES = 8  # of each size, below which recording does not pay


@dataclass(frozen=True)
class ImagesLeft:
    """The images that remain to be generated."""

    passes: int  # of the denoiser, over all images
    sizes: Sizes  # number of texts, height and width of the latents of each pass


def images_left(prompts: Iterable[Prompt], sampler: Sampler, rounds: int = 1) -> ImagesLeft:
    """Return what these prompts need, each `rounds` times."""
    passes, sizes = 0, {}
    for prompt in prompts:
        request = imageless_request(prompt)
        height, width = sampler.size(request)
        sizes[2 if sampler.is_guided(request) else 1, height // LATENT, width // LATENT] = None
        passes += rounds * sampler.count_passes(request)
    return ImagesLeft(passes, tuple(sizes))


class StartOver(Exception):  # noqa: N818 - no error
    """Blocks are compiled from here on, so the image begins again: none is computed in two ways."""


class ImageEngine:
    """How the passes of one denoiser run for images: eagerly or compiled, recorded or not."""

    def __init__(  # noqa: PLR0913 - the model, and what stands beside its images
        self,
        denoiser: nn.Module,
        family: Family,
        config: RunConfig,
        device: torch.device,
        log: CompileLog,
        training: CompilePlan | None = None,
        make_pool: Callable[[], PassPool] | None = None,
    ) -> None:
        """`log` is that of the process, `training` the plan of a training whose images these are.

        `make_pool` creates the memory of recordings, by default of CUDA graphs.
        """
        self._denoiser, self._family, self._config, self._device = denoiser, family, config, device
        self._log, self._training = log, training
        self.plan = CompilePlan()  # of images; its log has their graphs
        self.recorder = PassRecorder(denoiser, make_pool or CudaPool)
        self.measures = device.type == "cuda"  # whether `auto` times passes, to decide what pays
        self.pass_seconds: float | None = None  # of an eager pass, if it was timed
        self.why_eager: MessageLike = ""  # why blocks are not compiled
        self._blocks = ImageBlocks(denoiser, self.plan)
        self._left = ImagesLeft(0, ())
        self._before_pass: Callable[[], object] = lambda: None
        self._decided = self._measuring = False
        self._records = True
        self._passes = 0  # while measuring
        self._addresses: list[int] = []  # of the weights
        self._way = contextlib.ExitStack()  # its end restores how the denoiser ran before
        self.recorder.why_not = self._why_not_recorded(forced=make_pool is not None)
        if not self.recorder.why_not and make_pool is None and training is None:
            cudagraph.leave_default_stream()

    # ---- around images

    @contextlib.contextmanager
    def running(
        self, left: ImagesLeft, before_pass: Callable[[], object] = lambda: None, records: bool = True
    ) -> Iterator[None]:
        """Run the denoiser for images within this context; `before_pass` is called before each pass and may raise.

        `records`: whether passes may be recorded, as each computes the same.
        """
        self._left, self._before_pass, self._records = left, before_pass, records
        addresses = [p.data_ptr() for p in self._denoiser.parameters()]
        if addresses != self._addresses:
            self.recorder.free()  # the weights are elsewhere now
        self._addresses = addresses
        self._decide()
        with (
            image_attention(self._config, self._device, in_training=self._training is not None),
            self._log.hand_over(self.plan.log),
            contextlib.ExitStack() as self._way,
        ):
            self._enter()
            yield
        self._note_graphs()

    def images(self, sampler: Sampler, requests: Sequence[SampleRequest], draw: Callable[[], T]) -> T:
        """Return what `draw` returns, which calls the sampler with these requests, one batch.

        If memory is short, free all recordings; for one request, then predict the two prompts of guidance one after the
        other. If the compiler fails, continue without it.
        """
        sampler.make_room, sampler.room_to_keep = self._make_room, self._room_to_keep
        while True:
            try:
                return cudagraph.with_room(self._denoiser, draw)
            except StartOver:
                continue
            except torch.OutOfMemoryError:
                if len(requests) > 1 or sampler.one_by_one or not sampler.is_guided(requests[0]):
                    raise
                sampler.one_by_one = True
                logger.warning("memory is too short for both prompts of guidance at once: they take turns from here on")
            except Exception as error:
                if not self.plan.active or not is_compile_error(error):
                    raise
                self._give_up(compile_error_cause(error))

    def _make_room(self) -> bool:
        had_recordings = bool(self.recorder.recordings)
        self.recorder.free()
        return had_recordings

    def _room_to_keep(self) -> int | None:
        if is_sharded(self._config) or self._config.memory.moves_weights(self._config):
            return 0  # weights are at hand only while their block runs
        return gpu_memory.memory_for_tensors(self._device) if self._device.type == "cuda" else None

    def close(self) -> None:
        """Discard recordings and, unless a training continues, compiled code."""
        self.recorder.free()
        if self._training is None and self.plan.state is not PlanState.OFF:
            self._log.close()
            THREAD_SETTINGS.want([])

    # ---- decisions

    def _options(self) -> Any:
        compiles = self._config.sample.sample_compile != "false"
        return replace(self._config.compile, compile=compiles, compile_scope="blocks")

    def _why_not_recorded(self, forced: bool) -> str:
        if self._device.type != "cuda" and not forced:
            return "there is no GPU"
        if is_sharded(self._config):
            return "fsdp gathers weights at every block"
        is_wanted = self._config.sample.sample_compile != "false" or self._config.compile.cuda_graphs == "true"
        if not (is_wanted or forced):
            return "sample_compile is false"
        if self._training and not forced and cudagraph.recorder_of(self._denoiser) is None:
            return "steps of this training are not recorded"  # nor does it compute on a stream that can be
        return self._options().why_not_recorded(self._config)

    # Why: docs/decisions/2026-11-28-one-engine-for-pictures.md
    def _decide(self) -> None:
        """Decide what needs no timing, unless the training is compiling beside its steps or timing them."""
        state = self._training.state if self._training else None
        if self._decided or state in (PlanState.BESIDE, PlanState.MEASURING):
            return
        self._decided = True
        wanted, least = self._config.sample.sample_compile, MIN_PASSES * max(1, len({*self._left.sizes}))
        if self._left.passes < least and not self._config.compile.records_graphs and not self.recorder.why_not:
            self.recorder.give_up(f"too few passes are left ({self._left.passes})", expected=True)
        if wanted == "false" or state is PlanState.GIVEN_UP or is_sharded(self._config):
            return
        if wanted == "true":
            self._compile()
        elif self._training is None or self._config.compile.compile:
            self._measuring = self.measures

    def payoff(self) -> Payoff:
        """Return whether compiling pays in the passes that are left, by the seconds of an eager one."""
        _, seconds = families.compiling_cost(replace(self._config, compile=self._options()))
        loading = FORWARD_SHARE * seconds + (0.0 if torch_private.dynamo_is_loaded() else COMPILER_SECONDS)
        in_8_bits = self._config.precision.fp8_compute or self._config.precision.int8_compute
        return Payoff(
            self._left.passes,
            self.pass_seconds or 0.0,
            max(1, len({*self._left.sizes})),
            loading,
            share=SAVED_SHARE_8_BIT if in_8_bits else SAVED_SHARE,
        )

    def _measure(self, call: Callable[[], T]) -> T:
        """Run one of the first passes eagerly; time the second, and compile if that pays. Raises StartOver then."""
        self._passes += 1
        if self._passes == 1:
            return call()
        self._wait()
        began = time.perf_counter()
        result = call()
        self._wait()
        self.pass_seconds, self._measuring = time.perf_counter() - began, False
        if self.payoff().pays:
            self._compile()
            if self.plan.active:
                self._enter()
                raise StartOver
        return result

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _compile(self) -> None:
        config, compiled = replace(self._config, compile=self._options()), self._training and self._training.active
        self._log.listen()
        try:
            self._blocks.compile(self._family, config, self._device, self._left.sizes, settings=not compiled)
        except ConfigError as error:
            self.why_eager = error.said
            level = logging.WARNING if self._config.sample.sample_compile == "true" else logging.INFO
            logger.log(level, "Images are not compiled: %s", self.why_eager)
            return
        self.recorder.free()  # of eager blocks

    def _give_up(self, why: str) -> None:
        self.plan.give_up(why)
        self.why_eager = why
        self.recorder.free()
        logger.warning("Compiling failed for images (%s); they are generated without it", why)
        self._enter()

    def _note_graphs(self) -> None:
        if self.plan.state is PlanState.COMPILING and self.plan.log.events:
            self.plan.on(PlanEvent.PROVE)
            total = self.plan.log.summary()
            graphs = counted(total["num_graphs"], "graph")
            logger.info("Compiled %s for images in %.1f s", graphs, total["seconds"])

    # ---- the way that passes run

    def _enter(self) -> None:
        """Let passes run as decided, until the context of `running` ends or they are to run otherwise."""
        self._way.close()
        self._way.enter_context(self._blocks.in_use() if self.plan.active else stance("force_eager"))
        self._way.enter_context(self._receiving_calls())

    @contextlib.contextmanager
    def _receiving_calls(self) -> Iterator[None]:
        denoiser, own = self._denoiser, type(self._denoiser)
        if is_sharded(self._config):  # its class is PyTorch's
            hook = denoiser.register_forward_pre_hook(lambda *_: self._before_pass() and None, prepend=True)
            try:
                yield
            finally:
                hook.remove()
            return
        denoiser.__dict__["_receive_pass"], denoiser.__class__ = self._receive_pass, _for_images(own)
        try:
            yield
        finally:
            denoiser.__class__ = own
            del denoiser.__dict__["_receive_pass"]

    def _receive_pass(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._before_pass()
        if self._measuring:
            return self._measure(lambda: call(*args, **kwargs))
        return self.recorder(call, args, kwargs) if self._records else call(*args, **kwargs)


@functools.cache
def _for_images(cls: type[nn.Module]) -> type[nn.Module]:
    class ForImages(cls):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.__dict__["_receive_pass"](super().__call__, args, kwargs)

    return keep_class_name(ForImages, cls)
