"""Does a LoRA of the small FLUX.1 model learn the zorb, and leave the rest alone? Figures, bounds, and errors that must
break them.

    python -m tests.train.learning [--seeds 10] [--errors]

trains with so many seeds, and prints the figures of each beside the bounds; with --errors also a training with each of
the planted errors. `tests/train/test_learning.py` checks the same bounds.
"""

import argparse
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.quality_report import distance
from library.config.building import build_config
from library.config.formats import read_toml
from library.config.run_config import RunConfig
from library.demo import files, small_model, zorb
from library.families import config_class, lora_script
from library.families.sdxl import conditions
from library.methods.adapters import Adapter
from library.objectives import flow
from library.objectives.base import NoisedBatch
from library.sampling.generate import ColumnSampler, OpenModel, open_sampling_model
from library.sampling.plan import Column
from library.sampling.prompts import parse_line

LORA_SCRIPT = "flux_train_network"
# Few steps, without regularization pictures: enough to see the zorb coming, where the demo trains longer. A strength
# of alpha / rank that is not 1 shows whether it is applied.
QUICK = {"max_train_steps": 60, "learning_rate": 4e-3, "network_dim": 16, "network_alpha": 4.0, "reg_data_dir": None}
NEW = (
    ("blue", f"{zorb.NAME} emoji on a blue ground", 11),
    ("green", f"{zorb.NAME} on a green background", 12),
    (zorb.UNSEEN_GROUND, f"{zorb.NAME} emoji on a {zorb.UNSEEN_GROUND} ground", 13),
)  # ground, prompt, seed
OLD = (
    ("red apple emoji on a white ground", 14),
    ("cat face emoji on a blue ground", 15),
    ("rocket on a green background", 16),
)
SAMPLED = "--w 128 --h 128 --s 8 --l 4 --g 1"
ALL_LINES = [f"{prompt} {SAMPLED} --d {seed}" for prompt, seed in (*(case[1:] for case in NEW), *OLD)]
COARSE_LINE = f"{zorb.NAME} {SAMPLED}".replace("--s 8", "--s 1")
SMALL = 32  # pixels of a side, at which pictures are compared


@dataclass(frozen=True)
class Figures:
    """What one LoRA did, from pictures that are generated afterwards, without any planted error."""

    base: float  # mean distance of the base model's pictures of a zorb to drawn ones, 0 to 1
    learned: float  # the same of the LoRA
    moved: float  # mean difference of the pictures of old things, with and without the LoRA, 0 to 1
    error: float  # squared error of the velocity on held-out zorbs, as a share of the base model's

    @property
    def nearer(self) -> float:
        return 1 - self.learned / self.base

    @property
    def failures(self) -> list[str]:
        """The bounds that do not hold."""
        broken = {
            f"nearer {self.nearer:.3f} < {MIN_NEARER}": self.nearer < MIN_NEARER,
            f"moved {self.moved:.3f} > {MAX_MOVED}": self.moved > MAX_MOVED,
            f"error {self.error:.3f} > {MAX_ERROR}": self.error > MAX_ERROR,
        }
        return [text for text, is_broken in broken.items() if is_broken]


# Ten seeds, 2026-11-28: nearer 0.34 to 0.41 (mean 0.37, deviation 0.02), moved 0.051 to 0.073 (0.061, 0.008), error
# 0.464 to 0.484 (0.475, 0.007).
MIN_NEARER = 0.25
MAX_MOVED = 0.1
MAX_ERROR = 0.53
# The error alone tells planted errors. After 15 steps, right 0.565 to 0.597 (six seeds, mean 0.582, deviation 0.014),
# timesteps shifted 0.707, sign 3.3; after 60, alpha ignored 0.583, captions swapped 0.623.
MAX_EARLY_ERROR = 0.65  # after EARLY steps
EARLY = 15
# Measured 0.45 and 0.31; SDXL with another layer of its text encoders 0.41 and 0.42.
MAX_CAPTION_SHARE = {"flux": 0.55, "sdxl": 0.36}


def small(picture: Image.Image) -> np.ndarray:
    reduced = picture.convert("RGB").resize((SMALL, SMALL), Image.Resampling.BOX)
    return np.asarray(reduced, np.float32) / 255


@cache
def drawn_zorbs(ground: str) -> list[Image.Image]:
    """Zorbs of all poses in two sizes."""
    poses = (scene.pose for scene in zorb.TRAINING_SCENES[:6])
    return [zorb.draw_scene(zorb.Scene(pose, size, (0.5, 0.5), ground, 0)) for pose, size in product(poses, (0.8, 1.0))]


class LearningMeter:
    """Trains LoRAs in a folder and measures them. The base model is sampled once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.demo = files.prepare_demo(folder / "demo", ("flux",), trained=("flux",))

    def config(self, **values: Any) -> RunConfig:
        """The demo's config of a LoRA with other values, without samples."""
        quick = QUICK | {"sample_images": False, "sample_prompts": None, "logging_dir": None}
        quick |= {"sample_every_n_steps": None, "sample_at_first": False, "output_dir": str(self.folder / "output")}
        return build_config(
            config_class(LORA_SCRIPT), read_toml(self.demo.configs[LORA_SCRIPT]) | quick | values, notes=[]
        )

    def train(self, seed: int, name: str, **values: Any) -> Path:
        """Train through the trainer's own entry; the LoRA."""
        from accelerate.state import AcceleratorState

        from library.cli.train import train

        AcceleratorState._reset_state(True)
        file = train(self.config(seed=seed, output_name=f"{name}-{seed}", **values))
        assert file is not None
        return file

    def measure(self, lora: Path) -> Figures:
        """The figures of a LoRA."""
        pictures, error = self._look(lora, ALL_LINES)
        base_pictures, base_error = self._base
        count = len(NEW)

        def distance_to_zorbs(shown: Sequence[Image.Image]) -> float:
            pairs = zip(shown[:count], NEW, strict=True)
            return sum(distance(picture, drawn_zorbs(ground)) for picture, (ground, _, _) in pairs) / count

        moved = [
            np.abs(small(first) - small(other)).mean()
            for first, other in zip(pictures[count:], base_pictures[count:], strict=True)
        ]
        return Figures(
            distance_to_zorbs(base_pictures), distance_to_zorbs(pictures), float(np.mean(moved)), error / base_error
        )

    def error_share(self, lora: Path) -> float:
        """`Figures.error` alone, for which one coarse picture puts the LoRA on the model."""
        return self._look(lora, [COARSE_LINE])[1] / self._base_error

    @cached_property
    def _base(self) -> tuple[list[Image.Image], float]:
        return self._look(None, ALL_LINES)

    @cached_property
    def _base_error(self) -> float:
        return self._look(None, [COARSE_LINE])[1]

    def _look(self, lora: Path | None, lines: Sequence[str]) -> tuple[list[Image.Image], float]:
        """The pictures of these prompts with a LoRA or without any, and the velocity error on held-out zorbs."""
        loras = ((lora, 1.0),) if lora else ()
        config = self.config()
        model = open_sampling_model(config, [path for path, _ in loras], lambda *_: None)
        pictures: dict[int, Image.Image] = {}
        ColumnSampler(model, [parse_line(line) for line in lines], config)(Column("", loras), pictures.__setitem__)
        pixels = torch.stack([_pixels(zorb.draw_scene(scene)) for scene in zorb.HELD_OUT_SCENES])
        (error,) = velocity_errors(model, pixels, [scene.caption for scene in zorb.HELD_OUT_SCENES])
        return [pictures[row] for row in range(len(lines))], error


@torch.no_grad()
def velocity_errors(model: OpenModel, pixels: Tensor, *captions: Sequence[str]) -> list[float]:
    """Mean squared error of the prediction for pictures [N, 3, H, W], for each list of their captions, with the same
    noise each time.

    Only the prediction is computed on the model's device. Text encoders and VAE wait on the host, and noise drawn there
    is the same on every machine.
    """
    family, parts, device = model.family, model.components, model.world.device
    texts = [{name: value.to(device) for name, value in family.text(parts, list(each)).items()} for each in captions]
    generator = torch.Generator().manual_seed(0)
    latents = family.latents(parts, pixels, generator)
    sizes = torch.tensor([[zorb.SIDE, zorb.SIDE, 0, 0, zorb.SIDE, zorb.SIDE]] * len(pixels), device=device)
    errors = []
    for timestep in family.validation_timesteps:
        noised = family.noised(latents, generator, torch.full((len(pixels),), timestep))
        with model.computing():
            inputs = _moved(noised, device)
            predictions = [family.predict(parts.denoiser, inputs, text, sizes).cpu() for text in texts]
        errors.append([float(((prediction - noised.target) ** 2).mean()) for prediction in predictions])
    return [sum(each) / len(each) for each in zip(*errors, strict=True)]


def _moved(noised: NoisedBatch, device: torch.device) -> NoisedBatch:
    values = {field.name: getattr(noised, field.name) for field in fields(noised)}
    return replace(noised, **{name: value.to(device) for name, value in values.items() if value is not None})


def _pixels(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture, np.float32) / 127.5 - 1).permute(2, 0, 1)


# ---- captions: an error in what the text encoders return shows in the base model


class CaptionMeter:
    """Measures how much the captions tell the small model of a family."""

    def __init__(self, folder: Path, family: str) -> None:
        self.script = lora_script(family)
        self.demo = files.prepare_demo(folder / family, (family,), trained=(family,))

    def share(self) -> float:
        """The error on pictures that the model knows, as a share of its error when it reads each other's captions."""
        silent = {
            "sample_images": False,
            "sample_prompts": None,
            "sample_every_n_steps": None,
            "sample_at_first": False,
        }
        config = build_config(config_class(self.script), read_toml(self.demo.configs[self.script]) | silent, notes=[])
        model = open_sampling_model(config, [], lambda *_: None)
        paths = sorted((small_model.SMALL_MODELS_FOLDER / small_model.KNOWN_PICTURES).glob("*.png"))
        pixels = torch.stack([_pixels(Image.open(path).convert("RGB")) for path in paths])
        captions = [path.with_suffix(".txt").read_text(encoding="utf-8").strip() for path in paths]
        of_others = [*captions[1:], captions[0]]
        own, other = velocity_errors(model, pixels, captions, of_others)
        return own / other


@contextlib.contextmanager
def wrong_layer(layer: int) -> Iterator[None]:
    """SDXL reads this layer of its text encoders instead of the last but one.

    FLUX.1 reads T5's last layer: in the small one, whose weights are random, all layers are nearly the same (cosine
    0.99), so that no picture can show which was read.
    """
    correct = conditions.encode_with_clips

    def encode(components: Any, *args: Any, **how: Any) -> dict[str, Tensor]:
        with contextlib.ExitStack() as stack:
            for encoder in components.encoders.values():
                stack.enter_context(mock.patch.object(encoder, "forward", _with_layer(encoder.forward, layer)))
            return correct(components, *args, **how)

    with mock.patch.object(conditions, "encode_with_clips", encode):
        yield


def _with_layer(forward: Callable[..., Any], layer: int) -> Callable[..., Any]:
    def changed(*args: Any, **how: Any) -> Any:
        result = forward(*args, **how)
        states = result.hidden_states
        result.hidden_states = (*states[:-2], states[layer], states[-1])
        return result

    return changed


# ---- errors that a training may have: each is in force while one trains, and must break a bound


@contextlib.contextmanager
def _noised_as(change: Callable[[Any], Any]) -> Iterator[dict[str, Any]]:
    correct = flow.noised
    with mock.patch.object(flow, "noised", lambda *args, **how: change(correct(*args, **how))):
        yield {}


def wrong_sign(_: LearningMeter) -> contextlib.AbstractContextManager[dict[str, Any]]:
    """The target is image minus noise."""
    return _noised_as(lambda batch: replace(batch, target=-batch.target))


def shifted_timesteps(_: LearningMeter) -> contextlib.AbstractContextManager[dict[str, Any]]:
    """The model is told that there is more noise than there is."""
    return _noised_as(lambda batch: replace(batch, timesteps=(batch.timesteps + 0.1).clamp(max=1)))


@contextlib.contextmanager
def alpha_ignored(_: LearningMeter) -> Iterator[dict[str, Any]]:
    """Adapters are trained at strength 1; the file says alpha as ever."""
    with mock.patch.object(Adapter, "strength", 1.0):
        yield {}


@contextlib.contextmanager
def swapped_captions(meter: LearningMeter) -> Iterator[dict[str, Any]]:
    """The pictures have the captions of something else."""
    with tempfile.TemporaryDirectory(dir=meter.folder) as folder:
        place = Path(folder) / "pictures"
        shutil.copytree(meter.demo.folder / zorb.NAME, place)
        for path in place.rglob("*.txt"):
            path.write_text(path.read_text(encoding="utf-8").replace(zorb.NAME, "red apple"), encoding="utf-8")
        yield {"train_data_dir": str(place)}


# And the steps that show them; None stands for those of `QUICK`.
ERRORS = {wrong_sign: EARLY, shifted_timesteps: EARLY, alpha_ignored: None, swapped_captions: None}


def train_with(error: Callable[[LearningMeter], Any] | None, meter: LearningMeter, seed: int, **options: Any) -> Path:
    with error(meter) if error else contextlib.nullcontext({}) as values:
        return meter.train(seed, error.__name__ if error else "right", **values, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print what LoRAs of the small model learn, beside the bounds.")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--errors", action="store_true", help="also train with each planted error")
    asked = parser.parse_args()
    print(f"bounds: nearer >= {MIN_NEARER}, moved <= {MAX_MOVED}, error <= {MAX_ERROR}")
    with tempfile.TemporaryDirectory() as folder:
        for family, most in MAX_CAPTION_SHARE.items():
            print(f"{family}: caption share {CaptionMeter(Path(folder), family).share():.3f} (bound: {most})")
        meter = LearningMeter(Path(folder))
        planted = [(error, 0) for error in ERRORS if asked.errors]
        kinds = [*((None, seed) for seed in range(asked.seeds)), *planted]
        for error, seed in kinds:
            measured = meter.measure(train_with(error, meter, seed))
            name = error.__name__ if error else "right"
            failures = "; ".join(measured.failures) or "within the bounds"
            figures = f"nearer {measured.nearer:.3f}, moved {measured.moved:.4f}, error {measured.error:.3f}"
            print(f"{name}, seed {seed}: {figures} ({failures})", flush=True)


if __name__ == "__main__":
    main()
