"""Check whether fast settings train as well as slow ones: small real models learn a new subject with each setting.

    python -m benchmarks.quality --models FOLDER --out FOLDER --workers 14 --gpus 2 --seconds 400
    python -m benchmarks.quality --models FOLDER --out FOLDER --tiny --device cpu    # two settings, few steps
    python -m benchmarks.quality --out FOLDER --report                               # only tables and charts

The models' FOLDER contains `flux` and `sdxl` from `benchmarks.small_model`. Each run is a training by the main function
of its script in sd-scripts, in a process forked from one that has loaded PyTorch. Finished runs go to
`runs-FAMILY.jsonl`; a second start runs only missing and failed ones. See docs/dev/quality.md.
"""

import argparse
import functools
import importlib
import itertools
import multiprocessing
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

from benchmarks import quality_report
from benchmarks.online import free_port
from benchmarks.small_model.pretrain import FAMILIES, GUIDANCE
from benchmarks.versus_measure import last_words
from library.config.formats import toml_value
from library.demo import zorb
from library.demo.zorb import SIDE

THING = zorb.NAME  # a word of the tokenizers that is in no pretraining image
TRAINED = ("white", "blue", "green", "pink", "yellow", "gray")  # backgrounds of the training images, two each
UNSEEN = ("orange", "purple", "black", "brown")  # those of the held-out images, two each
POSES = (zorb.STANDS, zorb.WAVES, zorb.CHEERS, zorb.LEANS, zorb.POINTS, zorb.JUMPS)
EPOCHS = 4  # a run has as many held-out losses: full trainings validate after each epoch
# A prompt, the seed of its noise, and the background of the reference drawings of the new subject.
QUALITY_PROMPTS = (
    (f"{THING} emoji on a blue ground", 1, "blue"),
    (f"{THING} emoji on a blue ground", 2, "blue"),
    (f"{THING} emoji on a purple ground", 3, "purple"),
    (f"{THING} emoji on a purple ground", 4, "purple"),
    ("red apple emoji on a white ground", 5, ""),
    ("cat face emoji on a blue ground", 6, ""),
)
METHODS = {"lora": "_train_network", "full": "_train"}  # suffix of the script's name
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PRETRAINING_ONLY = {"learning_rate", "text_encoder_batch_size"}  # options of the pretraining that runs do not take over
NUMBERS: tuple[tuple[str, type, float, str], ...] = (
    ("gpus", int, 1, "number of GPUs, which the workers share"),
    ("workers", int, 1, "number of parallel trainings"),
    ("seconds", float, 1e9, "seconds after which no training begins"),
    ("limit", float, 300, "time limit per training in seconds"),
    ("seeds", int, 5, "runs per setting"),
    ("steps", int, 192, "steps per run"),
    ("batch", int, 4, "images per step"),
    ("rate", float, 1e-3, "learning rate of a LoRA"),
    ("full-rate", float, 2e-4, "learning rate of a full fine-tune"),
    ("rank", int, 16, "rank and alpha of a LoRA"),
    ("sample-steps", int, 12, "of each sample picture"),
)


@dataclass(frozen=True)
class Setting:
    """Options of a setting besides the common ones, and the yardstick that it is compared with."""

    name: str
    options: Mapping[str, Any]
    yardstick: str
    lora: Mapping[str, Any]  # further options for a LoRA
    methods: tuple[str, ...]
    processes: int


def settings() -> list[Setting]:
    """Return the settings of quality.toml."""
    variants = []
    for name, options in TABLE["settings"].items():
        own: dict[str, Any] = {"yardstick": "float32", "lora": {}, "methods": tuple(METHODS), "processes": 1}
        own |= {key: value for key, value in options.items() if key in own}
        variants.append(Setting(name, {key: value for key, value in options.items() if key not in own}, **own))
    return variants


@dataclass(frozen=True)
class Job:
    """One run."""

    family: str
    method: str
    setting: Setting
    seed: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.family, self.method, self.setting.name, self.seed

    @property
    def script(self) -> str:
        return self.family + METHODS[self.method]


# ---- training data


@functools.cache  # every run has the same images
def draw_subject(ground: str, number: int) -> Image.Image:
    """Draw the new subject on a background, with pose, place and size derived from the number."""
    random = Random(f"{THING}/{ground}/{number}")
    place = (random.uniform(0.2, 0.8), random.uniform(0.2, 0.8))
    return zorb.draw_scene(zorb.Scene(random.choice(POSES), random.uniform(0.75, 1.0), place, ground, 0))


def write_data(folder: Path, steps: int, batch: int, processes: int) -> None:
    """Write training and held-out images with captions, and a dataset file with which all steps make EPOCHS epochs."""
    tables = []
    for part, grounds in (("train", TRAINED), ("held_out", UNSEEN)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for ground in grounds:
            for number in range(2):
                path = folder / part / f"{ground}-{number}.png"
                draw_subject(ground, number + 100).save(path)
                path.with_suffix(".txt").write_text(f"{THING} emoji on a {ground} ground", encoding="utf-8")
        repeats = 1 if part == "held_out" else steps * batch // (EPOCHS * 2 * len(TRAINED))
        size, share = (4, 1.0) if part == "held_out" else (batch // processes, 0.0)
        lines = {"resolution": [SIDE, SIDE], "batch_size": size, "validation_split": share}
        subset = {"image_dir": str(folder / part), "num_repeats": repeats}
        tables += ["[[datasets]]", *(f"{name} = {toml_value(value)}" for name, value in lines.items())]
        tables += ["[[datasets.subsets]]", *(f"{name} = {toml_value(value)}" for name, value in subset.items())]
    (folder / "data.toml").write_text("\n".join(tables) + "\n", encoding="utf-8")


def options_of(job: Job, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return all options of a run whose files go into `folder`."""
    models = args.models.resolve() / job.family
    own: dict[str, Any] = {"learning_rate": args.full_rate}
    for name in FAMILIES[job.family].keys() - PRETRAINING_ONLY:
        value = FAMILIES[job.family][name]
        own[name] = value.format(folder=models) if isinstance(value, str) else value
    if job.method == "lora":
        own |= {**TABLE["lora"], "learning_rate": args.rate, "network_dim": args.rank, "network_alpha": args.rank}
        own |= job.setting.lora
    return {
        **TABLE["all"],
        **own,
        "dataset_config": str(folder / "data" / "data.toml"),
        "sample_prompts": str(folder / "prompts.txt"),
        "output_dir": str(folder / "out"),
        "output_name": "run",
        "max_train_steps": args.steps,
        "sample_every_n_steps": args.steps,
        "sample_at_first": job.setting.yardstick == job.setting.name,
        "seed": job.seed,
        **job.setting.options,
    }


def write_inputs(job: Job, folder: Path, args: argparse.Namespace) -> Path:
    """Write data, prompts and TOML of a run; return the path of the TOML."""
    write_data(folder / "data", args.steps, args.batch, job.setting.processes)
    tail = f"--w {SIDE} --h {SIDE} --s {args.sample_steps} {GUIDANCE[job.family]}"
    lines = "".join(f"{prompt} --d {seed} {tail}\n" for prompt, seed, _ in QUALITY_PROMPTS)
    (folder / "prompts.txt").write_text(lines, encoding="utf-8")
    path, options = folder / "run.toml", options_of(job, folder, args)
    path.write_text("".join(f"{name} = {toml_value(options[name])}\n" for name in options), encoding="utf-8")
    return path


def why_left_out(job: Job, folder: Path, args: argparse.Namespace) -> str:
    """Return why a job is left out: its options are invalid or have no effect; "" if it can run."""
    from library.cli import train_script
    from library.config.ineffective import ineffective_options
    from library.families import config_class

    if job.setting.processes > max(args.gpus, 1) and args.device == "cuda":
        return f"needs {job.setting.processes} GPUs"
    reading = train_script.read_command_line(
        config_class(job.script), ["--config_file", str(write_inputs(job, folder, args))]
    )
    if reading.problems:
        return "; ".join(map(str, reading.problems))
    own = [*job.setting.options, *(job.setting.lora if job.method == "lora" else ())]
    idle = ineffective_options(reading.config)
    return "; ".join(f"{name} has no effect: {idle[name]}" for name in own if name in idle)


# ---- running


def train(script: str, toml: Path, log: Path, environment: Mapping[str, str]) -> None:
    """Do the same as `python sd-scripts/SCRIPT.py --config_file TOML`. Runs in a child process."""
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(environment)
    from library.cli import train_script
    from library.config import environment as inherited
    from library.families import config_class

    importlib.reload(inherited)  # it was evaluated in the forked process
    sys.argv = [f"{script}.py", "--config_file", str(toml)]
    code: Any = 1
    try:
        code = train_script.main(config_class(script))
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)  # compiler threads may not end


def touch_gpu() -> None:
    """Raise an error if the GPU cannot be used after a fork. Runs in a child process."""
    importlib.import_module("torch").zeros(1, device="cuda")


def start_method(device: str) -> str:
    """Return how to start trainings: "forkserver" if the GPU can be used after a fork, else "spawn"."""
    if sys.platform == "win32":
        return "spawn"
    probe = multiprocessing.get_context("forkserver").Process(target=touch_gpu)
    if device == "cuda":
        probe.start()
        probe.join(120)
        if probe.exitcode:
            print("The GPU cannot be used after a fork: each training loads PyTorch itself.")
            return "spawn"
    return "forkserver"


def start(job: Job, toml: Path, log: Path, gpu: int, args: argparse.Namespace) -> list[BaseProcess]:
    """Start the processes of a run."""
    context, ranks = multiprocessing.get_context(args.way), job.setting.processes
    gpus = ",".join(map(str, range(ranks))) if ranks > 1 else str(gpu)
    shared = {
        "CUDA_VISIBLE_DEVICES": gpus if args.device == "cuda" else "",
        "KOHYA_HOME": str(toml.parent / "home"),
        "TORCHINDUCTOR_CACHE_DIR": str(args.work / "compiled"),
        "TRITON_CACHE_DIR": str(args.work / "compiled" / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    if ranks > 1:
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started: list[BaseProcess] = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
        process = context.Process(target=train, args=(job.script, toml, log, shared | own))
        process.start()
        started.append(process)
    return started


def run(job: Job, gpu: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train once; return the row of figures, or with `failed` the reason why there are none."""
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=args.work))
    row: dict[str, Any] = dict(zip(quality_report.KEY, job.key, strict=True))
    began = time.monotonic()
    try:
        toml, log = write_inputs(job, folder, args), folder / "log.txt"
        processes = start(job, toml, log, gpu, args)
        for process in processes:
            process.join(max(0.1, began + args.limit - time.monotonic()))
        expired = any(process.is_alive() for process in processes)
        for process in processes:
            process.kill()
            process.join()
        text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n") if log.exists() else ""
        if expired or any(process.exitcode for process in processes):
            row["failed"] = f"not done after {args.limit:.0f} s" if expired else last_words(text) or "ended"
            row["log"] = text.splitlines()[-30:]
        else:
            row |= quality_report.collect(folder / "out", len(QUALITY_PROMPTS))
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {**row, "seconds": round(time.monotonic() - began, 1), "signature": signature(args)}


def signature(args: argparse.Namespace) -> str:
    names = ("steps", "batch", "rate", "full_rate", "rank", "sample_steps", "device")
    return " ".join(f"{name}={getattr(args, name)}" for name in names)


def planned_jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Yield all runs: first seeds first, and of these compiled settings first, as recorded ones reuse their graphs."""
    ordered = sorted(
        settings(), key=lambda entry: 2 * (entry.name == "recorded") or 1 - entry.options.get("compile", False)
    )
    parts = range(1, args.seeds + 1), ordered, args.families, args.methods
    for seed, setting, family, method in itertools.product(*parts):
        if method in setting.methods and (not args.settings or setting.name in args.settings):
            yield Job(family, method, setting, seed)


def run_all(args: argparse.Namespace) -> None:
    """Run the missing jobs with `workers` threads until all are done or the time is up."""
    rows = quality_report.read_rows(args.out)
    others = {row["signature"] for row in rows if "left_out" not in row} - {signature(args)}
    if others:
        raise SystemExit(f"{args.out} holds runs with {others.pop()}: choose another folder")
    done = {tuple(row[name] for name in quality_report.KEY) for row in rows if "failed" not in row}
    began, lock, jobs = time.monotonic(), threading.Lock(), queue.SimpleQueue[Job]()
    with tempfile.TemporaryDirectory(dir=args.work) as place:
        for job in planned_jobs(args):
            if job.seed == 1 and (why := why_left_out(job, Path(place), args)):
                quality_report.append(
                    args.out, {**dict(zip(quality_report.KEY, job.key, strict=True)), "left_out": why}
                )
                done |= {(*job.key[:3], seed) for seed in range(1, args.seeds + 1)}
            elif job.key not in done:
                jobs.put(job)
    total, args.way = jobs.qsize(), start_method(args.device)

    def work(number: int) -> None:
        while time.monotonic() - began < args.seconds:
            try:
                job = jobs.get_nowait()
            except queue.Empty:
                return
            row = run(job, number % max(args.gpus, 1), args)
            with lock:
                quality_report.append(args.out, row)
                result = row.get("failed") or f"held-out loss {row['held_out'][-1][1]:.5f}"
                name, spent = " ".join(map(str, job.key)), time.monotonic() - began
                print(f"{spent:.0f} s: {name}: {row['seconds']} s, {result}", flush=True)

    with ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(work, range(args.workers)))
    print(f"{total - jobs.qsize()} of {total} runs in {time.monotonic() - began:.0f} s")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line with derived values."""
    parser = argparse.ArgumentParser(description="Compare the results of fast and slow settings.")
    parser.add_argument("--models", type=Path, help="folder with flux and sdxl, the small models")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--report", action="store_true", help="only write tables and charts of existing results")
    parser.add_argument("--tiny", action="store_true", help="a quick trial: two settings, one seed, few steps")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    for name, kind, default, about in NUMBERS:
        parser.add_argument(f"--{name}", type=kind, default=default, help=about)
    parser.add_argument("--families", nargs="+", choices=[*FAMILIES], default=[*FAMILIES])
    parser.add_argument("--methods", nargs="+", choices=[*METHODS], default=[*METHODS])
    parser.add_argument("--settings", nargs="+", choices=[setting.name for setting in settings()])
    parser.add_argument("--work", type=Path, help="folder for files of running trainings (default: a temporary one)")
    args = parser.parse_args(argv)
    if args.tiny:
        args.seeds, args.steps, args.sample_steps, args.settings = 1, 12, 2, args.settings or ["float32", "bf16"]
    pictures = EPOCHS * 2 * len(TRAINED)
    if args.steps * args.batch % pictures or args.batch % 2:
        parser.error(f"--steps times --batch must be a multiple of {pictures}, and --batch an even number")
    if not args.report and not args.models:
        parser.error("--models is missing")
    args.out.mkdir(parents=True, exist_ok=True)
    args.work = (args.work or Path(tempfile.mkdtemp(prefix="quality-"))).resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if not args.report:
        # One thread each: a thread pool does not survive a fork, and many trainings share the processor.
        os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # leaves the GPU to the forked processes
        if sys.platform != "win32":
            from multiprocessing import forkserver

            multiprocessing.set_forkserver_preload(TABLE["warm"])
            forkserver.ensure_running()  # loads while settings are checked
        quality_report.warn_of_fp8([args.models / family for family in args.families])
        run_all(args)
    references = {
        ground: [draw_subject(ground, number) for number in range(8)] for _, _, ground in QUALITY_PROMPTS if ground
    }
    prompts = [(prompt, references.get(ground, [])) for prompt, _, ground in QUALITY_PROMPTS]
    quality_report.write(args.out, prompts, {setting.name: setting.yardstick for setting in settings()})


if __name__ == "__main__":
    main()
