"""The blocks of a denoiser while it is compiled for images: other classes, whose graphs PyTorch keeps apart."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from library.compiler import cache
from library.compiler.blocks import BlockCompiler, block_options
from library.compiler.checks import find_compile_problems, find_hooks
from library.compiler.plan import CompilePlan
from library.compiler.subclass import (
    CHECKPOINTS,
    COMPILED,
    INPUTS_ON_HOST,
    RECORDED_AS_GRAPHS,
    SWAPPED,
    behaviours_of,
    class_inside,
)
from library.compiler.torch_settings import THREAD_SETTINGS, wanted_settings
from library.config.problems import raise_if_any
from library.config.run_config import RunConfig
from library.families.base import Family
from library.memory import channels_last, swapping
from library.memory.compile_targets import Sizes, blocks_by_class, compile_targets, image_transformers

logger = logging.getLogger(__name__)

APART = "pictures"
# Behaviours that images do without, or that go around another class.
OF_TRAINING = (*CHECKPOINTS, INPUTS_ON_HOST, COMPILED, SWAPPED, RECORDED_AS_GRAPHS)


class ImageBlocks:
    """The classes and the compiled calls of blocks for images."""

    def __init__(self, denoiser: nn.Module, plan: CompilePlan) -> None:
        """`plan` compiles the blocks, and its log records their graphs."""
        self._denoiser, self._plan = denoiser, plan
        self._calls: dict[nn.Module, Any] = {}  # block -> its compiled call
        self._classes: dict[nn.Module, type[nn.Module]] = {}  # block or layer -> its class for images

    def compile(self, family: Family, config: RunConfig, device: torch.device, sizes: Sizes, settings: bool) -> None:
        """Prepare compiled calls, which compile when they run first.

        `config` has the options of compiling, `sizes` those of the latents; `settings` says whether to set PyTorch's
        switches, which a compiled training has set. Raises ConfigError if this machine cannot compile.
        """
        options, groups = config.compile, blocks_by_class(self._denoiser, family.block_classes)
        groups, backends, inputs = compile_targets(self._denoiser, groups, family, config, device, sizes)
        blocks = [block for group in groups for block in group]
        raise_if_any([*find_compile_problems(options, device), *find_hooks(self._denoiser, blocks)])
        if settings:
            for problem in cache.find_cache_problems(options.compile_cache_dir, device):
                logger.warning("%s", problem)
            cache.use_cache(options.compile_cache_dir, device)
            graphs = max((block_inputs.sizes for block_inputs in inputs.values()), default=1)
            THREAD_SETTINGS.want(wanted_settings(options, device, graphs))
        torch_options = block_options(options, blocks, inputs, device)
        compiler = BlockCompiler(options, torch_options, inputs, backends, self._plan.log, apart=APART)
        for block in blocks:
            self._choose_classes(block, compiler)
        for module in image_transformers(self._denoiser, family):
            if module.norm in self._classes:
                self._classes[module] = channels_last.with_images_last(type(module))
        self._plan.begin(blocks, lambda block: self._keep_call(block, compiler), {}, 0)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Run compiled blocks within this context; afterwards the blocks are what they were."""
        classes, calls = dict(self._classes), dict(self._calls)
        if COMPILED in behaviours_of(self._denoiser):  # as a whole, by the training
            classes[self._denoiser] = class_inside(type(self._denoiser), OF_TRAINING)
            calls[self._denoiser] = None
        own_classes = {module: type(module) for module in classes}
        own_calls = {
            block: (vars(block).get("_compiled_call_impl"), vars(block).get("_compile_log")) for block in calls
        }
        try:
            for module, cls in classes.items():
                module.__class__ = cls
            for block, call in calls.items():
                vars(block).update(_compiled_call_impl=call, _compile_log=self._plan.log)
            yield
        finally:
            for module, cls in own_classes.items():
                module.__class__ = cls
            for block, (call, log) in own_calls.items():
                vars(block).update(_compiled_call_impl=call, _compile_log=log)

    def _choose_classes(self, block: nn.Module, compiler: BlockCompiler) -> None:
        own = {module: type(module) for module in block.modules()}
        channels_last.compile_on_its_own(block)
        channels_last.keep_channels_last(block)
        self._classes |= {module: type(module) for module, cls in own.items() if type(module) is not cls}
        entry = compiler.entry(block, class_inside(type(block), OF_TRAINING))
        for module, cls in own.items():
            module.__class__ = cls
        # All blocks of a class, as they share graphs; only those with a `_swap` attribute do swap.
        self._classes[block] = swapping.swapped(entry) if SWAPPED in behaviours_of(block) else entry

    def _keep_call(self, block: Any, compiler: BlockCompiler) -> None:
        own = block._compiled_call_impl
        compiler.compile(block)
        self._calls[block], block._compiled_call_impl = block._compiled_call_impl, own
