"""`kohya cache`: show and reduce compiled code kept between trainings; cache data sets."""

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
from library.jobs.work import join_work
from library.runs import reader

GB = 1e9


def main(argv: Sequence[str] | None = None) -> int:
    """Show the cache, or reduce it; or cache a data set. Raises ConfigError while a training may need it."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in cache_data.SCRIPTS:
        return cache_data.start_caching(argv[0], [*argv[1:]])
    parser = Arguments(
        "kohya cache",
        description="Show or clean the cache of compiled code. kohya cache latents and kohya cache text encode a data "
        "set.",
    )
    text = "encode a data set: kohya cache latents --help"
    parser.add_argument("what", nargs="?", choices=sorted(cache_data.SCRIPTS), help=text)
    parser.add_argument("--clean", action="store_true", help="remove all of it; the next training compiles again")
    text = "keep at most this much, now and after later trainings"
    parser.add_argument("--limit", type=float, metavar="GB", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    arguments = parser.parse_args(argv)
    if arguments.what:
        parser.error(f"{arguments.what} comes first: kohya cache {arguments.what} --help")
    if arguments.limit is not None and not 0 <= arguments.limit < math.inf:
        raise ConfigError("--limit must be at least 0, got {limit}", limit=f"{arguments.limit:g}")
    with join_work("cache") as work:
        changes = arguments.clean or arguments.limit is not None
        cache_facts = _reduce_cache(arguments.clean, arguments.limit) if changes else describe_cache()
        work.store(cache_facts)
    print(json.dumps(cache_facts, indent=1) if arguments.json else cache_text(cache_facts))
    return 0


def describe_cache() -> JsonObject:
    """Return the kept code, the last used folder first, and the limit."""
    from library.compiler import cache

    root = cache.default_root()
    folders = [
        {"name": name, "bytes": size, "used": (root / name).stat().st_mtime}
        for name, size in cache.cache_folders(root).items()
    ]
    limit_bytes = cache.cache_limit(root)
    return {"kind": "cache", "folder": str(root), "finished": True, "removed": 0, "limit": limit_bytes, "kept": folders}


def _reduce_cache(clean: bool, limit: float | None) -> JsonObject:
    """Delete all, or the least recently used until the limit is met."""
    from library.compiler import cache

    if training := reader.active():
        raise ConfigError(
            "{run} is training and may be compiling: stop it, or wait until it has ended", run=training.name
        )
    before = sum(folder["bytes"] for folder in describe_cache()["kept"])
    if limit is not None:
        cache.limit_cache(int(limit * GB))
    if clean:
        cache.clean_cache()
    after = describe_cache()
    return after | {"removed": before - sum(folder["bytes"] for folder in after["kept"])}


def cache_text(facts: JsonObject) -> str:
    """Return the same in words."""
    rows = []
    for folder in facts["kept"]:
        days = (time.time() - folder["used"]) / 86400
        used = "used today" if days < 1 else f"used {days:.0f} day{'s' * (round(days) != 1)} ago"
        rows.append([folder["name"], f"{folder['bytes'] / GB:.2f} GB", used])
    total = sum(folder["bytes"] for folder in facts["kept"])
    first = f"{total / GB:.2f} GB of compiled code in {facts['folder']}, at most {facts['limit'] / GB:.1f} GB"
    lines = [first, *(report.align_columns(rows) if rows else ())]
    if facts["removed"]:
        lines.append(f"{facts['removed'] / GB:.2f} GB removed")
    return "\n".join(lines)
