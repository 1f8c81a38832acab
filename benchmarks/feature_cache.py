"""What `sample_cache` saves and changes, on the small trained models of FLUX.1's and SDXL's kind, as a Markdown table.

    python -m benchmarks.feature_cache [flux] [sdxl] [--steps 28]

Every picture is compared with the one without the cache, from the same seed: the peak signal-to-noise ratio of pixels.
"""

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from library import families
from library.config.building import build_config
from library.config.run_config import RunConfig
from library.data import pixels
from library.demo.small_model import copy_small_model, small_model_of
from library.families.base import Family, SampleRequest
from library.families.shared.sampler import Sampler
from library.sampling.feature_cache import FeatureCache, block_chain
from library.sampling.prompts import parse_line, with_defaults
from library.sampling.requests import request_of

SUBJECTS = ("red apple", "cat face", "pizza", "red heart", "frog", "airplane")
GROUND = "white"
THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3)


@dataclass(frozen=True)
class CachedPictures:
    """The pictures of one threshold."""

    skipped: float  # share of passes
    decibels: Sequence[float]  # of each picture


def main() -> None:
    """Print a table for each family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=["flux", "sdxl"])
    parser.add_argument("--steps", type=int, default=20, help="denoising steps of a picture")
    asked = parser.parse_args()
    for family in asked.families:
        print(f"\n{families.facts_of(family).title}\n\n| threshold | passes skipped | PSNR, mean | lowest |")
        print("|---|---|---|---|")
        with tempfile.TemporaryDirectory() as folder:
            copy_small_model(family, Path(folder))
            for threshold, result in measure(family, asked.steps, Path(folder)):
                mean, lowest = sum(result.decibels) / len(result.decibels), min(result.decibels)
                print(f"| {threshold} | {result.skipped:.0%} | {mean:.1f} dB | {lowest:.1f} dB |", flush=True)


def measure(name: str, steps: int, folder: Path) -> Iterator[tuple[float, CachedPictures]]:
    """Generate all prompts without the cache, and yield how those at each threshold compare."""
    config = small_config(name, folder)
    family = families.family_for(config)
    components = family.load(torch.float32, torch.float32)
    sampler, requests = family.sampler(components), [*requests_of(name, family, steps)]
    expected = [picture(sampler, request) for request in requests]
    for threshold in THRESHOLDS:
        cache = FeatureCache(components.denoiser, block_chain(family), threshold)
        decibels = []
        for request, whole in zip(requests, expected, strict=True):
            with cache.active():
                decibels.append(psnr(picture(sampler, request), whole))
        yield threshold, CachedPictures(cache.skipped / cache.passes, decibels)


def small_config(name: str, folder: Path) -> RunConfig:
    """Return the config that opens a family's small model in a folder."""
    small = small_model_of(name)
    assert small is not None
    files = {part: folder / file for part, file in small.files.items()}
    tables = small.tables(files)
    values = {option: value for lines in tables.values() for option, value, _ in lines}
    return build_config(families.config_class(families.lora_script(name)), values, notes=[])


def requests_of(name: str, family: Family, steps: int) -> Iterator[SampleRequest]:
    """Yield a request for each subject."""
    small = small_model_of(name)
    assert small is not None
    for seed, subject in enumerate(SUBJECTS):
        line = f"{subject} emoji on a {GROUND} ground {small.prompt} --s {steps} --d {seed}"
        prompt = with_defaults(parse_line(line), family.sample_defaults, family.sample_multiple)
        yield request_of(prompt, pixels.Decoding(upright=True))


def picture(sampler: Sampler, request: SampleRequest) -> np.ndarray:
    return np.asarray(sampler(request)).astype(np.float64)


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    """Return the peak signal-to-noise ratio of two pictures in dB; 99 for equal ones."""
    error = float(((one - other) ** 2).mean())
    return 10 * math.log10(255**2 / error) if error else 99.0


if __name__ == "__main__":
    main()
