"""Compare compiling before the first step with compiling in the background: full-size models, cold caches.

    python -m benchmarks.takeover --family sdxl --steps 60 800 --out takeover.json     # minutes on a GPU
    python -m benchmarks.takeover --ways beside before --steps 1600 --warm             # also with warm caches
    python -m benchmarks.takeover --tiny --ways beside --options compile_blocks=single:0 --family flux  # a quick trial

Each training starts as a user would start it: a LoRA without checkpointing on three image sizes, with an empty compiler
cache. A row has: seconds until the end of the first step, median seconds per step before and after the takeover, the
step of the takeover, the seconds of this and all earlier pauses, peak memory of the whole GPU, and the wall time from
launch to the saved file.
"""

import argparse
import itertools
import json
import statistics
import sys
import tomllib
from pathlib import Path
from typing import Any

from benchmarks import versus, versus_files
from benchmarks.versus_files import PROJECT_ROOT, VersusCase
from library.runs import reader

TAKEOVER_WAYS = {
    "eager": {"compile": False},
    "before": {"compile": True, "compile_warmup": "true"},
    "auto": {"compile": True, "compile_warmup": "auto"},
    "beside": {"compile": True, "compile_warmup": "beside"},
}
COLUMNS = (
    "way",
    "steps",
    "compiler_cache",
    "first_step_s",
    "before_s",
    "after_s",
    "takeover",
    "pause_s",
    "pauses_s",
    "longest_s",
    "gib",
    "wall_s",
    "loss",
    "said",
    "failed",
)


def run_takeover(case: VersusCase, work: Path, limit: float) -> dict[str, Any]:
    """Run one training; return its figures and the takeover from its record."""
    ours = versus.Program(versus.THIS_TRAINER, PROJECT_ROOT, PROJECT_ROOT / "sd-scripts", sys.executable)
    row = versus.run_program(ours, case, work, limit)
    row.pop("file", None)
    (folder,) = (work / versus.THIS_TRAINER.replace(" ", "-") / "out" / "runs").glob("*")
    events = reader.read_events(folder)
    steps = {event["step"]: event.get("compute_s") for event in events if event["kind"] == "step"}
    (takeover,) = [event for event in events if event["kind"] == "takeover"] or [{}]
    switched = takeover.get("step", 0)
    for name, wanted in (("before_s", range(4, switched or 10**9)), ("after_s", range(switched + 6, 10**9))):
        timed = [seconds for step, seconds in steps.items() if step in wanted and seconds is not None]
        if timed and (name == "before_s" or switched):
            row[name] = round(statistics.median(timed), 4)
    if takeover:
        pauses = takeover["pauses"]
        row |= {"takeover": switched, "pause_s": round(takeover["seconds"], 2)}
        row |= {"pauses_s": round(sum(pauses), 2), "longest_s": round(max(pauses), 2)}
    log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    telling = ("eager", "take over", "CUDA graphs", "ompiled")
    row["said"] = [line for line in log if any(word in line for word in telling)]
    return row


def parse_option(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE; a value that is not valid TOML is text."""
    name, _, value = text.partition("=")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def main(arguments: list[str] | None = None) -> int:
    """Run all ways; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=("sdxl", "flux"), default="sdxl")
    parser.add_argument("--ways", nargs="+", choices=TAKEOVER_WAYS, default=["before", "auto"])
    parser.add_argument("--steps", nargs="+", type=int, default=[60, 800])
    parser.add_argument("--warm", action="store_true", help="run all ways again with warm caches")
    parser.add_argument("--options", nargs="*", default=[], metavar="NAME=VALUE", help="TOML options for all ways")
    parser.add_argument("--tiny", action="store_true", help="tiny models: a quick trial, not a measurement")
    parser.add_argument("--limit", type=float, default=500, help="time limit per training in seconds")
    parser.add_argument("--work", type=Path, default=Path("takeover"), help="folder for models, images and results")
    parser.add_argument("--out", type=Path, help="JSON file for all rows")
    args = parser.parse_args(arguments)
    work, rows = args.work.resolve(), []
    versus_files.make_versus_inputs(work / "inputs", {args.family}, args.tiny)
    values = dict(map(parse_option, args.options))
    for steps, cache in itertools.product(args.steps, ("cold", "warm") if args.warm else ("cold",)):
        plain = versus_files.plain_case(args.family, args.tiny, steps)
        for way in args.ways:
            options = {**plain.options, **TAKEOVER_WAYS[way], **values}
            case = VersusCase(args.family, "lora", f"{way} {steps}", options, ())
            row = {"way": way, "steps": steps, "compiler_cache": cache, **run_takeover(case, work, args.limit)}
            rows.append({name: row.get(name) for name in COLUMNS})
            print(json.dumps(rows[-1], indent=1), flush=True)
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
