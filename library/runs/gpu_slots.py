"""The GPUs of this machine, and which of them a training gets: one device per GPU, or a single one on a CPU."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from library.config.command import is_on_cpu, launch_problems, named_gpus
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, Problem
from library.files import remove
from library.runs import layout, locking, machine, process, registry

CPU = "cpu"
VISIBLE = "CUDA_VISIBLE_DEVICES"
START_LOCK_TIMEOUT = 15.0  # seconds to wait for another process that starts a training


def devices() -> tuple[str, ...]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; ("cpu",) without any."""
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        names = tuple(part.strip() for part in visible.split(",") if part.strip() not in ("", "-1"))
        return names or (CPU,)
    return tuple(map(str, range(machine.gpu_count()))) or (CPU,)


def has_gpu() -> bool:
    return devices()[0] != CPU


@contextlib.contextmanager
def choosing() -> Iterator[None]:
    """Hold the lock for assigning devices on this machine. Raises ConfigError if another process does not
    release it.
    """
    with locking.hold_lock(Path(registry.data_folder()) / "devices.lock", START_LOCK_TIMEOUT) as is_held:
        if not is_held:
            raise ConfigError("another training is starting: try again in a moment")
        yield


def taken(active: Iterable[JsonMapping]) -> set[str]:
    """Return the devices of active runs, from their run.json. A run started in a shell may use any."""
    in_use: set[str] = set()
    for facts in active:
        in_use |= set(facts.get("devices") or (*devices(), CPU))
    return in_use


# The devices of a training started in a shell are unknown, so it counts as using all of them.
# Why: docs/decisions/2026-11-20-gpus-are-given-to-one-training.md
def choose_devices(launch_options: JsonMapping, free: Iterable[str]) -> tuple[str, ...]:
    """Return the devices that a training gets out of the free ones; () if it must wait.

    Raises ConfigError for GPUs that this machine lacks.
    """
    all_devices, available = devices(), tuple(free)
    if is_on_cpu(launch_options) or all_devices == (CPU,):
        return (CPU,) if CPU in available else ()
    if requested := tuple(named_gpus(launch_options)):
        if wrong := _absent_gpu_problem(requested, all_devices):
            raise ConfigError(wrong)
        return requested if set(requested) <= set(available) else ()
    count = wanted_gpus(launch_options, len(all_devices))
    free_in_order = [device for device in all_devices if device in available]
    if len(free_in_order) > count:  # other programs may use some, so prefer those with most free memory
        room = {gpu.index: gpu.total - gpu.used for gpu in machine.read_gpus()}
        roomiest = sorted(free_in_order, key=lambda device: -room.get(device, 0.0))[:count]
        free_in_order = [device for device in free_in_order if device in roomiest]
    return tuple(free_in_order) if len(free_in_order) >= count else ()


def wanted_gpus(launch_options: JsonMapping, most: int) -> int:
    """Return the number of GPUs, at most `most`, for a training that names none."""
    return most if launch_options.get("gpu_ids") == "all" else min(wanted_processes(launch_options), most)


def has_room(launch_options: JsonMapping, free: Iterable[str]) -> bool:
    """Return whether a training could start on these devices."""
    try:
        return bool(choose_devices(launch_options, free))
    except ConfigError:
        return False


def find_launch_problems(launch_options: JsonMapping) -> list[Problem]:
    """Return every problem of launch options; of GPUs only if this machine's are known."""
    problems, all_devices = launch_problems(launch_options), devices()
    if all_devices == (CPU,) or is_on_cpu(launch_options):
        return problems
    named = named_gpus(launch_options)
    requested = tuple(named) or all_devices
    if wrong := _absent_gpu_problem(requested, all_devices):
        problems.append(wrong)
    elif not problems and (number := wanted_processes(launch_options)) > len(requested):
        what = Message("gpu_ids names" if named else "this machine has")
        gpus = Message("{count} GPUs" if len(requested) > 1 else "{count} GPU", count=len(requested))
        facts = {"number": number, "what": what, "gpus": gpus}
        problems.append(Problem("num_processes", "is {number}, and {what} {gpus}: one for each", **facts))
    return problems


def _absent_gpu_problem(requested: Iterable[str], all_devices: Iterable[str]) -> Problem | None:
    """Return the problem of a GPU that this machine lacks, if any."""
    unknown = next((name for name in requested if name not in all_devices), "")
    if not unknown:
        return None
    return Problem("gpu_ids", ": there is no GPU {name} here, only {here}", name=unknown, here=", ".join(all_devices))


@contextlib.contextmanager
def holding(reserved: Iterable[str]) -> Iterator[None]:
    """Reserve these devices within the context for this process, which is not a run."""
    path = _holders() / f"{os.getpid()}.json"
    layout.store(path, {**process.identity(), "devices": list(reserved)})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a leftover file does not count, as its process has ended
            remove(path)


def held_devices() -> set[str]:
    """Return the devices reserved by live processes that are not runs."""
    held: set[str] = set()
    for path in _holders().glob("*.json"):
        facts = layout.load_facts(path)
        if process.alive(facts):
            held |= set(facts.get("devices") or ())
    return held


def _holders() -> Path:
    return registry.data_folder() / "devices"


def free_devices(active: Iterable[JsonMapping]) -> tuple[str, ...]:
    busy = taken(active) | held_devices()
    return tuple(device for device in dict.fromkeys((*devices(), CPU)) if device not in busy)


def device_environment(assigned: Iterable[str]) -> dict[str, str]:
    """Return variables that limit a training to its devices."""
    assigned = tuple(assigned)
    # Number GPUs like nvidia-smi, not by speed.
    return {} if CPU in assigned else {VISIBLE: ",".join(assigned), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def options_for_devices(launch_options: JsonMapping, assigned: Iterable[str]) -> JsonObject:
    """Return the launch options of a training with these devices."""
    assigned = tuple(assigned)
    if CPU in assigned:
        return dict(launch_options)
    options = {**launch_options, "gpu_ids": ",".join(assigned)}
    if wanted_processes(launch_options) > 1:  # port 0 is any free one, as another run may use the default
        options["main_process_port"] = launch_options.get("main_process_port") or 0
    return options


def wanted_processes(launch_options: JsonMapping) -> int:
    machines = int(launch_options.get("num_machines") or 1)
    return max(1, int(launch_options.get("num_processes") or 1) // max(1, machines))
