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
from library.config.problems import ConfigError, Message, raise_if_any
from library.config.schema import options_of
from library.families import FAMILIES, RUNS, config_class
from library.files import write_atomic
from library.jobs.jobs import RESULT
from library.jobs.work import JobRecord, begin_work
from library.measuring import candidates
from library.runs import layout

if TYPE_CHECKING:
    from library.bench.subjects import Subject

CHART_FILE = "picture.svg"
ChooseCandidates = Callable[[Sequence[str]], list[candidates.Candidate]]
BENCH_PARTS = (*report.STEP_PARTS, report.SAMPLE)
EXAMPLES = """
kohya bench --family NAME --size full            a model of real size with random weights, on this GPU
kohya bench run.toml                             the training of a TOML, as it is and in other variants
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
    arguments = build_bench_parser().parse_args(argv)
    if arguments.run and arguments.run.is_file() and not arguments.script:
        arguments.script = script_of(arguments.run)
    if arguments.list:
        print("\n".join(listed_candidates()))
        return 0
    check_bench_options(arguments)
    environment.check_cache_variables()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler
    kind = "profile" if arguments.profile else "bench"
    with begin_work(kind, arguments.out) as work, _cold(arguments.fresh):
        work.phase(Message("loading PyTorch"))
        subject = _subject(arguments)
        result = (_profiled if arguments.profile else _measured)(arguments, subject, work)
        if arguments.json:
            print((work.folder / RESULT).read_text(encoding="utf-8"))
    # A failed profile has raised; a benchmark without success has a row for each failure.
    return 0 if arguments.profile or any(row["status"] == "ok" for row in result["results"]) else 1


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
    args.add_argument("--size", choices=("full", "tiny"), help="size of that model (default: full on a GPU, else tiny)")
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
    args.add_argument("--part", action="append", default=[], metavar="PART", help=f"any of {', '.join(BENCH_PARTS)}")
    args.add_argument(
        "--candidate",
        action="append",
        default=[],
        metavar="NAME",
        help="settings to measure, the baseline first, each for its own parts; --list shows all",
    )
    args.add_argument("--resolution", action="append", default=[], metavar="N", help="image sizes: 512,1024,2048")
    args.add_argument("--batch", type=int, metavar="N", help="images per step (default: 1, or the TOML's)")
    args.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="any option of the training")
    args.add_argument("--device", default="auto", help="cuda, cuda:1 or cpu (default: the GPU if there is one)")
    args.add_argument("--steps", type=int, default=20, metavar="N", help="measured repetitions (default: 20)")
    args.add_argument("--warmup", type=int, default=3, metavar="N", help="warm-up repetitions (default: 3)")
    args.add_argument("--seconds", type=float, default=30.0, metavar="S", help="seconds per measurement (default: 30)")
    args.add_argument("--fresh", action="store_true", help="compile with an empty cache, to measure the compile time")
    args.add_argument(
        "--compile-all", action="store_true", help="compile text encoders and VAE too, which training does not"
    )
    args.add_argument("--profile", action="store_true", help="show where the time of a step goes, and what to change")
    args.add_argument("--out", type=Path, metavar="FOLDER", help="folder for the result (default: beside the others)")
    args.add_argument("--json", action="store_true", help="also print the result as JSON")
    args.add_argument("--list", action="store_true", help="list the candidates and exit")
    return args


def listed_candidates() -> Iterator[str]:
    """Yield the lines of --list: settings of a training, and ways to generate."""
    yield from (f"{candidate.name:24} {candidate.about}" for candidate in candidates.ALL)
    yield f'\nwith --part {report.SAMPLE}: {", ".join(candidates.IMAGE_WAYS)}, and "attention KERNEL" for each kernel'


def check_bench_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for all invalid options, before anything is loaded."""
    raise_if_any([*_subject_problems(arguments), *_value_problems(arguments), *_not_together(arguments)])


def _subject_problems(arguments: argparse.Namespace) -> Iterator[str]:
    subjects = [name for name in ("run", "family", "diffusers") if getattr(arguments, name)]
    subjects += ["config"] if arguments.config and not arguments.diffusers else []
    if len(subjects) != 1:
        yield "name one thing to measure: RUN.toml, --family NAME, or --diffusers CLASS --config FILE"
    if arguments.diffusers and not arguments.config:
        yield "--diffusers needs --config FILE, the model's config.json"
    for path in filter(None, (arguments.run, arguments.config)):
        if not path.is_file():
            yield f"{path} is a folder, not a file" if path.is_dir() else f"{path} does not exist"


def _value_problems(arguments: argparse.Namespace) -> Iterator[str]:
    for part in _split_commas(arguments.part):
        if part not in BENCH_PARTS:
            yield f"--part {part} is not a part: choose from {', '.join(BENCH_PARTS)}"
    for side in _split_commas(arguments.resolution):
        if not (side.isascii() and side.isdigit()) or not 64 <= int(side) <= 8192 or int(side) % 64:
            yield f"--resolution {side} must be a multiple of 64 from 64 to 8192"
    for name, least in (("batch", 1), ("steps", 1), ("warmup", 1), ("seconds", 0)):
        if (value := getattr(arguments, name)) is not None and not least <= value < math.inf:
            yield f"--{name} must be at least {least}, got {value}"
    for name in ("set", "input"):
        for text in getattr(arguments, name):
            if not text.partition("=")[0].strip() or "=" not in text:
                yield f"--{name} {text} must read NAME=VALUE"


def _not_together(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield options that conflict with others, or name nothing."""
    if arguments.script and arguments.family and config_class(arguments.script).family != arguments.family:
        scripts = ", ".join(script for script in RUNS if config_class(script).family == arguments.family)
        yield f"--script {arguments.script} is none of --family {arguments.family}: choose from {scripts}"
    if arguments.script and arguments.diffusers:
        yield "--script is for --family and RUN.toml: a transformer of diffusers is trained with LoRA"
    if report.SAMPLE in _split_commas(arguments.part) and arguments.diffusers:
        yield "--part sample is for --family and RUN.toml: images of other transformers are not generated here"
    if arguments.input and (arguments.run or arguments.family):
        yield "--input is for --diffusers: the inputs of our own families are known"
    for name in ("part", "candidate", "resolution"):
        if (values := getattr(arguments, name)) and not _split_commas(values):
            yield f"--{name} {','.join(values)} names nothing: give one or leave it out"
        if arguments.profile and name != "part" and len(_split_commas(values)) > 1:
            yield f"--profile takes exactly one value of --{name}"


def _subject(arguments: argparse.Namespace) -> "Subject":
    # Imported inside functions, as these load PyTorch.
    from library.bench import machine, subjects
    from library.bench.diffusers import model as diffusers_model

    device, shapes = machine.choose_device(arguments.device), _parse_shapes(arguments.input)
    options: JsonObject = dict(text.split("=", 1) for text in arguments.set)
    if device.type == "cuda" and not arguments.run:
        options = {"mixed_precision": machine.half_type(device), **options}
    if arguments.batch:
        options["train_batch_size"] = arguments.batch
    if arguments.run:
        return subjects.subject_of_run(arguments.run, arguments.script, options)
    if arguments.family:
        size = arguments.size or ("full" if device.type == "cuda" else "tiny")
        return subjects.FamilySubject(arguments.script or families.lora_script(arguments.family), options, size)
    config = diffusers_model.read_config(arguments.config)
    name = arguments.diffusers or config.get("_class_name")
    if not name:
        raise ConfigError("{config} does not name its class: give it with --diffusers CLASS", config=arguments.config)
    return diffusers_model.DiffusersSubject(str(name), config, options, shapes)


def _measured(arguments: argparse.Namespace, subject: "Subject", work: JobRecord) -> JsonMapping:
    from library.bench import images, machine, measure
    from library.measuring import timing

    device = machine.choose_device(arguments.device)
    parts, names = _split_commas(arguments.part) or report.STEP_PARTS, _split_commas(arguments.candidate)

    def choose(chosen_names: Sequence[str]) -> list[candidates.Candidate]:
        return candidates.choose_candidates(chosen_names, bool(arguments.run), device.type, _options(subject))

    settings, ways = choose(names) if report.SAMPLE not in parts else [], None
    if report.SAMPLE in parts:
        trains = report.STEP in parts or report.BLOCKS in parts
        settings, ways = choose_ways(names, choose, [*images.image_ways(device)], trains)
    sizes = tuple(int(side) for side in _split_commas(arguments.resolution)) or subject.resolutions
    plan = timing.TimingPlan(arguments.steps, arguments.warmup, arguments.seconds)
    say = (lambda text: None) if arguments.json else functools.partial(print, flush=True)
    bench = measure.BenchRun(
        subject,
        device,
        settings,
        tuple(parts),
        sizes,
        plan,
        arguments.compile_all,
        say,
        ways,
    )
    try:
        return bench.run(work)
    finally:
        if bench.rows:
            _show(work.folder, say)


def choose_ways(
    names: Sequence[str], choose: ChooseCandidates, known_ways: Sequence[str], trains: bool
) -> tuple[list[candidates.Candidate], list[str]]:
    """Return the settings for steps, and the ways to generate, of the names of --candidate; each part measures its own.

    `choose` returns the settings of some names, `known_ways` are those of this device, and `trains` is whether steps
    are measured, too. Raises ConfigError for names that no part knows, and for a part without a name.
    """
    if not names or [*names] == [candidates.ALL_NAMES]:
        return choose(names), [*known_ways]
    ways = [name for name in dict.fromkeys(names) if name in known_ways]
    if not trains:
        unknown = [name for name in dict.fromkeys(names) if name not in known_ways]
        why = "is not for generating images"
        raise_if_any(candidates.unknown_name(name, known_ways, candidates.IMAGE_WAYS, why) for name in unknown)
        return [], ways
    for_steps = {*candidates.NAMED, candidates.OWN_SETTINGS}
    of_steps = [name for name in names if name in for_steps or name not in known_ways]
    chosen = choose(of_steps) if of_steps else []
    if not chosen or not ways:
        template = "--candidate {names} has no variant for --part {part}; add one of {possible}"
        part, possible = ("sample", known_ways) if chosen else ("step", [candidate.name for candidate in choose([])])
        raise ConfigError(template, names=",".join(names), part=part, possible=", ".join(possible))
    return chosen, ways


def _show(folder: Path, say: Any) -> None:
    """Write table and image of the result file, complete or not."""
    result = layout.load_facts(folder / RESULT)
    if not result:
        return
    text = report.measurements_table(result)
    write_atomic(folder / "table.txt", text + "\n")
    write_atomic(folder / CHART_FILE, chart.svg(result))
    say(f"\n{text}\n\n{folder}")


def _profiled(arguments: argparse.Namespace, subject: "Subject", work: JobRecord) -> JsonMapping:
    from library.bench import machine, profiling

    device = machine.choose_device(arguments.device)
    usual = candidates.OWN_SETTINGS if arguments.run else "compiled" if device.type == "cuda" else "eager"
    candidate = candidates.choose_candidates(
        arguments.candidate or [usual], bool(arguments.run), device.type, _options(subject)
    )[0]
    side = int((_split_commas(arguments.resolution) or [min(1024, max(subject.resolutions))])[0])
    content = profiling.profile_training(
        subject, candidate, device, side, min(arguments.steps, profiling.MAX_PROFILED_STEPS), work
    )
    work.store(content)
    text = profile_advice.profile_text(content)
    write_atomic(work.folder / "table.txt", text + "\n")
    if not arguments.json:
        print(f"{text}\n\n{work.folder / profiling.TRACE} can be opened at ui.perfetto.dev or chrome://tracing")
    return content


def _options(subject: "Subject") -> Sequence[str]:
    return list(options_of(type(subject.config({}))))


def _parse_shapes(texts: Sequence[str]) -> JsonObject:
    """Parse NAME=1,16,64 as a shape, and frames=5 as a number."""
    shapes: JsonObject = {}
    for text in texts:
        name, _, sizes = text.partition("=")
        number = name in ("frames", "text_length")
        if not re.fullmatch("[1-9][0-9]*" if number else "[1-9][0-9]*(,[1-9][0-9]*)*", sizes):
            expected = f"sizes separated by commas: {name}=1,16,64"
            if number:
                expected = f"a whole number of at least 1: {name}=5"
            raise ConfigError("--input {text} must be {wanted}", text=text, wanted=expected)
        shapes[name] = int(sizes) if number else tuple(int(size) for size in sizes.split(","))
    return shapes


@contextlib.contextmanager
def _cold(is_requested: bool) -> Iterator[None]:
    """Use an empty compile cache, if requested."""
    if not is_requested:
        yield
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "triton")
        yield


def _split_commas(texts: Sequence[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]
