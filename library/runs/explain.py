"""From the end of a log to the cause of the failure, in one sentence."""

import re

KNOWN = (
    (r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|HIP out of memory",
     "The GPU ran out of memory. Lower the batch size or resolution, turn on gradient checkpointing, or swap blocks."),
    (r"No space left on device|OSError: \[Errno 28\]|There is not enough space on the disk",
     "The disk is full. Free some space, or choose another output folder."),
    (r"DefaultCPUAllocator: can't allocate|Cannot allocate memory|^MemoryError|std::bad_alloc",
     "The computer ran out of memory (RAM). Use fewer data loader workers, or cache to disk instead of memory."),
    (r"No module named '([\w.]+)'",
     "The Python package {0} is missing. Run the set-up again (./setup.sh)."),
    (r"Address already in use|EADDRINUSE",
     "Another training uses the same network port. Stop it first, or wait until it has ended."),
    (r"no kernel image is available",
     "This PyTorch was not built for this GPU. Run the set-up again, so that it picks the right build."),
    (r"CUDA driver version is insufficient|The NVIDIA driver on your system is too old",
     "The NVIDIA driver is too old for this PyTorch. Update the driver."),
    (r"PermissionError: .*?'([^']+)'", "The file or folder {0} may not be written or read by you."),
    (r"FileNotFoundError: .*?'([^']+)'", "The file or folder {0} does not exist."),
    (r"Signals\.SIGKILL|exitcode: -9|died with <Signals\.SIGKILL",
     "The system ended the training, most often because the computer ran out of memory (RAM)."),
)  # fmt: skip

OURS = re.compile(r"^(?:[\w.]+\.)?ConfigError: (.+?)(?=^\S*Traceback|^\s*$|\Z)", re.M | re.S)
USAGE = re.compile(r"^[\w./\\-]+\.py: error:\s*(.+?)(?=^Traceback|^\s*$|\Z)", re.M | re.S)
SAID = re.compile(r"(?:^error: .+\n?)+", re.M)  # how our scripts end when something is to be fixed
EXCEPTION = re.compile(r"^(?:[\w]+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b.*", re.M)
LAUNCHER = re.compile(r"CalledProcessError|ChildFailedError|torch\.distributed\.elastic")


def cause(log: str) -> str | None:
    """The most likely cause of a failure in the last part of a log, or None when it shows none.

    The trainer's own messages win, since they already say what to do; then errors that are known well enough to
    advise on; then the last exception that is not merely the launcher reporting that its child failed.
    """
    for pattern in (OURS, USAGE):
        if found := pattern.findall(log):
            return found[-1].strip()
    if found := SAID.findall(log):
        return "\n".join(line.removeprefix("error: ") for line in found[-1].splitlines())
    for pattern, advice in KNOWN:
        if found := list(re.finditer(pattern, log, re.M)):
            return advice.format(*found[-1].groups())
    raised = [line for line in EXCEPTION.findall(log) if not LAUNCHER.search(line)]
    return raised[-1].strip() if raised else None
