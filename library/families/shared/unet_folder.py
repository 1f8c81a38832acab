"""A trained Stable Diffusion as a diffusers folder, the layout of its pipeline there."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from library.config.json_types import JsonObject
from library.config.outside_files import table_of
from library.families.base import ModelComponents
from library.families.shared import clip
from library.files import write_atomic

Put = Callable[[Path, Mapping[str, Tensor]], None]


@dataclass(frozen=True)
class PipelineFolder:
    """The layout of a pipeline's folder."""

    pipeline: str  # diffusers' class
    # Text encoder -> its folder, the class that reads it under a name that old versions know, and its tokenizer's.
    encoders: Mapping[str, tuple[str, str, str]]
    scheduler: Callable[[], Any]  # that of the published models
    index: JsonObject  # other entries of model_index.json

    @property
    def folders(self) -> dict[str, str]:
        """The folder of each network."""
        return {"denoiser": "unet", "vae": "vae", **{part: names[0] for part, names in self.encoders.items()}}

    @property
    def readers(self) -> dict[str, tuple[str, str]]:
        """The package and class that read each folder."""
        readers = {"unet": ("diffusers", "UNet2DConditionModel"), "vae": ("diffusers", "AutoencoderKL")}
        for folder, reader, tokenizer in self.encoders.values():
            readers |= {folder: ("transformers", reader), tokenizer: ("transformers", "CLIPTokenizer")}
        return readers


def write_model_folder(
    layout: PipelineFolder, components: ModelComponents, folder: Path, put: Put, objective: tuple[bool, bool]
) -> None:
    """Write the model into an existing folder. `put(path, tensors)` writes a weights file; `objective`: whether it
    predicts velocity, and has no signal at the last timestep.

    Text encoders get the names of the published models (`text_model.*`), which every version of transformers reads. The
    scheduler is that of the original model if it was a folder, as usual.
    """
    import diffusers

    networks: dict[str, Any] = {"denoiser": components.denoiser, "vae": components.vae, **components.encoders}
    for part, network in networks.items():
        place = folder / layout.folders[part]
        place.mkdir()
        if part in components.encoders:
            reader = layout.readers[place.name][1]
            _write_json(place / "config.json", {**network.config.to_dict(), "architectures": [reader]})
            put(place / "model.safetensors", clip.clip_tensors(network))
        else:
            network.save_config(place)
            put(place / "diffusion_pytorch_model.safetensors", network.state_dict())
    for part, (_, _, tokenizer) in layout.encoders.items():
        _tokenizer(components.tokenizers[part], folder / tokenizer)
    scheduler = _scheduler(layout, components, folder / "scheduler", *objective)
    index: JsonObject = {"_class_name": layout.pipeline, "_diffusers_version": diffusers.__version__}
    index |= {**layout.index, "scheduler": ["diffusers", scheduler]}
    _write_json(folder / "model_index.json", index | {name: list(reader) for name, reader in layout.readers.items()})


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


def _scheduler(
    layout: PipelineFolder, components: ModelComponents, place: Path, v_prediction: bool, zero_snr: bool
) -> str:
    """Write the scheduler's settings; returns its class."""
    place.mkdir()
    original = Path(components.source.get("path", "")) / "scheduler" / "scheduler_config.json"
    settings = table_of(original)
    if not isinstance(settings.get("_class_name"), str):
        usual = layout.scheduler()
        settings = {**usual.config, "_class_name": type(usual).__name__}
    if v_prediction:
        settings["prediction_type"] = "v_prediction"
    if zero_snr:  # the sampling of its paper (2305.08891)
        settings |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    _write_json(place / "scheduler_config.json", settings)
    return settings["_class_name"]


def _write_json(path: Path, value: JsonObject) -> None:
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True) + "\n")
