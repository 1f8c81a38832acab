"""Checks of environment variables and output encodings at which Python or PyTorch would fail. No torch."""

import contextlib
import errno
import io
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from library.config.problems import ConfigError

# What libraries say, each in an error of its own, where memory cannot be had.
NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "os error 12",
    "Cannot allocate memory",
    "std::bad_alloc",
    "failed to map segment",
    "can't start new thread",
    "error 1455",
)
# Variables of proxies and certificates, in either case.
NETWORK_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir")
SWITCHED_ON = ("1", "true", "yes", "on")  # what accelerate reads as such in its variables
CACHE = "TORCHINDUCTOR_CACHE_DIR"
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # settings of PyTorch's memory, where it looks for them
# Who has started this process, as it was before seconds of imports in which a launcher may be killed.
PARENT = os.getppid()
DIRECT = "KOHYA_WITHOUT_LAUNCHER"  # set where that is the page or a shell, which may go away
LAUNCHED = DIRECT not in os.environ and any(name.startswith(("ACCELERATE_", "TORCHELASTIC_")) for name in os.environ)


def print_any_text() -> None:
    """Print characters that the encoding of a file, pipe or console lacks as escapes, where Python would raise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Inside, whoever reads what is printed may have seen enough (`| head`): the rest is dropped, without an error."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # nor when Python flushes at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that the computer's memory is used up, or a limit on it."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return any(sign in str(error) for sign in NO_MEMORY)


def check_cache_variables() -> None:
    """Raise ConfigError where the cache folder that is named cannot be made."""
    if not (wanted := os.environ.get(CACHE)):
        return
    try:
        Path(wanted).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "{variable}: {wanted} cannot be made ({why}), and PyTorch ends there; choose another folder, or unset it",
            variable=CACHE,
            wanted=wanted,
            why=error.strerror,
        ) from error


# Why: docs/decisions/2026-11-23-memory-without-holes.md
def expand_segments() -> None:
    """Before torch is loaded: let what it takes of a GPU's memory grow in place, unless the user has settings for that.

    On Linux alone. Drivers in WSL fail at it, and on Windows there is none.
    """
    in_wsl = "microsoft" in platform.release().lower()
    if sys.platform == "linux" and not in_wsl and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


@contextlib.contextmanager
def without_network_settings() -> Iterator[None]:
    """Inside, no variable names a proxy or certificates: a package that makes a client when it is imported would fail
    at one that is wrong, whether it is used or not."""
    known = {name: os.environ.pop(name) for name in [*os.environ] if name.lower() in NETWORK_VARIABLES}
    try:
        yield
    finally:
        os.environ.update(known)


def process_count() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def shards_asked() -> int:
    """The version of FSDP that `accelerate launch` was told to use, 0 where it was not."""
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() not in SWITCHED_ON:
        return 0
    return 2 if os.environ.get("FSDP_VERSION") == "2" else 1


def first_process() -> bool:
    """Whether this is the process of a multi-process launch that prints."""
    return os.environ.get("RANK", "0") == "0"


def forget_problems() -> None:
    """Let PyTorch be loaded in this process all the same, to look for other mistakes."""
    os.environ.pop(CACHE, None)
