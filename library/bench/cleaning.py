"""`kohya cache`: how much compiled code is kept between trainings, and making less of it."""

import argparse
import contextlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.bench import jobs, report
from library.config.schema import ConfigError

GB = 1e9


@dataclass(frozen=True)
class Kept:
    """One folder of the cache: a combination of PyTorch, Python and device."""

    path: Path
    bytes: int
    used: float  # when it was used last, in seconds since 1970


def main(argv: Sequence[str] | None = None) -> int:
    """Show the cache, or make it smaller. Raises ConfigError while a training may need it."""
    parser = argparse.ArgumentParser("kohya cache", description="Compiled code that is kept for the next training.")
    parser.add_argument("--clean", action="store_true", help="remove all of it; the next training compiles anew")
    parser.add_argument("--limit", type=float, metavar="GB", help="remove what was used longest ago, down to so much")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    asked = parser.parse_args(argv)
    if asked.limit is not None and asked.limit < 0:
        raise ConfigError(f"--limit must be at least 0, got {asked.limit:g}")
    limit = 0.0 if asked.clean else asked.limit
    with jobs.begin("cache") if jobs.asked_by_page() else contextlib.nullcontext() as work:
        found = show() if limit is None else shrink(limit * GB)
        if work:
            work.store(found)
    print(json.dumps(found, indent=1) if asked.json else text(found))
    return 0


def show() -> dict[str, Any]:
    """What is kept, the newest first."""
    root = _root()
    return {"kind": "cache", "folder": str(root), "finished": True, "removed": 0, "kept": _facts(kept(root))}


def shrink(limit: float) -> dict[str, Any]:
    """Remove the folders that were used longest ago, until the rest fits into so many bytes."""
    from library.runs import reader

    if training := reader.active():
        raise ConfigError(
            f"{training.id} is training and may need its compiled code: stop it, or wait until it has ended"
        )
    root = _root()
    before = kept(root)
    left = sum(folder.bytes for folder in before)
    for folder in reversed(before):
        if left <= limit:
            break
        shutil.rmtree(folder.path, ignore_errors=True)
        left -= folder.bytes
    after = kept(root)
    removed = sum(folder.bytes for folder in before) - sum(folder.bytes for folder in after)
    return {**show(), "removed": removed}


def kept(root: Path) -> list[Kept]:
    """The folders of the cache, the one that was used last first."""
    from library.compile_cache import size

    if not root.is_dir():
        return []
    found = [Kept(path, size(path), path.stat().st_mtime) for path in root.iterdir() if path.is_dir()]
    return sorted(found, key=lambda folder: -folder.used)


def text(found: dict[str, Any]) -> str:
    """The same in words."""
    rows = [[f["name"], f"{f['bytes'] / GB:.2f} GB", f"used {_ago(f['used'])}"] for f in found["kept"]]
    total = sum(folder["bytes"] for folder in found["kept"])
    lines = [f"{total / GB:.2f} GB of compiled code in {found['folder']}", *(report.columns(rows) if rows else ())]
    if found["removed"]:
        lines.append(f"{found['removed'] / GB:.2f} GB removed")
    return "\n".join(lines)


def _facts(folders: Sequence[Kept]) -> list[dict[str, Any]]:
    return [{"name": f.path.name, "bytes": f.bytes, "used": f.used} for f in folders]


def _root() -> Path:
    from library.compile_cache import default_root

    return default_root()


def _ago(moment: float) -> str:
    days = (time.time() - moment) / 86400
    return "today" if days < 1 else f"{days:.0f} day{'s' * (round(days) != 1)} ago"
