"""Whether there is room on the disk, and whether what trainings write can be written; for the doctor."""

import shutil
import tempfile
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from library.compiler import cache
from library.doctor.finding import MachineFinding, bad, hint, ok
from library.runs.registry import home

FREE_SPACE, LEAST_SPACE = 20.0, 1.0  # GB; caches, samples and a few checkpoints of a small run; one LoRA file


def disk() -> MachineFinding:
    """Free space where one works."""
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    text = f"{free:.0f} GB free in {Path.cwd()}"
    if free < LEAST_SPACE:
        return bad(
            "disk", f"{free:.2f} GB free in {Path.cwd()}: nothing can be saved; make room", free_gb=round(free, 2)
        )
    if free < FREE_SPACE:
        return hint("disk", f"{text}; checkpoints and caches soon need more", free_gb=round(free, 1))
    return ok("disk", text, free_gb=round(free, 1))


def folders() -> MachineFinding:
    """Where downloads, compiled code and the list of runs are kept."""
    where = {"models": HF_HUB_CACHE, "compiled": str(cache.default_root()), "runs": str(home())}
    for path in where.values():
        place = Path(path)
        while not place.exists():
            place = place.parent
        if why := _unwritable(place):
            return bad("folders", f"{path} cannot be written ({why}); change its owner, or the place it is in", **where)
    return ok("folders", ", ".join(f"{name} in {path}" for name, path in where.items()), **where)


def compiled_code() -> MachineFinding:
    """How much compiled code is kept."""
    root = cache.default_root()
    size = cache.size(root) if root.is_dir() else 0
    text = f"{size / 1e9:.2f} GB of compiled code in {root}" + ("; kohya cache --clean removes it" if size else "")
    return ok("cache", text, folder=str(root), bytes=size)


def _unwritable(folder: Path) -> str:
    """Why no file can be written in a folder, '' if one can: really tried, as a full disk permits and cannot."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(65536))
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""
