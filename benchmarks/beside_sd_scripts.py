"""The same LoRA by this trainer and by sd-scripts, on the small models: loss curves and samples side by side.

    python -m benchmarks.beside_sd_scripts MODELS --rival ../sd-scripts --packages FOLDER --out results
    python -m benchmarks.beside_sd_scripts MODELS --rival ../sd-scripts --paired --steps 20 --precision no

MODELS holds the folders `flux` and `sdxl` with the files of benchmarks/small_model, as `small-models` in the folder of
`kohya demo` does. Both trainers get the same files, pictures, TOML, prompts and seeds, each in a process of its own.
sd-scripts has the real models' sizes in its code; sd_scripts_small.py sets those of the files. Packages that only
sd-scripts wants are in the folder of --packages.

Each trainer draws its own order, noise and timesteps, so a step of one curve is no step of the other: compare running
means. With --paired both draw the same numbers, in one picture, from one LoRA: then every step is comparable.

OUT gets beside.json (every loss), beside-curves.png and beside-samples-FAMILY.png.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks import beside_pictures, versus, versus_files, versus_measure
from benchmarks.beside_pictures import OURS, THEIRS, Curve
from benchmarks.sd_scripts_small import PAIRED
from benchmarks.versus_files import PROJECT_ROOT, TOKENIZERS

FAMILIES = {"flux": "FLUX.1", "sdxl": "SDXL"}
FILES = {
    "flux": {
        "pretrained_model_name_or_path": "flux1-dev.safetensors",
        "clip_l": "clip_l.safetensors",
        "t5xxl": "t5xxl.safetensors",
        "ae": "ae.safetensors",
    },
    "sdxl": {"pretrained_model_name_or_path": "sdxl.safetensors"},
}
OWN: dict[str, dict[str, Any]] = {
    "flux": {
        "network_module": "networks.lora_flux",
        "timestep_sampling": "sigmoid",
        "model_prediction_type": "raw",
        "guidance_scale": 1.0,
        "t5xxl_max_token_length": 32,
    },
    "sdxl": {"network_module": "networks.lora", "no_half_vae": True, "sample_sampler": "euler"},
}
COMMON: dict[str, Any] = {
    "resolution": "128,128",
    "caption_extension": ".txt",
    "cache_latents": True,
    "cache_text_encoder_outputs": True,
    "network_dim": 16,
    "network_alpha": 16,
    "network_train_unet_only": True,
    "optimizer_type": "AdamW",
    "lr_scheduler": "constant",
    "max_data_loader_n_workers": 0,
    "save_precision": "float",
    "save_model_as": "safetensors",
    "sdpa": True,
    "seed": 42,
}
COMPARED_PROMPTS = (
    "zorb emoji on a blue ground",
    "zorb emoji on a purple ground",  # a ground that no training picture has
    "red apple emoji on a white ground",
    "cat face emoji on a blue ground",
)
SAMPLE = "--w 128 --h 128 --l 4 --g 1"
REPEATS = 20  # of each picture in an epoch
Row = dict[str, Any]


@dataclass(frozen=True)
class TrainerRuns:
    """Where a comparison runs: the rival's checkout and packages, and the folder for all that is written."""

    rival: Path
    packages: Path | None
    work: Path
    paired: bool

    def environment(self, name: str, case: str) -> dict[str, str]:
        """A trainer's own packages alone; both draw the same numbers where they are compared step by step."""
        program = versus.Program(
            versus.THIS_TRAINER if name == OURS else name, self.folder(name), self.folder(name), ""
        )
        made = program.environment(self.work, case) | ({PAIRED: "1"} if self.paired else {})
        if name == THEIRS:
            made["PYTHONPATH"] = os.pathsep.join(
                str(package_folder) for package_folder in (self.packages, self.rival) if package_folder
            )
        return made

    def folder(self, name: str) -> Path:
        return PROJECT_ROOT if name == OURS else self.rival

    def command(self, name: str, family: str, losses: Path) -> list[str]:
        """How a trainer is started, up to its options."""
        script = f"{family}_train_network"
        if name == THEIRS:
            launcher = PROJECT_ROOT / "benchmarks" / "sd_scripts_small.py"
            return [sys.executable, str(launcher), str(self.rival), script, str(losses)]
        paired = [str(PROJECT_ROOT / "benchmarks" / "paired_draws.py")] if self.paired else []
        return [sys.executable, *paired, str(PROJECT_ROOT / "sd-scripts" / f"{script}.py")]


def model_files(models: Path, family: str, to: Path) -> dict[str, str]:
    """The files of a small model by option, in float32: sd-scripts cannot read matrices in fp8 in all of them."""
    files = {}
    for option, name in FILES[family].items():
        tensors = load_file(models / family / name)
        to.mkdir(parents=True, exist_ok=True)
        save_file({key: tensor.float().contiguous() for key, tensor in tensors.items()}, to / name, {"format": "pt"})
        files[option] = (to / name).as_posix()
    return files


def place_tokenizers(models: Path, family: str, to: Path) -> Path:
    """The tokenizers of a small model under the names by which both trainers look for them."""
    second = TOKENIZERS[2 if family == "flux" else 1]
    for folder, name in (("tokenizer", TOKENIZERS[0]), ("tokenizer_2", second)):
        shutil.copytree(models / family / folder, to / name)
    if family == "flux":
        (to / second / "tokenizer_config.json").write_text(json.dumps(versus_files.T5_CONFIG), encoding="utf-8")
    return to


def options(family: str, asked: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The TOML of both trainers, without the folder for what they write."""
    inputs = work / "inputs" / family
    shutil.rmtree(inputs, ignore_errors=True)
    all_options = COMMON | OWN[family] | model_files(asked.models, family, inputs)
    all_options |= {
        "tokenizer_cache_dir": place_tokenizers(asked.models, family, inputs / "tokenizers").as_posix(),
        "train_data_dir": (inputs / "images").as_posix(),
        "train_batch_size": 1 if asked.paired else asked.batch,
        "learning_rate": asked.rate,
        "max_train_steps": asked.steps,
        "mixed_precision": asked.precision,
    }
    pictures = beside_pictures.draw_training_pictures(inputs / "images" / f"{REPEATS}_zorb")
    if asked.paired:
        for file in sorted(pictures.iterdir())[2:]:
            file.unlink()
        return all_options
    prompts = inputs / "prompts.txt"
    lines = (
        f"{prompt} {SAMPLE} --s {asked.sample_steps} --d {seed}\n" for seed, prompt in enumerate(COMPARED_PROMPTS, 1)
    )
    prompts.write_text("".join(lines), encoding="utf-8")
    every = {"sample_prompts": prompts.as_posix(), "sample_at_first": True}
    return all_options | every | {"sample_every_n_steps": max(1, asked.steps // 2)}


def train(name: str, family: str, toml: Path, place: TrainerRuns, more: list[str]) -> Row:
    """One training by one trainer: what was measured from outside, its losses, and its samples by step."""
    folder = place.work / family / name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    losses, log = folder / "losses.jsonl", folder / "log.txt"
    command = place.command(name, family, losses)
    command += ["--config_file", str(toml), "--output_dir", str(folder / "out"), "--output_name", "lora", *more]
    steps = int(tomllib.loads(toml.read_text(encoding="utf-8"))["max_train_steps"])
    row = versus_measure.measure_training(command, steps, log, place.environment(name, family), place.folder(name), 600)
    curve = read_losses(losses if name == THEIRS else next(folder.glob("out/runs/*/progress.jsonl"), losses))
    if not curve:
        row.setdefault("failed", "no losses")
    if "failed" in row:
        row["tail"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]
    return {**row, "losses": curve, "log": str(log), "samples": samples(folder / "out" / "sample")}


def read_losses(file: Path) -> Curve:
    """Step and loss of each step: from this trainer's record, or from what sd_scripts_small.py writes."""
    if not file.is_file():
        return []
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [(line["step"], line["loss"]) for line in lines if line.get("kind", "step") == "step" and "loss" in line]


def samples(folder: Path) -> dict[int, dict[int, str]]:
    """Sample files by step and number of the prompt: both name them NAME_STEP_NUMBER_..."""
    pictures: dict[int, dict[int, str]] = {}
    for file in sorted(folder.glob("lora_*.png")):
        _, step, number, *_ = file.stem.split("_")
        pictures.setdefault(int(step.lstrip("e")), {})[int(number)] = str(file)
    return pictures


def summary(curves: dict[str, Curve]) -> Row:
    """Means of the first and the last quarter with their standard errors, and the losses of the first step."""
    figures: Row = {}
    for name, curve in curves.items():
        losses = [loss for _, loss in curve]
        quarter = max(2, len(losses) // 4)
        figures[name] = {"first": losses[0], "mean": statistics.fmean(losses)}
        for part, some in (("first quarter", losses[:quarter]), ("last quarter", losses[-quarter:])):
            error = statistics.stdev(some) / len(some) ** 0.5 if len(some) > 1 else 0.0
            figures[name][part] = [statistics.fmean(some), error]
    mine, theirs = (dict(curves[name]) for name in (OURS, THEIRS))
    both = mine.keys() & theirs.keys()
    figures["largest difference of a step"] = max((abs(mine[step] - theirs[step]) for step in both), default=None)
    return figures


def sample_sheet(rows: dict[str, Row]) -> Any:
    """The samples of both trainers: before training, halfway and at the end."""
    columns = [(name, step) for name in (OURS, THEIRS) if name in rows for step in sorted(rows[name]["samples"])]
    files = [
        [Path(picture) if (picture := rows[name]["samples"][step].get(number)) else None for name, step in columns]
        for number in range(len(COMPARED_PROMPTS))
    ]
    titles = [(name, f"step {step}" if step else "without LoRA") for name, step in columns]
    return beside_pictures.sheet(titles, COMPARED_PROMPTS, files)


def prepare(family: str, asked: argparse.Namespace, place: TrainerRuns) -> tuple[Path, list[str]]:
    toml = versus_files.write_flat(place.work / f"{family}.toml", options(family, asked, place.work))
    return toml, ["--network_weights", str(starting_lora(family, toml, place))] if asked.paired else []


def trainings(asked: argparse.Namespace, place: TrainerRuns) -> Iterator[tuple[str, str, Row]]:
    """Family, trainer and what came of it, of every training as it is done; so many at once as --jobs says."""
    prepared = {family: prepare(family, asked, place) for family in asked.family}
    with ThreadPoolExecutor(asked.jobs) as pool:
        running = {
            pool.submit(train, name, family, toml, place, more): (family, name)
            for family, (toml, more) in prepared.items()
            for name in (OURS, THEIRS)
        }
        for done in as_completed(running):
            yield *running[done], done.result()


def starting_lora(family: str, toml: Path, place: TrainerRuns) -> Path:
    """A LoRA for both to begin with, as each draws its own: this trainer's after a few steps."""
    file = place.work / family / OURS.replace(" ", "-") / "out" / "lora.safetensors"
    row = train(OURS, family, toml, place, ["--max_train_steps", "3"])
    if not file.is_file():
        raise SystemExit(f"{family}: no LoRA to begin with: {row.get('failed')}; see {row['log']}")
    return Path(shutil.copy(file, place.work / f"start-{family}.safetensors"))


def describe_outcome(row: Row) -> str:
    """A training in a line."""
    if "failed" in row:
        return f"failed: {row['failed']}; see {row['log']}"
    return (
        f"{len(row['losses'])} steps, {row['wall_s']} s, mean loss {statistics.fmean(x for _, x in row['losses']):.4f}"
    )


def write(found: dict[str, dict[str, Row]], asked: argparse.Namespace) -> None:
    """beside.json, the curves, and the sheets of samples."""
    asked.out.mkdir(parents=True, exist_ok=True)
    curves = {
        family: {name: rows[name]["losses"] for name in (OURS, THEIRS) if name in rows}
        for family, rows in found.items()
    }
    curves = {family: curve for family, curve in curves.items() if len(curve) == 2 and all(curve.values())}
    own = {"log", "samples"}  # paths, which mean nothing elsewhere
    options = ("steps", "batch", "rate", "sample_steps", "precision", "paired")
    about = {
        "machine": versus.machine_facts() | {"torch": torch.__version__},
        "options": {name: getattr(asked, name) for name in options},
        "summary": {family: summary(curve) for family, curve in curves.items()},
        "families": {
            family: {name: {key: value for key, value in row.items() if key not in own} for name, row in rows.items()}
            for family, rows in found.items()
        },
    }
    (asked.out / "beside.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
    if curves:
        how = "the same draws" if asked.paired else f"running mean of {beside_pictures.WINDOW} steps over every step"
        panels = {f"{FAMILIES[family]}, small model: loss, {how}": curve for family, curve in curves.items()}
        beside_pictures.curves_picture(panels).save(asked.out / "beside-curves.png")
    for family, rows in found.items():
        if any(row["samples"] for row in rows.values()):
            sample_sheet(rows).save(asked.out / f"beside-samples-{family}.png")


def parsed(arguments: Iterable[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="the folder with the small models' folders flux and sdxl")
    parser.add_argument("--rival", type=Path, required=True, help="a checkout of sd-scripts")
    parser.add_argument(
        "--packages", type=Path, help="a folder of packages that come before this Python's, for it alone"
    )
    parser.add_argument("--family", nargs="+", choices=[*FAMILIES], default=[*FAMILIES])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--sample-steps", type=int, default=20)
    parser.add_argument("--precision", choices=("bf16", "no"), default="bf16")
    parser.add_argument("--paired", action="store_true", help="the same draws in both; needs no samples, one picture")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once; with several, seconds say nothing")
    parser.add_argument("--work", type=Path, default=Path("beside"), help="the folder for inputs and trainings")
    parser.add_argument("--out", type=Path, default=Path("beside-results"))
    return parser.parse_args(None if arguments is None else [*arguments])


def main(arguments: Iterable[str] | None = None) -> int:
    """Compare the families; 1 where a training failed."""
    asked = parsed(arguments)
    packages = asked.packages.resolve() if asked.packages else None
    place = TrainerRuns(asked.rival.resolve(), packages, asked.work.resolve(), asked.paired)
    place.work.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Row]] = {}
    for family, name, row in trainings(asked, place):
        print(f"{family}, {name}: {describe_outcome(row)}", flush=True)
        results.setdefault(family, {})[name] = row
        write(results, asked)
    return int(any("failed" in row for rows in results.values() for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
