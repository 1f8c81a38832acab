"""GPUs for a process that is no training: it waits until they are free, and then reserves them."""

import contextlib
import time
from collections.abc import Callable, Iterator

from library.config.json_types import JsonMapping
from library.config.problems import Text
from library.runs import gpu_slots, reader

WAITS = "waiting for images that are generated, or a cache that is made"
WAITING = 1.0  # seconds between two looks whether they are free


@contextlib.contextmanager
def free_devices(how: JsonMapping, told: Callable[[Text], None]) -> Iterator[tuple[str, ...]]:
    """The devices for a process with these launch options, for it alone; meanwhile `told` hears for whom it waits."""
    with contextlib.ExitStack() as stack:
        while True:
            with gpu_slots.choosing():
                active = [run for run in reader.runs() if run.active and run.is_here]
                own = gpu_slots.choose(how, gpu_slots.free(run.facts for run in active))
                if own:
                    stack.enter_context(gpu_slots.holding(own))
                    break
            names = ", ".join(run.id for run in active)
            told(Text("waiting for {trainings}", trainings=names) if names else Text(WAITS))
            time.sleep(WAITING)
        yield own
