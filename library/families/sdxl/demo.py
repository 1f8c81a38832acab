"""The demo of SDXL: its configs, and the check of its LoRA in diffusers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from library import families
from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.shared.diffusers_layers import Sizes, layers

# Compiling all kinds of U-Net blocks takes minutes on a CPU; these take seconds, and do most of the work.
BLOCKS = ("compile_blocks", "transformer:all", "all kinds of blocks, without this line, compile longer")
Line = tuple[str, Any, str]  # option, value, and the value of a real training


def tables(models: Mapping[str, Path]) -> dict[str, list[Line]]:
    """Return the tables of a demo TOML for this model; `models` are the files written by random.write."""
    return {
        "model": [("pretrained_model_name_or_path", str(models["sdxl"]), "real: sd_xl_base_1.0.safetensors")],
        "compile": [BLOCKS],
    }


def converted(tensors: JsonObject, config: RunConfig) -> tuple[JsonObject, Sizes]:
    """Return a LoRA file's adapters by diffusers' names, and the layer sizes of diffusers' model."""
    import torch
    from diffusers import loaders, utils

    unet = families.family_for(config).load(torch.float32).denoiser
    converted = loaders.StableDiffusionXLLoraLoaderMixin.lora_state_dict(dict(tensors), unet_config=unet.config)[0]
    found = {name.removeprefix("unet."): tensor for name, tensor in converted.items() if name.startswith("unet.")}
    return utils.convert_unet_state_dict_to_peft(found), layers(unet)
