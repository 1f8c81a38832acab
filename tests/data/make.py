"""Small random data sets, configs for them, and a family whose encoders are simple arithmetic."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from library import families
from library.config import building
from library.families.base import LatentCache, ModelComponents, TextCache

SDXL = LatentCache("_sdxl.npz", keyed_by_size=False)
FLUX = LatentCache("_flux.npz", keyed_by_size=True)


def picture(path: Path, size: tuple[int, int] = (64, 64), seed: int = 0, mode: str = "RGB", **options: Any) -> Path:
    """Draw an image of smooth random colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, channels), dtype=np.uint8)
    image = Image.fromarray(coarse.squeeze() if channels == 1 else coarse).resize(size, Image.Resampling.BICUBIC)
    image.save(path, **options)
    return path


def folder(
    parent: Path, name: str = "2_cat", sizes: tuple[tuple[int, int], ...] = ((64, 64),) * 4, captions: bool = True
) -> Path:
    """Fill a concept folder with images, each with a caption."""
    for i, size in enumerate(sizes):
        path = picture(parent / name / f"{i:02d}.png", size, seed=i)
        if captions:
            path.with_suffix(".txt").write_text(f"cat number {i}, sitting, on a mat", encoding="utf-8")
    return parent / name


def config(data: Path | None = None, script: str = "sdxl_train_network", **values: Any) -> Any:
    """A config for small images in `data`."""
    small_options = {
        "resolution": "64,64",
        "min_bucket_reso": 64,
        "max_bucket_reso": 128,
        "caption_extension": ".txt",
        "train_data_dir": str(data) if data else None,
        "max_data_loader_n_workers": 0,
    }
    values_set = {k: v for k, v in {**small_options, **values}.items() if v is not None}
    return building.build_config(families.config_class(script), values_set)


def holding_back(config: Any, share: float) -> Any:
    """The same config with this share of the images held back for validation."""
    return replace(config, validation=replace(config.validation, validation_split=share))


class Vae(nn.Module):
    """A single weight, by which `Family.latents` scales its result."""

    def __init__(self, weight: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))


class Encoder(Vae):
    """The same for `Family.text`."""


class Family:
    """Latents are means of 8x8 pixels plus noise from each image's own generator; texts are the lengths of words."""

    name = "fake"

    def __init__(self, latent_cache: LatentCache = SDXL, noise: float = 0.0, options: tuple[str, ...] = ()):
        self.latent_cache = latent_cache
        self.text_cache = TextCache("_te_outputs.npz", ("hidden", "pool"), options)
        self.noise = noise
        self.seen: list[torch.Tensor] = []
        self.read: list[str] = []

    def latents(self, parts: ModelComponents, pixels: torch.Tensor, generator: Any = None) -> torch.Tensor:
        self.seen.append(pixels)
        means = functional.avg_pool2d(pixels, 8)
        noise = [torch.randn(means.shape[1:], generator=own_generator) for own_generator in generator]
        return torch.cat([means, means[:, :1]], 1) * parts.vae.weight + self.noise * torch.stack(noise)[:, :1]

    text_lengths: ClassVar[dict[str, int]] = {}

    def text(self, parts: ModelComponents, captions: list[str], encoders: Any = None) -> dict[str, torch.Tensor]:
        self.read += captions
        lengths = [[float(len(word)) for word in (caption.split() + ["", "", ""])[:3]] for caption in captions]
        hidden = torch.tensor(lengths)[:, :, None] * parts.encoders["one"].weight
        return {"hidden": hidden, "pool": hidden.mean(1).bfloat16()}


def parts(vae: float = 1.0, encoder: float = 1.0) -> ModelComponents:
    return ModelComponents(nn.Identity(), Vae(vae), {"one": Encoder(encoder)}, {})


class Run(SimpleNamespace):
    """What encoding needs of a run; `told` collects the progress reports."""

    def __init__(self, rank: int = 0, ranks: int = 1):
        super().__init__(device=torch.device("cpu"), rank=rank, ranks=ranks, told=[])

    def phase(self, name: str, done: int, total: int) -> None:
        self.told.append((str(name), done, total))
