"""Run this trainer and others on the same TOML and files, each in its own environment, and compare them.

    python -m benchmarks.versus --rival sd-scripts=../sd-scripts:../sd-scripts/venv/bin/python --out results
    python -m benchmarks.versus --family sdxl --kind lora --cases checkpointing recorded --steps 60
    python -m benchmarks.versus --rival musubi=../musubi-tuner:../musubi-tuner/.venv/bin/python --family qwen_image
    python -m benchmarks.versus --tiny --family sdxl            # a quick trial with tiny models, also on a CPU

A rival is NAME=PATH or NAME=PATH:PYTHON: the folder of a checkout of sd-scripts or musubi-tuner with its scripts
(`flux_train_network.py` and so on), and the Python with its packages, by default this one. musubi-tuner gets the
options in its own TOML format, a data set file, and random caches, which this trainer reads as well. Models are
full-size with random weights; there are 12 images of three sizes. Every training starts as a user would start it, in a
separate process measured from outside: seconds per step over the second half of the steps, from its printed lines; peak
memory of the whole GPU; seconds until the end of the first step; wall time from launch to the saved file. Each program
has its own copy of the images, so its first case of a family makes the caches (marked *). Each case compiles with an
empty cache.

OUT.json has everything, OUT.md the table: a row for each program and case, with the reason if the program failed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import versus_files, versus_measure
from benchmarks.versus_files import PROJECT_ROOT, VersusCase

THIS_TRAINER = "this trainer"
TABLE_HEAD = ("case", "program", "s/it", "x", "GiB", "first step s", "wall s", "loss", "file, beside this trainer's")
Row = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """A trainer: the folders of its checkout and its scripts, and its Python."""

    name: str
    folder: Path
    scripts: Path
    python: str

    @property
    def source(self) -> Path | None:
        package = self.folder / "src"
        return package if (package / "musubi_tuner").is_dir() else None

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Parse a rival of the command line. Raises ValueError."""
        name, _, places = text.partition("=")
        cuts = [i for i, letter in enumerate(places) if letter == ":"]
        # Windows paths contain colons, so split only where both sides exist.
        pairs = [(places, sys.executable), *((places[:i], places[i + 1 :]) for i in cuts)]
        for folder, python in pairs:
            if name and folder and Path(folder).is_dir() and (shutil.which(python) or Path(python).is_file()):
                path = Path(folder).resolve()
                return cls(name, path, path, python if shutil.which(python) else str(Path(python).absolute()))
        raise ValueError(f"--rival {text}: use NAME=PATH or NAME=PATH:PYTHON, a folder and a Python that exist")

    def environment(self, work: Path, case: str) -> dict[str, str]:
        """Return an environment with its own packages only, no network, and compiler caches of this case only."""
        own = work / "caches" / self.name.replace(" ", "-") / case.replace(" ", "-")
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("KOHYA_", "ACCELERATE_"))
        }
        inherited.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise each process compiles all imported sources
        path = os.environ.get("PYTHONPATH", "") if self.name == THIS_TRAINER else ""
        return {
            **inherited,
            "PYTHONPATH": os.pathsep.join([str(self.source or self.folder), *filter(None, [path])]),
            "PYTHONUNBUFFERED": "1",
            "PYTHONIOENCODING": "utf-8",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "KOHYA_HOME": str(work / "home"),
            "XDG_CACHE_HOME": str(own),
            "TORCHINDUCTOR_CACHE_DIR": str(own / "inductor"),
            "TRITON_CACHE_DIR": str(own / "triton"),
        }

    def script_of(self, case: VersusCase) -> Path:
        name = versus_files.MUSUBI_SCRIPTS.get(case.script, case.script) if self.source else case.script
        return self.scripts / f"{name}.py"

    def lacks(self, case: VersusCase) -> str:
        """Return the script or options that it lacks for a case, "" if none. sd-scripts itself ignores unknown
        options."""
        script = self.script_of(case)
        if not script.is_file():
            return f"has no {script.name}"
        if self.name == THIS_TRAINER:
            return ""
        sources = [*self.folder.glob("*.py"), *self.folder.glob("library/*.py"), *self.folder.glob("src/*/**/*.py")]
        source_text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sources)
        missing = [name for name in case.own if f'"--{name}"' not in source_text]
        return f"has no {', '.join(missing)}" if missing else ""

    def commit(self) -> str:
        """Return the commit of the checkout; "" without git."""
        done = subprocess.run(
            ["git", "-C", str(self.folder), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip()


def run_program(program: Program, case: VersusCase, work: Path, limit: float) -> Row:
    """Run one training of one program; return its measurements and its saved file."""
    row: Row = {"case": case.title, "program": program.name}
    if lacking := program.lacks(case):
        return {**row, "failed": lacking}
    place = work / program.name.replace(" ", "-")
    images, out = place / "images", place / "out"
    if not images.exists():
        shutil.copytree(work / "inputs" / "images", images)
    has_caches = any(images.rglob(f"*{case.family}*.npz")) or versus_files.has_musubi_caches(case.family)
    row["caches"] = "found" if has_caches else "made"
    shutil.rmtree(out, ignore_errors=True)  # of an earlier run: this trainer does not overwrite files
    out.mkdir(parents=True)
    name = case.title.replace(" ", "-")
    command = [
        program.python,
        str(program.script_of(case)),
        "--output_dir",
        str(out),
        "--output_name",
        name,
        "--config_file",
    ]
    if program.source:
        command.append(str(versus_files.write_musubi(case, work, work / "inputs", images)))
    else:
        toml = versus_files.write_toml(case, work, work / "inputs")
        command += [str(toml), "--train_data_dir", str(images)]
        command += ["--control_directory", str(_references(images, work))] if case.shown else []
    steps = int(case.options["max_train_steps"])
    environment = program.environment(work, case.title)
    log = place / f"{name}.log"
    row |= versus_measure.measure_training(command, steps, log, environment, program.folder, limit)
    file = out / f"{name}.safetensors"
    if not file.is_file():
        row.setdefault("failed", "saved no file")
        return row
    return {**row, "file": describe_saved_file(file)}


# ---- saved files


def _references(images: Path, work: Path) -> Path:
    """Return a copy of the images for use as references, which must be separate files."""
    folder = work / "references"
    if not folder.exists():
        shutil.copytree(images, folder, ignore=shutil.ignore_patterns("*.npz", "*.safetensors"))
    return folder


def describe_saved_file(file: Path) -> dict[str, Any]:
    """Return the tensors of a file by name (type and shape), and its metadata keys."""
    from library.families.shared import weights

    tensors = {name: [about["dtype"], list(about["shape"])] for name, about in weights.header_entries(file).items()}
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        metadata = json.loads(opened.read(size)).get("__metadata__", {})
    return {"bytes": file.stat().st_size, "tensors": tensors, "metadata": sorted(metadata)}


def compare_saved_files(file: dict[str, Any], ours: dict[str, Any] | None) -> str:
    """Describe the differences between a file and this trainer's of the same case."""
    if ours is None:
        return ""
    mine, theirs = ours["tensors"], file["tensors"]
    both = mine.keys() & theirs.keys()
    differences = {
        "more tensors": len(theirs.keys() - mine.keys()),
        "tensors missing": len(mine.keys() - theirs.keys()),
        "of another shape": sum(mine[name][1] != theirs[name][1] for name in both),
        "of another type": sum(mine[name][0] != theirs[name][0] for name in both),
        "more metadata": len(set(file["metadata"]) - set(ours["metadata"])),
        "metadata missing": len(set(ours["metadata"]) - set(file["metadata"])),
    }
    summary = ", ".join(f"{number} {title}" for title, number in differences.items() if number)
    return summary or f"the same {len(both)} tensors and metadata"


# ---- the table


def versus_rows(rows: list[Row]) -> Iterator[str]:
    """Return the rows in Markdown; `x` is the first rival's seconds per step divided by the row's."""
    yield f"| {' | '.join(TABLE_HEAD)} |"
    yield "|" + "---|" * len(TABLE_HEAD)
    for row in rows:
        same = [other for other in rows if other["case"] == row["case"]]
        rival = next((other["s_it"] for other in same if other["program"] != THIS_TRAINER and "s_it" in other), None)
        mine = next((other.get("file") for other in same if other["program"] == THIS_TRAINER), None)
        file = compare_saved_files(row["file"], mine) if "file" in row and row["program"] != THIS_TRAINER else ""
        faster = f"{rival / row['s_it']:.2f}" if rival and row.get("s_it") else ""
        mark = "*" if row.get("caches") == "made" else ""
        cells = [
            row["case"],
            row["program"],
            row.get("s_it"),
            faster,
            row.get("gib"),
            row.get("first_step_s"),
            f"{row['wall_s']}{mark}" if "wall_s" in row else None,
            row.get("loss"),
            file,
        ]
        if "failed" in row:
            cells[-1] = f"failed: {row['failed']}".replace("|", "\\|")
        yield f"| {' | '.join('' if cell is None else str(cell) for cell in cells)} |"


def document(results: dict[str, Any]) -> str:
    """Return the machine, the versions and the table."""
    machine = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    lines = [f"Machine: {machine}.", f"{results['steps']} steps; * includes making the caches.", ""]
    for name, about in results["programs"].items():
        packages = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
        lines.append(f"- {name} {about['commit']}: {packages}")
    return "\n".join([*lines, "", *versus_rows(results["rows"])]) + "\n"


def save_results(results: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    out.with_suffix(".md").write_text(document(results), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the cases; return 1 if this trainer failed one that it supports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival", action="append", default=[], metavar="NAME=PATH[:PYTHON]")
    parser.add_argument("--family", nargs="+", choices=versus_files.known_families(), default=["sdxl", "flux"])
    parser.add_argument("--kind", nargs="+", choices=("lora", "full"), default=["lora", "full"])
    parser.add_argument(
        "--cases", nargs="+", metavar="NAME", help=f"only these cases of {versus_files.VERSUS_CASES_FILE.name}"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tiny", action="store_true", help="tiny models: a quick trial, not a measurement")
    parser.add_argument("--limit", type=float, default=900, help="time limit per training in seconds")
    parser.add_argument("--work", type=Path, default=Path("versus"), help="folder for models, images and results")
    parser.add_argument("--out", type=Path, help="OUT.json and OUT.md; default: results in the folder of --work")
    args = parser.parse_args(arguments)
    try:
        programs = [
            Program(THIS_TRAINER, PROJECT_ROOT, PROJECT_ROOT / "sd-scripts", sys.executable),
            *map(Program.parse, args.rival),
        ]
    except ValueError as error:
        parser.error(str(error))
    cases = [
        case
        for case in versus_files.versus_cases(args.tiny, args.steps)
        if case.family in args.family and case.kind in args.kind
    ]
    if unknown := {*(args.cases or ())} - {case.name for case in cases}:
        names = ", ".join(dict.fromkeys(case.name for case in cases))
        parser.error(f"--cases: unknown: {', '.join(sorted(unknown))}; choose from {names}")
    cases = [case for case in cases if not args.cases or case.name in args.cases]
    work, out = args.work.resolve(), args.out or args.work / "results"
    versus_files.make_versus_inputs(work / "inputs", {case.family for case in cases}, args.tiny)
    results: dict[str, Any] = {
        "machine": machine_facts(),
        "steps": args.steps,
        "rows": [],
        "programs": {
            program.name: {
                "commit": program.commit(),
                "versions": versus_measure.versions_of_program(program.python, program.environment(work, "")),
            }
            for program in programs
        },
    }
    for case in cases:
        for program in programs:
            results["rows"].append(run_program(program, case, work, args.limit))
            print([*versus_rows(results["rows"])][-1], flush=True)
            save_results(results, out)
    print(document(results))
    return int(any("failed" in row and row["program"] == THIS_TRAINER for row in results["rows"]))


def machine_facts() -> dict[str, Any]:
    """Describe the machine of the measurements."""
    import platform

    from library.runs.machine import computer_memory, driver_version, read_gpus

    gpus = [gpu.name for gpu in read_gpus()]
    facts = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count() or 0}
    facts |= {"memory": f"{computer_memory()['total']} GiB", "GPU": gpus[0] if gpus else "none"}
    return facts | ({"driver": driver_version()} if gpus else {}) | {"platform": platform.platform()}


if __name__ == "__main__":
    sys.exit(main())
