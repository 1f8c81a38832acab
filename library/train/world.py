"""The machine as one process of a training sees it."""

import contextlib
import datetime
import gc
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor, nn

from library.config.run_config import RunConfig
from library.config.sections.machine import Distributed
from library.families.base import ModelComponents
from library.memory.quantization import fp8_storage
from library.methods import TrainingMethod
from library.train.step_metrics import MemoryWatch

T = TypeVar("T")


class World:
    """Device, ranks, dtypes and mixed precision of a training, and what its processes exchange.

    As a context manager it ends the process group, where there is one.
    """

    def __init__(self, config: RunConfig) -> None:
        options = config.distributed
        handlers: list[Any] = [
            DistributedDataParallelKwargs(gradient_as_bucket_view=options.ddp_gradient_as_bucket_view)
        ]
        if options.ddp_timeout:
            handlers.append(InitProcessGroupKwargs(timeout=datetime.timedelta(minutes=options.ddp_timeout)))
        no_gpu = not torch.cuda.is_available()  # unless told so, several processes on a CPU do not find each other
        self.accelerator = Accelerator(
            mixed_precision=config.precision.mixed_precision, cpu=no_gpu, kwargs_handlers=handlers
        )
        self.device: torch.device = self.accelerator.device
        if self.device.type == "cpu":  # of several processes it has a number, which torch.load does not understand
            self.device = torch.device("cpu")
        self.main: bool = self.accelerator.is_main_process
        self.rank: int = self.accelerator.process_index
        self.ranks: int = self.accelerator.num_processes
        self.storage_dtype, self.compute_dtype = fp8_storage.storage_type(config), fp8_storage.compute_type(config)
        self.memory = MemoryWatch(self.device)
        self._averaged: list[nn.parallel.DistributedDataParallel] = []

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *error: object) -> None:
        if self.ranks > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    @property
    def scaler(self) -> "torch.amp.GradScaler | None":
        """The gradient scaler of fp16, None in other precisions."""
        return self.accelerator.scaler

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Mixed precision, as asked for. It stays around compiled blocks, never inside of them."""
        return self.accelerator.autocast()

    def place(self, components: ModelComponents, trained: Mapping[str, bool], cached: Any, keep_vae: bool) -> None:
        """Move the VAE and the text encoders to the device, and let those go whose outputs are cached.

        `cached` is the config's cache section. The denoiser is placed in `prepare_denoiser`.
        """
        if not cached.latents and components.vae is not None:
            components.vae.to(self.device)
        elif not keep_vae:
            components.vae = None
        for name in list(components.encoders):
            if cached.text and not trained.get(name):
                components.encoders.pop(name).to("cpu")  # a model that learns keeps them for its file
            else:
                components.encoders[name].to(self.device)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def average_gradients(self, components: ModelComponents, method: TrainingMethod, options: Distributed) -> None:
        """Wrap what learns in DistributedDataParallel, where there are several processes."""
        if self.ranks == 1:
            return

        def wrapped(network: nn.Module, find_unused: bool) -> nn.Module:
            made = nn.parallel.DistributedDataParallel(
                network,
                device_ids=[self.device.index] if self.device.type == "cuda" else None,
                gradient_as_bucket_view=options.ddp_gradient_as_bucket_view,
                static_graph=options.ddp_static_graph,
                find_unused_parameters=find_unused,
            )
            self._averaged.append(made)
            return made

        for name, encoder in components.encoders.items():
            if method.trained_parts.get(name):
                # The last layers of a text encoder do not take part: families read an earlier one.
                components.encoders[name] = wrapped(encoder, find_unused=True)
        if method.trained_parts.get("denoiser"):
            components.denoiser = wrapped(components.denoiser, find_unused=False)

    @contextlib.contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Inside, gradients are averaged over processes only where this is the last batch of a step."""
        with contextlib.ExitStack() as stack:
            for network in () if last else self._averaged:
                stack.enter_context(network.no_sync())
            yield

    def average(self, tensor: Tensor) -> None:
        """Make a tensor the mean of all processes', in place."""
        torch.distributed.all_reduce(tensor)
        tensor /= self.ranks

    def gather(self, value: T) -> list[T]:
        """The value of every process, by rank."""
        found = [value] * self.ranks
        if self.ranks > 1:
            torch.distributed.all_gather_object(found, value)
        return found

    def wait_for_everyone(self) -> None:
        """Let every process come to this line."""
        self.accelerator.wait_for_everyone()
