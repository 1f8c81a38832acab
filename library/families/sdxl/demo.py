"""What the demo says of SDXL, and whether its LoRA fits the model in diffusers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from library import families
from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.facts import SmallModel
from library.families.shared.diffusers_layers import Sizes, layers

# All kinds of blocks of a U-Net take minutes to compile on a processor; these take seconds, and do most of the work.
BLOCKS = ("compile_blocks", "transformer:all", "all kinds of blocks, without this line, compile longer")
Line = tuple[str, Any, str]  # an option, its value, and what a real training would use instead


def tables(models: Mapping[str, Path]) -> dict[str, list[Line]]:
    """What a TOML of the demo says of this model; `models` are the files that random.write made."""
    return {
        "model": [("pretrained_model_name_or_path", str(models["sdxl"]), "real: sd_xl_base_1.0.safetensors")],
        "compile": [BLOCKS],
    }


def small_tables(models: Mapping[str, Path]) -> dict[str, list[Line]]:
    """As `tables`, of the small trained model."""
    return tables(models) | {"sample": [("sample_sampler", "euler", "")]}


SMALL = SmallModel(
    files={"sdxl": "sdxl.safetensors"},
    tables=small_tables,
    prompt="--w 128 --h 128 --s 20 --l 4",
    rank=16,
    alpha=8.0,
    rates={"lora": 3e-3, "finetune": 2e-4},
    steps=500,
)


def converted(tensors: JsonObject, config: RunConfig) -> tuple[JsonObject, Sizes]:
    """A LoRA file's adapters by diffusers' names, and the sizes of the layers of diffusers' model."""
    import torch
    from diffusers import loaders, utils

    unet = families.family_for(config).load(torch.float32).denoiser
    converted = loaders.StableDiffusionXLLoraLoaderMixin.lora_state_dict(dict(tensors), unet_config=unet.config)[0]
    found = {name.removeprefix("unet."): tensor for name, tensor in converted.items() if name.startswith("unet.")}
    return utils.convert_unet_state_dict_to_peft(found), layers(unet)
