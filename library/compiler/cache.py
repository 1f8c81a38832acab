"""The folder in which PyTorch caches compiled code, so that a restarted training compiles nothing again.

PyTorch's caches look code up by content; they only need a folder that lasts, and the default is in the system's
temporary folder. Each combination of PyTorch, Python and device has its own.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import platformdirs
import torch

from library.compiler.pruning import COMPLETE, repair, trim
from library.compiler.torch_private import default_cache_dir, same_cache_keys
from library.config.problems import ConfigError, Message, MessageLike, Problem
from library.files import nearest_existing, write_atomic

USUAL_LIMIT = 8 * 2**30  # bytes over all folders, where `limit_cache` was not called
LIMIT_FILE = "limit.json"
INDUCTOR, GRAPHS = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_FX_GRAPH_CACHE"
_set_variables: dict[str, str] = {}  # environment variables set by `use_cache`, which it may change again


def use_cache(option_folder: str | None, device: torch.device) -> Path:
    """Set PyTorch's cache folder and return it: the one of an environment variable, of the option, the user's own, or
    PyTorch's temporary one, whichever comes first and can be used.
    """
    chosen, default = _in_environment(), default_cache_dir()
    wanted = _folders(option_folder, device)
    folder = next((folder for folder in wanted if not (_why_unusable(folder, device) or _why_not_made(folder))), None)
    # A usable value that was set outside this program stays.
    unusable, used = bool(chosen) and folder != wanted[0], folder or Path(default)
    for name, inner in ((INDUCTOR, used), ("TRITON_CACHE_DIR", used / "triton")):
        if unusable or folder and os.environ.get(name) in (None, default, _set_variables.get(name)):
            os.environ[name] = _set_variables[name] = str(inner)
    if folder is None:
        return Path(default)
    repair(folder)
    same_cache_keys()
    if unusable or not chosen:
        # A folder from the environment is the user's, and is not pruned.
        prune_cache(default_root() if folder == wanted[-1] else folder, keep=folder)
    return folder


def is_off() -> bool:
    """Return whether a variable of PyTorch's keeps it from storing graphs."""
    return os.environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") == "1" or os.environ.get(GRAPHS) == "0"


def holds_graphs() -> bool:
    return (Path(os.environ.get(INDUCTOR) or default_cache_dir()) / "fxgraph").is_dir()


def is_warm(name: str) -> bool:
    """Return whether all graphs of the settings of this name are in the folder."""
    folder = _folder_of_warm_settings()
    return folder is not None and (folder / name).exists()


def note_warm(name: str) -> None:
    """Remember settings as an empty file, named by what their graphs depend on. If the folder is not writable, their
    next start takes longer.
    """
    if folder := _folder_of_warm_settings():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()


def _folder_of_warm_settings() -> Path | None:
    cache = os.environ.get(INDUCTOR)
    return Path(cache) / COMPLETE if cache else None


def find_cache_problems(option_folder: str | None, device: torch.device) -> Iterator[Problem]:
    """Yield why the chosen folder cannot be used, and the folder that replaces it. Creates nothing."""
    chosen = _in_environment() or option_folder
    if not chosen or not (why := _why_unusable(Path(chosen), device)):
        return
    others = _folders(option_folder, device)[1:]
    instead = next((folder for folder in others if not _why_unusable(folder, device)), default_cache_dir())
    if option_folder and not _in_environment():
        option = "compile_cache_dir"
        template = ": {folder} cannot be used ({why}); compiled code is kept in {instead}"
        yield Problem(option, template, folder=chosen, why=why, instead=instead, fix={option: None})
        return
    template = "{what}: {folder} cannot be used ({why}); compiled code is kept in {instead}"
    yield Problem("", template, what=INDUCTOR, folder=chosen, why=why, instead=instead, topic="compiling")


def _folders(option_folder: str | None, device: torch.device) -> list[Path]:
    chosen = [Path(folder) for folder in (_in_environment(), option_folder) if folder]
    return [*chosen, default_root() / cache_key(device)]


def _in_environment() -> str | None:
    # PyTorch sets the variable itself on import; that default is not the user's choice.
    chosen = os.environ.get(INDUCTOR)
    return None if chosen in (default_cache_dir(), _set_variables.get(INDUCTOR)) else chosen


def _why_unusable(folder: Path, device: torch.device) -> MessageLike:
    if " " in str(folder) and device.type == "cpu":
        return "PyTorch cannot compile for the CPU in a folder with a blank in its name"
    nearest = nearest_existing(folder)
    if nearest is None:
        return Message("there is no {drive} here", drive=folder.absolute().anchor)
    if not nearest.is_dir():
        return Message("{folder} is not a folder", folder=nearest)
    return "" if os.access(nearest, os.W_OK) else "no permission"


def _why_not_made(folder: Path) -> str:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


# PyTorch's default is in the temporary folder, which a restart may empty.
# Why: docs/decisions/2026-11-20-compile-cache-folder.md
def default_root() -> Path:
    return platformdirs.user_cache_path("kohya", appauthor=False) / "compile"


def cache_key(device: torch.device) -> str:
    """Return what compiled code depends on besides the code itself."""
    name = platform.machine() or "cpu"
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)}-triton{_triton()}-driver{_driver_cuda()}"
    python = "".join(map(str, platform.python_version_tuple()[:2]))
    full = re.sub(r"[^\w.]+", "-", f"{torch.__version__}-py{python}-{name}").lower()
    if sys.platform != "win32":
        return full
    # Below it Triton needs up to 190 characters, and Windows ends paths at 260.
    return f"{torch.__version__.partition('+')[0]}-{hashlib.sha256(full.encode()).hexdigest()[:8]}"


def _triton() -> str:
    """Return the installed version of Triton, "" if there is none. Does not load the package."""
    for package in ("triton", "triton-windows"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package).partition("+")[0]
    return ""


def _driver_cuda() -> int:
    """Return the newest CUDA version that the NVIDIA driver supports, 0 without one. Does not touch a GPU."""
    number = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        driver.cuDriverGetVersion(ctypes.byref(number))
    return number.value


def cache_folders(root: Path | None = None) -> dict[str, int]:
    """Return the bytes of each cache folder: one for each combination of PyTorch, Python and device."""
    root = root or default_root()
    folders = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()] if root.is_dir() else []
    return {path.name: cache_size(path) for path in sorted(folders, key=_last_use, reverse=True)}


def cache_size(folder: Path | None = None) -> int:
    """Return the bytes in a folder, by default in the whole cache. Files that vanish meanwhile count as 0."""
    total = 0
    for path in (folder or default_root()).rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def clean_cache(root: Path | None = None) -> int:
    """Delete all compiled code; return the freed bytes.

    A running training has loaded its code and continues; its next start compiles again.
    """
    root = root or default_root()
    sizes = cache_folders(root)
    for folder in sizes:
        shutil.rmtree(root / folder, ignore_errors=True)  # on Windows a file in use stays
    return sum(sizes.values()) - sum(cache_size(root / folder) for folder in sizes)


def cache_limit(root: Path | None = None) -> int:
    """Return the most bytes that the cache may have."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return max(int(json.loads(((root or default_root()) / LIMIT_FILE).read_text(encoding="utf-8"))["bytes"]), 0)
    return USUAL_LIMIT


def limit_cache(max_bytes: int, root: Path | None = None) -> None:
    """Store the most bytes that the cache may have, and prune it to them."""
    root = root or default_root()
    if max_bytes < 0:
        raise ConfigError("the limit must not be negative; 0 keeps only code in use")
    write_atomic(root / LIMIT_FILE, json.dumps({"bytes": max_bytes}))
    prune_cache(root)


def prune_cache(root: Path, keep: Path | None = None, max_bytes: int | None = None) -> None:
    """Delete the least recently used code until the rest fits the limit: whole folders first, then single graphs of the
    folder in use (`keep`). If `root` is that folder, only it is pruned.
    """
    max_bytes = cache_limit(default_root() if keep == root else root) if max_bytes is None else max_bytes
    other_folders = [] if keep == root else [root / name for name in cache_folders(root)]
    if keep:
        # Folders are pruned by age, and reading from one does not change its time.
        os.utime(keep)
    last = keep or next(iter(other_folders), None)
    sizes = {folder: cache_size(folder) for folder in other_folders if folder != last}
    last_size = cache_size(last) if last else 0
    for folder in reversed(sizes):
        if last_size + sum(sizes.values()) <= max_bytes:
            return
        sizes[folder] = 0
        shutil.rmtree(folder, ignore_errors=True)
    if last and last_size > max_bytes:
        trim(last, max_bytes)


def _last_use(folder: Path) -> float:
    """Return seconds since the epoch; 0 if the folder has vanished."""
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0
