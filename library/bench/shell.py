"""`kohya bench`: time a model's parts and its training step with several settings, or profile a step.

Validates the options before importing anything heavy.
"""

import argparse
import contextlib
import functools
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from library import families
from library.bench import chart, profile_advice, report
from library.config import environment
from library.config.arguments import Arguments
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message
from library.config.schema import options_of
from library.families import FAMILIES, RUNS, config_class
from library.files import write_atomic
from library.jobs.job import RESULT
from library.jobs.work import JobRecord, begin_work
from library.measuring import candidates
from library.runs import layout

if TYPE_CHECKING:
    from library.bench.subjects import Subject

PICTURE = "picture.svg"
EXAMPLES = """
kohya bench --family NAME --size full            a model of real size with random weights, on this GPU
kohya bench run.toml                             the training of a TOML, as it is and in other ways
kohya bench --family NAME --resolution 1024 --part step --candidate eager,compiled --batch 4
kohya bench --diffusers QwenImageTransformer2DModel --config config.json --part step
kohya bench run.toml --profile                   where the time of its steps goes

The result goes into a folder with result.json, table.txt and picture.svg; docs/bench.md explains them.
"""


def main(argv: Sequence[str], script_of: Callable[[Path], str]) -> int:
    """Run the command; return 0 if everything was measured. Raises ConfigError for invalid options, KeyboardInterrupt
    when stopped.

    `script_of` returns the script of a TOML.
    """
    asked = build_bench_parser().parse_args(argv)
    if asked.run and asked.run.is_file() and not asked.script:
        asked.script = script_of(asked.run)
    if asked.list:
        print("\n".join(f"{c.name:24} {c.about}" for c in candidates.ALL))
        return 0
    check_bench_options(asked)
    environment.check_cache_variables()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler
    kind = "profile" if asked.profile else "bench"
    with begin_work(kind, asked.out) as work, _cold(asked.fresh):
        work.phase(Message("loading PyTorch"))
        subject = _subject(asked)
        found = (_profiled if asked.profile else _measured)(asked, subject, work)
        if asked.json:
            print((work.folder / RESULT).read_text(encoding="utf-8"))
    # A failed profile has raised; a benchmark without success has a row for each failure.
    return 0 if asked.profile or any(row["status"] == "ok" for row in found["results"]) else 1


def build_bench_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    args = Arguments(
        "kohya bench",
        description="Measure this machine with a model.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    args.add_argument(
        "run", nargs="?", type=Path, metavar="RUN.toml", help="measure the training that a TOML describes"
    )
    args.add_argument("--family", choices=FAMILIES, help="measure a model with random weights")
    args.add_argument("--size", choices=("full", "tiny"), help="of such a model (default: full on a GPU, else tiny)")
    args.add_argument("--script", help="the kind of training (default: the family's LoRA; for a TOML, guessed from it)")
    args.add_argument("--diffusers", metavar="CLASS", help="measure a transformer of diffusers with random weights")
    args.add_argument("--config", type=Path, metavar="FILE", help="its config.json, which may also name the class")
    args.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=SIZES",
        help="the shape of an input whose name is unknown; also frames=N, text_length=N",
    )
    args.add_argument(
        "--part", action="append", default=[], metavar="PART", help=f"any of {', '.join(report.STEP_PARTS)}"
    )
    args.add_argument(
        "--candidate",
        action="append",
        default=[],
        metavar="NAME",
        help="ways to run it, the baseline first; --list shows all",
    )
    args.add_argument(
        "--resolution", action="append", default=[], metavar="N", help="sides of the images: 512,1024,2048"
    )
    args.add_argument("--batch", type=int, metavar="N", help="images of a step (default: 1, or the TOML's)")
    args.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="any option of the training")
    args.add_argument("--device", default="auto", help="cuda, cuda:1 or cpu (default: the GPU where there is one)")
    args.add_argument("--steps", type=int, default=20, metavar="N", help="measured repetitions (default: 20)")
    args.add_argument("--warmup", type=int, default=3, metavar="N", help="repetitions before them (default: 3)")
    args.add_argument("--seconds", type=float, default=30.0, metavar="S", help="most for one measurement (default: 30)")
    args.add_argument("--fresh", action="store_true", help="compile with an empty cache, to see how long that takes")
    args.add_argument(
        "--compile-all", action="store_true", help="compile text encoders and VAE too, which training does not"
    )
    args.add_argument("--profile", action="store_true", help="see where the time of a step goes, and what to change")
    args.add_argument("--out", type=Path, metavar="FOLDER", help="where the result goes (default: with the other ones)")
    args.add_argument("--json", action="store_true", help="print the result as JSON too")
    args.add_argument("--list", action="store_true", help="list the candidates and exit")
    return args


def check_bench_options(asked: argparse.Namespace) -> None:
    """Raise ConfigError for all invalid options, before anything is loaded."""
    wrong = []
    named = [name for name in ("run", "family", "diffusers") if getattr(asked, name)]
    named += ["config"] if asked.config and not asked.diffusers else []
    if len(named) != 1:
        wrong.append("name one thing to measure: RUN.toml, --family NAME, or --diffusers CLASS --config FILE")
    if asked.diffusers and not asked.config:
        wrong.append("--diffusers needs --config FILE, the model's config.json")
    for path in filter(None, (asked.run, asked.config)):
        if not path.is_file():
            wrong.append(f"{path} is a folder, not a file" if path.is_dir() else f"{path} does not exist")
    wrong += [
        f"--part {part} is no part: choose from {', '.join(report.STEP_PARTS)}"
        for part in _split_commas(asked.part)
        if part not in report.STEP_PARTS
    ]
    for side in _split_commas(asked.resolution):
        if not (side.isascii() and side.isdigit()) or not 64 <= int(side) <= 8192 or int(side) % 64:
            wrong.append(f"--resolution {side} must be a multiple of 64 from 64 to 8192")
    for name, least in (("batch", 1), ("steps", 1), ("warmup", 1), ("seconds", 0)):
        if (value := getattr(asked, name)) is not None and not least <= value < math.inf:
            wrong.append(f"--{name} must be at least {least}, got {value}")
    wrong += [
        f"--{name} {text} must read NAME=VALUE"
        for name in ("set", "input")
        for text in getattr(asked, name)
        if not text.partition("=")[0].strip() or "=" not in text
    ]
    wrong += _not_together(asked)
    if wrong:
        raise ConfigError(*wrong)


def _not_together(asked: argparse.Namespace) -> Iterator[str]:
    """Yield options that conflict with others, or name nothing."""
    if asked.script and asked.family and config_class(asked.script).family != asked.family:
        own = ", ".join(script for script in RUNS if config_class(script).family == asked.family)
        yield f"--script {asked.script} is none of --family {asked.family}: choose from {own}"
    if asked.script and asked.diffusers:
        yield "--script is for --family and RUN.toml: a transformer of diffusers is trained with LoRA"
    if asked.input and (asked.run or asked.family):
        yield "--input is for --diffusers: what our own families are called with is known"
    for name in ("part", "candidate", "resolution"):
        if (given := getattr(asked, name)) and not _split_commas(given):
            yield f"--{name} {','.join(given)} names nothing: give one or leave it out"
        if asked.profile and name != "part" and len(_split_commas(given)) > 1:
            yield f"--profile looks at one way at one size: give --{name} one only"


def _subject(asked: argparse.Namespace) -> "Subject":
    from library.bench import machine, subjects
    from library.bench.diffusers import model as diffusers_model

    device, shapes = machine.choose_device(asked.device), _parse_shapes(asked.input)
    arguments: JsonObject = dict(text.split("=", 1) for text in asked.set)
    if device.type == "cuda" and not asked.run:
        arguments = {"mixed_precision": machine.half_type(device), **arguments}
    if asked.batch:
        arguments["train_batch_size"] = asked.batch
    if asked.run:
        return subjects.subject_of_run(asked.run, asked.script, arguments)
    if asked.family:
        size = asked.size or ("full" if device.type == "cuda" else "tiny")
        return subjects.FamilySubject(asked.script or families.lora_script(asked.family), arguments, size)
    config = diffusers_model.read_config(asked.config)
    name = asked.diffusers or config.get("_class_name")
    if not name:
        raise ConfigError("{config} does not name its class: give it with --diffusers CLASS", config=asked.config)
    return diffusers_model.DiffusersSubject(str(name), config, arguments, shapes)


def _measured(asked: argparse.Namespace, subject: "Subject", work: JobRecord) -> JsonMapping:
    from library.bench import machine, measure
    from library.measuring import timing

    device = machine.choose_device(asked.device)
    ways = candidates.choose_candidates(asked.candidate, bool(asked.run), device.type, _options(subject))
    sizes = tuple(int(side) for side in _split_commas(asked.resolution)) or subject.resolutions
    plan = timing.TimingPlan(asked.steps, asked.warmup, asked.seconds)
    say = (lambda text: None) if asked.json else functools.partial(print, flush=True)
    bench = measure.BenchRun(
        subject,
        device,
        ways,
        tuple(_split_commas(asked.part)) or report.STEP_PARTS,
        sizes,
        plan,
        asked.compile_all,
        say,
    )
    try:
        return bench.run(work)
    finally:
        if bench.rows:
            _show(work.folder, say)


def _show(folder: Path, say: Any) -> None:
    """Write table and image of the result file, complete or not."""
    result = layout.load_facts(folder / RESULT)
    if not result:
        return
    text = report.measurements_table(result)
    write_atomic(folder / "table.txt", text + "\n")
    write_atomic(folder / PICTURE, chart.svg(result))
    say(f"\n{text}\n\n{folder}")


def _profiled(asked: argparse.Namespace, subject: "Subject", work: JobRecord) -> JsonMapping:
    from library.bench import machine, profiling

    device = machine.choose_device(asked.device)
    usual = candidates.OWN_SETTINGS if asked.run else "compiled" if device.type == "cuda" else "eager"
    way = candidates.choose_candidates(asked.candidate or [usual], bool(asked.run), device.type, _options(subject))[0]
    side = int((_split_commas(asked.resolution) or [min(1024, max(subject.resolutions))])[0])
    found = profiling.profile_training(subject, way, device, side, min(asked.steps, profiling.MOST_STEPS), work)
    work.store(found)
    text = profile_advice.profile_text(found)
    write_atomic(work.folder / "table.txt", text + "\n")
    if not asked.json:
        print(f"{text}\n\n{work.folder / profiling.TRACE} can be opened at ui.perfetto.dev or chrome://tracing")
    return found


def _options(subject: "Subject") -> Sequence[str]:
    return list(options_of(type(subject.config({}))))


def _parse_shapes(given: Sequence[str]) -> JsonObject:
    """Parse NAME=1,16,64 as a shape, and frames=5 as a number."""
    shapes: JsonObject = {}
    for text in given:
        name, _, sizes = text.partition("=")
        number = name in ("frames", "text_length")
        if not re.fullmatch("[1-9][0-9]*" if number else "[1-9][0-9]*(,[1-9][0-9]*)*", sizes):
            wanted = f"a whole number from 1 on: {name}=5" if number else f"sizes with commas between: {name}=1,16,64"
            raise ConfigError("--input {text} must be {wanted}", text=text, wanted=wanted)
        shapes[name] = int(sizes) if number else tuple(int(size) for size in sizes.split(","))
    return shapes


@contextlib.contextmanager
def _cold(wanted: bool) -> Iterator[None]:
    """Use an empty compile cache, if requested."""
    if not wanted:
        yield
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "triton")
        yield


def _split_commas(given: Sequence[str]) -> list[str]:
    return [part.strip() for text in given for part in text.split(",") if part.strip()]
