"""Disk space and write permission, for the doctor."""

import shutil
import tempfile
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from library.compiler import cache
from library.config.problems import Message
from library.doctor.finding import MachineFinding, bad, hint, ok
from library.files import nearest_existing
from library.runs.registry import data_folder

FREE_SPACE, MIN_SPACE = 20.0, 1.0  # GB; caches, samples and a few checkpoints of a small run; one LoRA file


def check_disk() -> MachineFinding:
    """Report free space of the current folder."""
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    if free < MIN_SPACE:
        template = "{size} GB free in {folder}: nothing can be saved; free some space"
        return bad("disk", Message(template, size=f"{free:.2f}", folder=Path.cwd()), free_gb=round(free, 2))
    values = {"size": f"{free:.0f}", "folder": Path.cwd()}
    if free < FREE_SPACE:
        template = "{size} GB free in {folder}; checkpoints and caches soon need more"
        return hint("disk", Message(template, **values), free_gb=round(free, 1))
    return ok("disk", Message("{size} GB free in {folder}", **values), free_gb=round(free, 1))


def check_folders() -> MachineFinding:
    """Report the folders of downloads, compiled code and the list of runs."""
    where = {"models": HF_HUB_CACHE, "compiled": str(cache.default_root()), "runs": str(data_folder())}
    for path in where.values():
        place = nearest_existing(path)
        if why := _why_unwritable(place) if place else Message("there is no {drive} here", drive=Path(path).anchor):
            template = "{path} cannot be written ({why}); change its owner, or the place it is in"
            return bad("folders", Message(template, path=path, why=why), **where)
    return ok("folders", Message("models in {models}, compiled code in {compiled}, runs in {runs}", **where), **where)


def compiled_code() -> MachineFinding:
    """Report the size of compiled code."""
    root = cache.default_root()
    size = cache.cache_size(root) if root.is_dir() else 0
    template = "{size} GB of compiled code in {folder}"
    if size:
        template = "{size} GB of compiled code in {folder}; kohya cache --clean removes it"
    return ok("cache", Message(template, size=f"{size / 1e9:.2f}", folder=root), folder=str(root), bytes=size)


def _why_unwritable(folder: Path) -> str:
    """Return why no file can be written in a folder, "" if one can."""
    # Really write one, as a full disk has permission but no space.
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(65536))
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""
