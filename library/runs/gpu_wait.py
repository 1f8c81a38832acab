"""Wait for free GPUs for a process other than a training, and reserve them."""

import contextlib
import time
from collections.abc import Callable, Iterator

from library.config.json_types import JsonMapping
from library.config.problems import Message
from library.runs import gpu_slots, reader

WAITS = "waiting for image generation or caching to end"
WAITING = 1.0  # seconds between two polls


@contextlib.contextmanager
def reserve_devices(launch_options: JsonMapping, report: Callable[[Message], None]) -> Iterator[tuple[str, ...]]:
    """Reserve devices for a process with these launch options; `report` receives the reason for waiting."""
    with contextlib.ExitStack() as stack:
        while True:
            with gpu_slots.choosing():
                active = [run for run in reader.runs() if run.active and run.is_here]
                reserved = gpu_slots.choose_devices(launch_options, gpu_slots.free_devices(run.facts for run in active))
                if reserved:
                    stack.enter_context(gpu_slots.holding(reserved))
                    break
            names = ", ".join(run.id for run in active)
            report(Message("waiting for {trainings}", trainings=names) if names else Message(WAITS))
            time.sleep(WAITING)
        yield reserved
