"""Checks of environment variables and output encodings at which Python or PyTorch would fail. No torch."""

import contextlib
import errno
import io
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from library.config.problems import ConfigError
from library.config.values import WINDOWS

# Messages of libraries when memory allocation fails, each in its own error type.
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
# Proxy and certificate variables, in upper and lower case.
NETWORK_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir")
SWITCHED_ON = ("1", "true", "yes", "on")  # values that accelerate reads as true
CACHE = "TORCHINDUCTOR_CACHE_DIR"
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # variables of PyTorch's allocator settings
# For a process whose output is read as UTF-8: on Windows Python else writes pipes and files in an old code page.
OUTPUT_IN_UTF_8 = {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
DIRECT = "KOHYA_WITHOUT_LAUNCHER"  # set if the parent is the page or a shell, which may end
LAUNCHED = DIRECT not in os.environ and any(name.startswith(("ACCELERATE_", "TORCHELASTIC_")) for name in os.environ)


def starting_process(is_redirected: bool) -> int:
    """Return the process that started this one. `is_redirected`: in a virtual environment on Windows, python.exe only
    starts the real Python as its child, so the parent is passed over if it is that.
    """
    parent = os.getppid()
    if is_redirected:
        with contextlib.suppress(psutil.Error, ValueError):
            process = psutil.Process(parent)
            if os.path.normcase(process.exe()) == os.path.normcase(sys.executable):
                return process.ppid()
    return parent


# Read first, as a launcher may be killed during the seconds of imports that follow.
PARENT = starting_process(is_redirected=os.name == "nt" and sys.prefix != sys.base_prefix)


def print_any_text() -> None:
    """Print characters that the output encoding lacks as escapes, instead of raising. On Windows, files and pipes get
    UTF-8, unless a variable of Python sets their encoding.
    """
    encoding = "utf-8" if WINDOWS and not os.environ.get("PYTHONIOENCODING") else None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Consoles print Unicode anyway; for files and pipes, Windows uses a code page that lacks most characters.
            stream.reconfigure(encoding=None if stream.isatty() else encoding, errors="backslashreplace")


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Allow the reader of the output to stop early (`| head`) within this context: the rest is dropped without an
    error.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # Python's flush at exit must not fail either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error means that RAM, or a limit on it, is exhausted."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return any(sign in str(error) for sign in NO_MEMORY)


def check_cache_variables() -> None:
    """Raise ConfigError if the chosen cache folder cannot be created."""
    if not (folder := os.environ.get(CACHE)):
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "{variable}: {wanted} cannot be created ({why}), and PyTorch stops without it; choose another "
            "folder, or unset the variable",
            variable=CACHE,
            wanted=folder,
            why=error.strerror,
        ) from error


# Why: docs/decisions/2026-11-23-memory-without-holes.md
def expand_segments() -> None:
    """Enable expandable segments of PyTorch's GPU allocator, unless the user has settings for it. To be called before
    torch is loaded, which reads the variable then.
    """
    # Only on Linux: Windows lacks it, and the drivers of WSL fail at it.
    in_wsl = "microsoft" in platform.release().lower()
    if sys.platform == "linux" and not in_wsl and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


@contextlib.contextmanager
def without_network_settings() -> Iterator[None]:
    """Hide proxy and certificate variables within this context."""
    # A package that creates an HTTP client on import would fail at an invalid one, even if it never uses the client.
    hidden = {name: os.environ.pop(name) for name in [*os.environ] if name.lower() in NETWORK_VARIABLES}
    try:
        yield
    finally:
        os.environ.update(hidden)


def process_count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def cpu_requested() -> bool:
    """Return whether `accelerate` is set to use the CPU."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in SWITCHED_ON


def shards_asked() -> int:
    """Return the FSDP version requested from `accelerate launch`, 0 for none."""
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() not in SWITCHED_ON:
        return 0
    return 2 if os.environ.get("FSDP_VERSION") == "2" else 1


def first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def forget_problems() -> None:
    # Lets this process load PyTorch anyway, to check for other mistakes.
    os.environ.pop(CACHE, None)
