"""The GPUs that a training can use: their names, their memory, and the runs that use them."""

from library.config.json_types import JsonObject
from library.runs import gpu_slots, machine, reader

# gpus.js fills it if there is more than one GPU.
CHOOSER = (
    '<div class="gpus span-6" role="group" aria-label="GPUs" hidden><b>GPUs</b><div class="choices"></div>'
    "<small>Several GPUs share the work of a training, which waits until all of them are free.</small></div>"
)


def list_gpus() -> list[JsonObject]:
    """Return each GPU that trainings on this computer may use, with its memory in GiB and its user; empty without a
    GPU."""
    devices = [device for device in gpu_slots.devices() if device != gpu_slots.CPU]
    gpus = {gpu.index: gpu for gpu in (machine.GPUS.now() or machine.GPUS.known())} if devices else {}
    users = dict.fromkeys(gpu_slots.held_devices(), "Another job")
    for run in reader.runs():
        if run.active and run.is_here:  # a run started in a shell may use any of them
            users |= dict.fromkeys(run.facts.get("devices") or devices, run.name)
    rows: list[JsonObject] = []
    for device in devices:
        gpu = gpus.get(device)
        memory = {"free": round(gpu.total - gpu.used, 1), "total": gpu.total} if gpu else {"free": 0.0, "total": 0.0}
        rows.append({"index": device, "name": gpu.name if gpu else "GPU", **memory, "user": users.get(device, "")})
    return rows
