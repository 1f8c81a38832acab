"""Run the same tiny training in this trainer and in a rival, with the same random numbers, and compare every step.

    python -m benchmarks.beside_rivals --rival musubi=../musubi-tuner:../musubi-tuner/.venv/bin/python
    python -m benchmarks.beside_rivals --rival sd-scripts=../sd-scripts --packages FOLDER --case sd15 sd15_full

A rival is NAME=PATH or NAME=PATH:PYTHON as for benchmarks/versus.py; NAME selects its cases. Models have random float32
weights, there is one image, and a LoRA starts from the file of three steps by this trainer. Each case runs with both
trainers unchanged and, where `alike` names an intended difference, once more with the rival patched to compute it as
this trainer does. The folder --work gets beside-NAME.json with every loss; the table is printed.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks import quality, versus, versus_files, versus_measure
from benchmarks.sd_scripts_small import ALIKE, PAIRED
from benchmarks.versus import Program
from benchmarks.versus_files import PROJECT_ROOT, TOKENIZERS, VersusCase

Row = dict[str, Any]
BESIDE_HEAD = (
    "case",
    "training",
    "beside",
    "steps",
    "largest relative difference of a loss",
    "of the weight changes",
    "tensors",
)
COMMON: dict[str, Any] = {
    "resolution": "128,128",
    "caption_extension": ".txt",
    "enable_bucket": True,
    "min_bucket_reso": 64,
    "max_bucket_reso": 256,
    "train_batch_size": 1,
    "cache_latents": True,
    "optimizer_type": "AdamW",
    "learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "max_data_loader_n_workers": 0,
    "mixed_precision": "no",
    "save_precision": "float",
    "save_model_as": "safetensors",
    "sdpa": True,
    "seed": 42,
}
LORA: dict[str, Any] = {"network_dim": 8, "network_alpha": 4}
MUSUBI_CACHES = {
    "cache_latents_to_disk": True,
    "cache_text_encoder_outputs": True,
    "cache_text_encoder_outputs_to_disk": True,
    "weighting_scheme": "none",
}
START_STEPS = 3
LIMIT = 600  # seconds per training


@dataclass(frozen=True)
class BesideCase:
    """A training that both this trainer and a rival can run: the names of both scripts, and the options."""

    rival: str
    family: str
    script: str
    theirs: str
    options: dict[str, Any]
    own: dict[str, Any] = field(default_factory=dict)  # for this trainer only
    sizes: dict[str, Any] = field(default_factory=dict)  # of the tiny model, for a rival that hard-codes sizes
    alike: str = ""  # what the rival computes differently, see docs/differences.md

    @property
    def launcher(self) -> str:
        return f"{self.rival.replace('-', '_')}_small.py"

    @property
    def is_lora(self) -> bool:
        return "network_module" in self.options


SD15 = LORA | {"network_module": "networks.lora", "no_half_vae": True}
CASES = {
    "krea_2": BesideCase(
        "musubi",
        "krea_2",
        "krea_2_train_network",
        "krea2_train_network",
        LORA | MUSUBI_CACHES | {"network_module": "networks.lora_krea2", "timestep_sampling": "krea2_shift"},
        {"network_args": ["train_text_fusion=True", "train_embedders=True"], "model_version": "raw"},
        {"fusion_blocks": 2, "mlp": 256, "fusion_mlp": 128},
        "0.001 added to sigma",
    ),
    "sd15": BesideCase(
        "sd-scripts", "sd15", "train_network", "train_network", SD15 | {"network_train_unet_only": True}
    ),
    "sd15_text": BesideCase("sd-scripts", "sd15", "train_network", "train_network", SD15),
    "sd15_v": BesideCase(
        "sd-scripts",
        "sd15",
        "train_network",
        "train_network",
        SD15 | {"v_parameterization": True, "scale_v_pred_loss_like_noise_pred": True, "min_snr_gamma": 5.0},
    ),
    "sd15_full": BesideCase("sd-scripts", "sd15", "train_db", "train_db", {"no_half_vae": True}),
}


def draw_picture(folder: Path) -> None:
    """Draw an image of the zorb with its caption, as benchmarks/quality.py does."""
    ground = quality.TRAINED[0]
    folder.mkdir(parents=True)
    quality.draw_subject(ground, 0).save(folder / "01.png")
    (folder / "01.txt").write_text(f"{quality.THING} emoji on a {ground} ground", encoding="utf-8")


def make_inputs(case: BesideCase, work: Path) -> dict[str, Any]:
    """Write a model, a tokenizer and a captioned image to a folder; return the options that name them."""
    from library.families import random_module

    module = random_module(case.family)
    sizes = replace(module.TINY, **case.sizes)
    shutil.rmtree(work, ignore_errors=True)
    draw_picture(work / "images" / "1_zorb")
    written = module.write_random_model(work / "model", dtype=torch.float32, sizes=sizes)
    if versus_files.has_musubi_caches(case.family):
        versus_files.write_caches(work / "images", case.family, sizes)
        return {
            "pretrained_model_name_or_path": str(written[case.family]),
            "text_encoder": str(written["text_encoder"]),
            "vae": str(written["vae"]),
        }
    shutil.copytree(work / "model" / "tokenizer", work / "tokenizers" / TOKENIZERS[0])
    return {"pretrained_model_name_or_path": str(written), "tokenizer_cache_dir": str(work / "tokenizers")}


@dataclass(frozen=True)
class Trainings:
    """Where the trainings of a case run: the rival, extra package folders for it, and the folder for all files."""

    case: BesideCase
    rival: Program
    packages: tuple[Path, ...]
    work: Path
    steps: int

    def run_ours(self, options: Mapping[str, Any], name: str) -> Row:
        images = self._images(name)
        settings = {**options, **self.case.own, "train_data_dir": str(images), "output_dir": str(self.work / name)}
        toml = versus_files.write_flat(self.work / f"{name}.toml", {**settings, "output_name": "trained"})
        script = PROJECT_ROOT / "sd-scripts" / f"{self.case.script}.py"
        command = [sys.executable, str(PROJECT_ROOT / "benchmarks" / "paired_draws.py"), str(script)]
        program = Program(versus.THIS_TRAINER, PROJECT_ROOT, PROJECT_ROOT, sys.executable)
        row = self._measure([*command, "--config_file", str(toml)], program.environment(self.work, name), name)
        return row | {"losses": read_losses(next((self.work / name).glob("runs/*/progress.jsonl"), Path()))}

    def run_theirs(self, options: Mapping[str, Any], name: str, alike: bool) -> Row:
        images, out = self._images(name), self.work / name
        settings = {**options, "output_dir": str(out), "output_name": "trained"}
        if self.rival.source:
            case = VersusCase(self.case.family, "lora", name, settings, ())
            toml = versus_files.write_musubi(case, self.work, self.work, images)
        else:
            toml = versus_files.write_flat(self.work / f"{name}.toml", {**settings, "train_data_dir": str(images)})
        launcher = PROJECT_ROOT / "benchmarks" / self.case.launcher
        losses = self.work / f"{name}.jsonl"
        command = [self.rival.python, str(launcher), str(self.rival.folder), self.case.theirs, str(losses)]
        environment = self.rival.environment(self.work, name) | {PAIRED: "1"} | ({ALIKE: "1"} if alike else {})
        # sd-scripts has a package `library`, too, and musubi_small.py imports this project's benchmarks.
        behind = [str(PROJECT_ROOT)] if self.rival.source else []
        places = [*map(str, self.packages), environment["PYTHONPATH"], *behind]
        environment["PYTHONPATH"] = os.pathsep.join(places)
        row = self._measure([*command, "--config_file", str(toml)], environment, name)
        return row | {"losses": read_losses(losses)}

    def _images(self, name: str) -> Path:
        return Path(shutil.copytree(self.work / "inputs" / "images", self.work / f"images-{name}"))

    def _measure(self, command: list[str], environment: dict[str, str], name: str) -> Row:
        log = self.work / f"{name}.log"
        row = versus_measure.measure_training(command, self.steps, log, environment, self.work, LIMIT)
        file = self.work / name / "trained.safetensors"
        return {**row, "file": str(file), "log": str(log)} | ({} if file.is_file() else {"failed": f"see {log}"})


def read_losses(file: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of each step from this trainer's record, or from the file that a rival's launcher writes."""
    if not file.is_file():
        return []
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [(line["step"], line["loss"]) for line in lines if line.get("kind", "step") == "step" and "loss" in line]


def compare_case(place: Trainings) -> Iterator[Row]:
    """Return the rows of a case: with both trainers unchanged, and with the rival patched."""
    shutil.rmtree(place.work, ignore_errors=True)
    place.work.mkdir(parents=True)
    options = COMMON | place.case.options | make_inputs(place.case, place.work / "inputs")
    start = Path(options["pretrained_model_name_or_path"])
    if place.case.is_lora:
        begun = place.run_ours(options | {"max_train_steps": START_STEPS}, "start")
        if "failed" in begun:
            raise SystemExit(f"{place.case.script}: the LoRA to start from could not be trained: {begun['failed']}")
        options["network_weights"] = begun["file"]
        start = Path(begun["file"])
    options["max_train_steps"] = place.steps
    mine = place.run_ours(options, "mine")
    for alike in (False, True)[: 1 + bool(place.case.alike)]:
        theirs = place.run_theirs(options, "alike" if alike else "theirs", alike)
        row: Row = {"alike": place.case.alike if alike else "", "mine": mine["losses"], "theirs": theirs["losses"]}
        if failed := [result["failed"] for result in (mine, theirs) if "failed" in result]:
            yield row | {"failed": failed[0]}
            continue
        files = (load_file(path) for path in (mine["file"], theirs["file"], start))
        yield row | {"loss": loss_difference(mine["losses"], theirs["losses"]), **change_difference(*files)}


def loss_difference(mine: list[tuple[int, float]], theirs: list[tuple[int, float]]) -> float:
    """Return the largest relative difference between two losses of the same step."""
    pairs = zip(mine, theirs, strict=True)
    return max(abs(loss - other) / abs(other) for (_, loss), (_, other) in pairs)


Tensors = Mapping[str, torch.Tensor]


def change_difference(mine: Tensors, theirs: Tensors, start: Tensors) -> Row:
    """Return the distance of two results of one start, relative to the distance of theirs from it, and the tensors that
    only one has."""
    both = sorted(mine.keys() & theirs.keys() & start.keys())

    def distance(first: Tensors, other: Tensors) -> float:
        return sum(float((first[name].double() - other[name].double()).square().sum()) for name in both) ** 0.5

    return {
        "learnt": distance(mine, theirs) / distance(theirs, start),
        "tensors": len(both),
        "only here": sorted(mine.keys() - theirs.keys()),
        "only there": sorted(theirs.keys() - mine.keys()),
    }


def table(results: Mapping[str, list[Row]], steps: int) -> Iterator[str]:
    """Return the rows in Markdown."""
    yield f"| {' | '.join(BESIDE_HEAD)} |"
    yield "|" + "---|" * len(BESIDE_HEAD)
    for name, rows in results.items():
        for row in rows:
            beside = CASES[name].rival + (f", without {row['alike']}" if row["alike"] else "")
            cells = [name, CASES[name].script, beside, str(steps)]
            if "failed" in row:
                cells += [f"failed: {row['failed']}", "", ""]
            else:
                apart = [f"{len(row[key])} {key}" for key in ("only here", "only there") if row[key]]
                cells += [f"{row['loss']:.1e}", f"{row['learnt']:.1e}", ", ".join([str(row["tensors"]), *apart])]
            yield f"| {' | '.join(cells)} |"


def main(arguments: Iterable[str] | None = None) -> int:
    """Compare the cases of a rival; return 1 if a training failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival", required=True, metavar="NAME=PATH[:PYTHON]")
    parser.add_argument("--packages", type=Path, nargs="+", default=[], help="extra package folders for the rival")
    parser.add_argument("--case", nargs="+", choices=[*CASES], help="default: all cases of the rival")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--work", type=Path, default=Path("beside-rivals"), help="the folder for all output")
    args = parser.parse_args(None if arguments is None else [*arguments])
    try:
        rival = Program.parse(args.rival)
    except ValueError as error:
        parser.error(str(error))
    names = [name for name, case in CASES.items() if case.rival == rival.name and name in (args.case or CASES)]
    if not names:
        parser.error(f"--rival {rival.name} has none of these cases; NAME is musubi or sd-scripts")
    work, packages = args.work.resolve(), tuple(path.resolve() for path in args.packages)
    results: dict[str, list[Row]] = {}
    for name in names:
        results[name] = [*compare_case(Trainings(CASES[name], rival, packages, work / name, args.steps))]
    (work / f"beside-{rival.name}.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print("\n".join(table(results, args.steps)))
    return int(any("failed" in row for rows in results.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
