"""The graphs that other processes compile beside the first steps, which the training loads one by one."""

import logging
import threading
import time

import torch
from torch import nn

from library.compiler import block_calls, torch_private
from library.compiler.block_calls import BlockCall
from library.compiler.plan import CompilePlan
from library.train.compiling.compile_process import CompileProcesses

logger = logging.getLogger(__name__)


class BackgroundGraphs:
    """Loads graphs from the cache between steps."""

    def __init__(
        self, calls: list[BlockCall], processes: CompileProcesses, plan: CompilePlan, device: torch.device
    ) -> None:
        self.processes = processes  # which compile the graphs of these calls
        self.pauses: list[float] = []  # seconds of loading each graph
        self._calls, self._plan, self._device = calls, plan, device
        self._imports: threading.Thread | None = None  # imports inductor into this process

    @property
    def due(self) -> bool:
        """Whether a graph can be loaded, or no further one will be ready."""
        return len(self.processes.ready) > len(self.pauses) or bool(self.why_ended)

    @property
    def why_ended(self) -> str:
        """Why no further graph will be ready although some are missing, "" otherwise."""
        if not self.processes.ended or self.all_loaded or len(self.processes.ready) > len(self.pauses):
            return ""
        return next(iter(self.processes.failures), "no process is left that could compile them")

    @property
    def all_loaded(self) -> bool:
        return len(self.pauses) == len(self._calls)

    def import_compiler(self) -> None:
        """Import inductor on a thread, so that the first graph need not wait for the import."""
        if self._imports is None:
            self._imports = threading.Thread(target=_import_inductor, name="compiler", daemon=True)
            self._imports.start()

    def load_next(self, denoiser: nn.Module) -> None:
        """Load the graph that was ready first among those not loaded yet."""
        began = time.perf_counter()
        if self._imports:
            self._imports.join()
        call = self._calls[self.processes.ready[len(self.pauses)]]
        with self._plan.compiled_alone(denoiser.get_submodule(call.path)):
            block_calls.repeat(denoiser, call, self._device)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.pauses.append(time.perf_counter() - began)


def _import_inductor() -> None:
    try:
        torch_private.import_inductor()
    except Exception as error:  # loading the first graph raises it again and reports it
        logger.debug("inductor could not be imported: %s", error)
