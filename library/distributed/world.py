"""The hardware as seen by one process of a training."""

import contextlib
import datetime
import faulthandler
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, InitProcessGroupKwargs
from torch import Tensor

from library.compiler import cudagraph
from library.config.run_config import RunConfig
from library.config.sections import Cache
from library.distributed.messages import Messages
from library.families.base import ModelComponents
from library.memory.quantization import fp8_storage

T = TypeVar("T")
CLOSING = 15  # seconds after a failure in which one of several processes must end
TIMEOUT, TIMEOUT_OF_GPUS = 30, 10  # minutes: PyTorch's default timeouts of collectives

READ_INTERVAL = 2.0  # seconds between two reads of the memory in use; one costs as much as the rest of a log line
BYTES_PER_GIB = 2**30


class MemoryWatch:
    """Memory of this process and of its GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._process, self._next = device, psutil.Process(), 0.0

    def now(self) -> dict[str, float]:
        """Return {"memory_gb": GiB in use on the GPU, or without one in RAM}; empty within READ_INTERVAL seconds of the
        last read.
        """
        if time.monotonic() < self._next:
            return {}
        self._next = time.monotonic() + READ_INTERVAL
        on_gpu = self._device.type == "cuda"
        used = torch.cuda.memory_reserved(self._device) if on_gpu else self._process.memory_info().rss
        return {"memory_gb": round(used / BYTES_PER_GIB, 2)}

    def peaks(self) -> dict[str, float | None]:
        """Return peak memory in GiB: of tensors on the GPU (None without one), and of RAM."""
        gpu = cudagraph.peak(self._device) if self._device.type == "cuda" else None
        if sys.platform == "win32":
            ram = self._process.memory_info().peak_wset
        else:
            import resource  # missing on Windows

            ram = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {"peak_memory_gb": gpu and round(gpu / BYTES_PER_GIB, 2), "peak_ram_gb": round(ram / BYTES_PER_GIB, 2)}

    def hardware(self, processes: int) -> dict[str, Any]:
        """Return the device, its memory and the number of processes for the run's record."""
        facts: dict[str, Any] = {"device": str(self._device), "processes": processes}
        if self._device.type == "cuda":
            properties = torch.cuda.get_device_properties(self._device)
            facts |= {"gpu": properties.name, "gpu_memory_gb": round(properties.total_memory / BYTES_PER_GIB, 1)}
        return facts


def training_device(device: torch.device) -> torch.device:
    """Return accelerate's device as PyTorch's functions take it: a GPU with its number, the processor without one."""
    if device.type == "cpu":  # several processes get "cpu:0", which torch.load rejects
        return torch.device("cpu")
    if device.type == "cuda" and device.index is None:  # a single process; the memory's limit needs a number
        return torch.device("cuda", torch.cuda.current_device())
    return device


class World:
    """Device, ranks, dtypes and mixed precision of a training, and the communication of its processes.

    As a context manager it destroys the process group, if there is one.
    """

    def __init__(self, config: RunConfig) -> None:
        options = config.distributed
        handlers: list[Any] = []
        if options.ddp_timeout:
            handlers.append(InitProcessGroupKwargs(timeout=datetime.timedelta(minutes=options.ddp_timeout)))
        os.environ.pop("ACCELERATE_USE_FSDP", None)  # accelerate would shard in its own way; our option is `fsdp`
        self._sharded = options.fsdp
        no_gpu = not torch.cuda.is_available()  # without cpu=True several processes on a CPU form no group
        self.accelerator = Accelerator(
            mixed_precision=config.precision.mixed_precision, cpu=no_gpu, kwargs_handlers=handlers
        )
        self.device = training_device(self.accelerator.device)
        self.main: bool = self.accelerator.is_main_process
        self.rank: int = self.accelerator.process_index
        self.ranks: int = self.accelerator.num_processes
        self.storage_dtype, self.compute_dtype = fp8_storage.storage_type(config), fp8_storage.compute_type(config)
        self.memory = MemoryWatch(self.device)
        # Shorter than NCCL's timeout, which ends the process without a message.
        timeout = 0.9 * 60 * (options.ddp_timeout or (TIMEOUT if no_gpu else TIMEOUT_OF_GPUS))
        self.messages = Messages(self.rank, self.ranks, timeout) if self.ranks > 1 else None

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *error: object) -> None:
        if self.ranks > 1 and torch.distributed.is_initialized():
            if not error[0]:
                torch.distributed.destroy_process_group()
                return
            # NCCL waits for pending collectives, which other processes may never answer. So a thread does this while
            # the error is reported, and a process that still hangs after that is ended.
            faulthandler.dump_traceback_later(CLOSING, exit=True, file=os.open(os.devnull, os.O_WRONLY))
            closing = threading.Thread(target=torch.distributed.destroy_process_group, daemon=True)
            closing.start()
            closing.join(CLOSING / 5)

    @property
    def scaler(self) -> "torch.amp.GradScaler | None":
        return self.accelerator.scaler

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of mixed precision. It surrounds compiled blocks and is never entered inside one."""
        if self._sharded and self.ranks > 1:  # the cache would hold the cast weights of all blocks at once
            return self.accelerator.autocast(AutocastKwargs(cache_enabled=False))
        return self.accelerator.autocast()

    def place(self, components: ModelComponents, is_live: Callable[[str], bool], cached: Cache, keep_vae: bool) -> None:
        """Move the VAE and the text encoders to the device, and free those whose outputs are cached.

        `cached` is the config's cache section; `is_live` says whether a text encoder runs in steps all the same.
        Networks that are still deferred are not needed. `prepare_denoiser` places the denoiser.
        """
        components.deferred.clear()
        networks = components.vae, *components.encoders.values()
        if not cached.latents and components.vae is not None:
            components.vae.to(self.device)
        elif not keep_vae:
            components.vae = None
        for name in list(components.encoders):
            if cached.text and not is_live(name):
                components.encoders.pop(name).to("cpu")  # a full fine-tune keeps them for its file
            else:
                components.encoders[name].to(self.device)
        if any(network not in (components.vae, *components.encoders.values()) for network in networks):
            del networks
            gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def average(self, tensor: Tensor) -> None:
        torch.distributed.all_reduce(tensor)
        tensor /= self.ranks

    def gather(self, value: T) -> list[T]:
        """Return the value of every process, by rank."""
        values = [value] * self.ranks
        if self.ranks > 1:
            torch.distributed.all_gather_object(values, value)
        return values

    def wait_for_everyone(self) -> None:
        self.accelerator.wait_for_everyone()
