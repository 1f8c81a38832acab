"""Where compiled code is kept between runs, so that the second start of a training compiles nothing anew.

PyTorch's own caches know by content what fits; the folder only has to be one that lasts, since the default lies in the
system's temporary folder. Each combination of PyTorch, Python and device has a folder of its own.
"""

import os
import platform
import re
import shutil
from pathlib import Path

import platformdirs
import torch

LIMIT = 8 * 2**30  # bytes over all folders


def use(given: str | None, device: torch.device) -> Path:
    """Tell PyTorch where to keep compiled code; returns the folder. What the environment says wins."""
    folder = Path(given) if given else default_root() / key(device)
    for name, inner in (("TORCHINDUCTOR_CACHE_DIR", folder), ("TRITON_CACHE_DIR", folder / "triton")):
        os.environ.setdefault(name, str(inner))
    used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    used.mkdir(parents=True, exist_ok=True)
    if not given and used == folder:
        prune(default_root(), keep=folder)
    return used


def default_root() -> Path:
    """The user's own cache folder for compiled code of all kinds. Short, as Windows ends paths at 260."""
    return platformdirs.user_cache_path("kohya", appauthor=False) / "compile"


def key(device: torch.device) -> str:
    """What compiled code depends on besides the code itself."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() or "cpu"
    python = "".join(map(str, platform.python_version_tuple()[:2]))
    return re.sub(r"[^\w.]+", "-", f"{torch.__version__}-py{python}-{name}").lower()


def size(folder: Path) -> int:
    """Bytes in a folder. Files that vanish meanwhile count nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def prune(root: Path, keep: Path, limit: int = LIMIT) -> None:
    """Remove the folders that were used longest ago until the rest fits into `limit` bytes; never the one in use."""
    os.utime(keep)
    folders = sorted((f for f in root.iterdir() if f.is_dir() and f != keep), key=lambda f: f.stat().st_mtime)
    left = size(keep) + sum(map(size, folders))
    for folder in folders:
        if left <= limit:
            return
        left -= size(folder)
        shutil.rmtree(folder, ignore_errors=True)
