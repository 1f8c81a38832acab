"""The checkpoints directly in a folder: files of one checkpoint count once."""

import re
from pathlib import Path

# What distinguishes the files of one checkpoint: numbers of shards, precisions, and suffixes of the index.
WITHIN_ONE = re.compile(r"-\d{5}-of-\d{5}|[._](fp16|non_ema)(?=[.-])|\.safetensors|\.index|\.json$")
OTHER_PRECISION = re.compile(r"\.fp16|non_ema")


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, each by its index, its first shard or its file, unmarked precisions first."""
    groups: dict[str, list[Path]] = {}
    for pattern in ("*.safetensors.index*.json", "*.safetensors"):
        for path in sorted(folder.glob(pattern)):
            if not path.name.startswith("._"):  # macOS writes these beside each file on foreign disks
                groups.setdefault(WITHIN_ONE.sub("", path.name), []).append(path)
    return sorted(min(paths, key=lambda path: bool(OTHER_PRECISION.search(path.name))) for paths in groups.values())


def version(path: Path) -> tuple[int, int]:
    """Return what changes when a file is replaced: its time and size."""
    about = path.stat()
    return about.st_mtime_ns, about.st_size
