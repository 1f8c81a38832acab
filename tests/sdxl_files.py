"""SDXL's random networks as a diffusers folder, as other programs save them."""

import json
from pathlib import Path
from typing import Any

import torch

from library.families.sdxl import model, random
from library.files import write_atomic


def write_diffusers(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.float16, sizes: random.SdxlSizes = random.TINY
) -> Path:
    """Write the same model as a diffusers folder; returns the folder."""
    folder = Path(folder)
    parts = random.network_tensors(folder, seed, dtype, sizes)
    for part, tensors in parts.items():
        network: Any = model.CHECKPOINTS.build(part, tensors)
        network.save_pretrained(folder / model.CHECKPOINTS.folders[part])
    library = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "scheduler": "EulerDiscreteScheduler"}
    index = {name: ["diffusers", cls] for name, cls in library.items()}
    index |= {"text_encoder": ["transformers", "CLIPTextModel"], "tokenizer": ["transformers", "CLIPTokenizer"]}
    index |= {"text_encoder_2": ["transformers", "CLIPTextModelWithProjection"]}
    model.usual_scheduler().save_pretrained(folder / "scheduler")
    index |= {"tokenizer_2": ["transformers", "CLIPTokenizer"], "_class_name": "StableDiffusionXLPipeline"}
    write_atomic(folder / "model_index.json", json.dumps(index, indent=1) + "\n")
    return folder
