"""A trained SDXL as a diffusers folder, the layout of StableDiffusionXLPipeline."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from library.config.json_types import JsonObject
from library.config.outside_files import table_of
from library.families.base import ModelComponents
from library.families.sdxl import model
from library.families.shared import clip
from library.files import write_atomic
from library.objectives import diffusion

Put = Callable[[Path, Mapping[str, Tensor]], None]

# Folder -> package and class that read it, under a class name that old versions know, too.
LIBRARY = {
    "unet": ("diffusers", "UNet2DConditionModel"),
    "vae": ("diffusers", "AutoencoderKL"),
    "text_encoder": ("transformers", "CLIPTextModel"),
    "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "CLIPTokenizer"),
}


def write_model_folder(components: ModelComponents, folder: Path, put: Put, v_prediction: bool, zero_snr: bool) -> None:
    """Write the model into an existing folder. `put(path, tensors)` writes a weights file.

    Text encoders get the names of the published models (`text_model.*`), which every version of transformers reads. The
    scheduler is that of the original model if it was a folder, as usual.
    """
    import diffusers

    networks: dict[str, Any] = {"denoiser": components.denoiser, "vae": components.vae, **components.encoders}
    for part, network in networks.items():
        place = folder / model.FOLDERS[part]
        place.mkdir()
        if part in components.encoders:
            _write_json(place / "config.json", {**network.config.to_dict(), "architectures": [LIBRARY[place.name][1]]})
            put(place / "model.safetensors", clip.clip_tensors(network))
        else:
            network.save_config(place)
            put(place / "diffusion_pytorch_model.safetensors", network.state_dict())
    _tokenizer(components.tokenizers["clip_l"], folder / "tokenizer")
    _tokenizer(components.tokenizers["clip_g"], folder / "tokenizer_2")
    scheduler = _scheduler(components, folder / "scheduler", v_prediction, zero_snr)
    index: JsonObject = {"_class_name": "StableDiffusionXLPipeline", "_diffusers_version": diffusers.__version__}
    index |= {"force_zeros_for_empty_prompt": True, "scheduler": ["diffusers", scheduler]}
    index |= {"feature_extractor": [None, None], "image_encoder": [None, None]}
    _write_json(folder / "model_index.json", index | {name: list(reader) for name, reader in LIBRARY.items()})


def _tokenizer(tokenizer: Any, place: Path) -> None:
    """Write a tokenizer's words for old and new readers, and its settings as they were published."""
    place.mkdir()
    tokenizer.backend_tokenizer.model.save(str(place))  # vocab.json, merges.txt
    tokenizer.backend_tokenizer.save(str(place / "tokenizer.json"))
    special = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    _write_json(place / "special_tokens_map.json", special)
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": clip.LENGTH, "do_lower_case": True}
    _write_json(
        place / "tokenizer_config.json", {**settings, "add_prefix_space": False, "errors": "replace", **special}
    )


def usual_scheduler() -> Any:
    """Return the scheduler of the published SDXL models."""
    from diffusers import EulerDiscreteScheduler

    options = {"beta_start": diffusion.BETA_START, "beta_end": diffusion.BETA_END, "beta_schedule": "scaled_linear"}
    return EulerDiscreteScheduler(**options, steps_offset=1, timestep_spacing="leading")


def _scheduler(components: ModelComponents, place: Path, v_prediction: bool, zero_snr: bool) -> str:
    """Write the scheduler's settings; returns its class."""
    place.mkdir()
    original = Path(components.source.get("path", "")) / "scheduler" / "scheduler_config.json"
    settings = table_of(original)
    if not isinstance(settings.get("_class_name"), str):
        usual = usual_scheduler()
        settings = {**usual.config, "_class_name": type(usual).__name__}
    if v_prediction:
        settings["prediction_type"] = "v_prediction"
    if zero_snr:  # the sampling of its paper (2305.08891)
        settings |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    _write_json(place / "scheduler_config.json", settings)
    return settings["_class_name"]


def _write_json(path: Path, value: JsonObject) -> None:
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True) + "\n")
