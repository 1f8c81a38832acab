"""`kohya cache`: how much compiled code is kept between trainings, and making less of it; caches of data sets."""

import json
import math
import sys
import time
from collections.abc import Sequence

from library.bench import report
from library.cli import cache_data
from library.config.arguments import Arguments
from library.config.json_types import JsonObject
from library.config.problems import ConfigError
from library.jobs.work import joined
from library.runs import reader

GB = 1e9


def main(argv: Sequence[str] | None = None) -> int:
    """Show the cache, or make it smaller; or cache a data set. Raises ConfigError while a training may need it."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in cache_data.SCRIPTS:
        return cache_data.start(argv[0], [*argv[1:]])
    about = "Show or clean the cache of compiled code. kohya cache latents and kohya cache text cache a data set."
    parser = Arguments("kohya cache", description=about)
    parser.add_argument("what", nargs="?", choices=sorted(cache_data.SCRIPTS), help="cache a data set: its own --help")
    parser.add_argument("--clean", action="store_true", help="remove all of it; the next training compiles again")
    parser.add_argument("--limit", type=float, metavar="GB", help="keep at most so much, now and from now on")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    asked = parser.parse_args(argv)
    if asked.what:
        parser.error(f"{asked.what} comes first: kohya cache {asked.what} --help")
    if asked.limit is not None and not 0 <= asked.limit < math.inf:
        raise ConfigError("--limit must be at least 0, got {limit}", limit=f"{asked.limit:g}")
    with joined("cache") as work:
        changes = asked.clean or asked.limit is not None
        found = _less(asked.clean, asked.limit) if changes else show()
        work.store(found)
    print(json.dumps(found, indent=1) if asked.json else text(found))
    return 0


def show() -> JsonObject:
    """What is kept, the folder that was used last first, and how much may be."""
    from library.compiler import cache

    root = cache.default_root()
    kept = [
        {"name": name, "bytes": size, "used": (root / name).stat().st_mtime}
        for name, size in cache.folders(root).items()
    ]
    most = cache.limit(root=root)
    return {"kind": "cache", "folder": str(root), "finished": True, "removed": 0, "limit": most, "kept": kept}


def _less(clean: bool, limit: float | None) -> JsonObject:
    """Remove all, or what was used longest ago until the rest keeps the limit."""
    from library.compiler import cache

    if training := reader.active():
        raise ConfigError(
            "{run} is training and may be compiling: stop it, or wait until it has ended", run=training.id
        )
    before = sum(folder["bytes"] for folder in show()["kept"])
    if limit is not None:
        cache.limit(int(limit * GB))
    if clean:
        cache.clean()
    after = show()
    return after | {"removed": before - sum(folder["bytes"] for folder in after["kept"])}


def text(found: JsonObject) -> str:
    """The same in words."""
    rows = []
    for folder in found["kept"]:
        days = (time.time() - folder["used"]) / 86400
        used = "used today" if days < 1 else f"used {days:.0f} day{'s' * (round(days) != 1)} ago"
        rows.append([folder["name"], f"{folder['bytes'] / GB:.2f} GB", used])
    total = sum(folder["bytes"] for folder in found["kept"])
    first = f"{total / GB:.2f} GB of compiled code in {found['folder']}, at most {found['limit'] / GB:.1f} GB"
    lines = [first, *(report.columns(rows) if rows else ())]
    if found["removed"]:
        lines.append(f"{found['removed'] / GB:.2f} GB removed")
    return "\n".join(lines)
