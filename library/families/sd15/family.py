"""SD 1.5 as a family: the conditions of its U-Net, from one text encoder."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library.config.problems import Problem
from library.families.base import Family, LatentCache, ModelComponents, TextCache
from library.families.sd15 import keys, model
from library.families.sd15.options import Sd15DreamBooth, Sd15Finetune, Sd15Lora, Sd15TextualInversion
from library.families.shared import tokenizers, weights
from library.families.shared.clip_conditions import encode_chunks, merge_chunks
from library.families.shared.unet_family import UnetFamily


class Sd15Family(UnetFamily):
    """Stable Diffusion 1.5: a U-Net, a CLIP text encoder and a VAE. Holds the run's config."""

    name = "sd15"
    checkpoints = model.CHECKPOINTS
    folder = model.SD15_FOLDER
    tokenizer_places = {"clip_l": (tokenizers.CLIP_L, "tokenizer")}
    config: Sd15Lora | Sd15Finetune | Sd15DreamBooth | Sd15TextualInversion
    latent_cache = LatentCache(suffix="_sd.npz", keyed_by_size=False)
    # sd-scripts caches no text outputs of this model; the names are ours.
    text_cache = TextCache(
        suffix="_sd_te_outputs.npz", keys=("hidden_state",), options=("weighted_captions", "clip_skip")
    )

    def problems(self) -> Iterator[Problem]:
        """Yield the problems of this run's files, and a `clip_skip` beyond the layers of the text encoder."""
        problems = [*super().problems()]
        yield from problems
        skip, path = self.config.model.clip_skip or 1, Path(self.config.model.pretrained_model_name_or_path or "")
        layers = 0 if problems or skip == 1 else _encoder_layers(self.checkpoints.located(path))
        if layers and skip > layers:
            template = "must be at most {layers}, as this model's text encoder has no more layers, got {skip}"
            yield Problem("clip_skip", template, layers=layers, skip=skip, fix={"clip_skip": layers})

    def notes(self) -> Iterator[Problem]:
        return iter(())

    @property
    def text_lengths(self) -> dict[str, int]:
        return {"hidden_state": 75 * self.chunks + 2}

    def encode_captions(
        self,
        components: ModelComponents,
        captions: Sequence[str],
        encoders: tuple[str, ...] | None,
        chunks: int,
        weighted: bool,
    ) -> dict[str, Tensor]:
        """Captions -> hidden_state [B, L, C]: with the final norm, of the last layer or of `clip_skip` - 1 before."""
        encoder, tokenizer = components.encoders["clip_l"], components.tokenizers["clip_l"]
        encoded, factors = encode_chunks(encoder, tokenizer, captions, chunks, None, weighted)
        skip, hidden = self.config.model.clip_skip or 1, encoded.last_hidden_state
        if skip > 1:
            text_model: Any = getattr(encoder, "text_model", encoder)  # transformers 5 has no such level
            hidden = text_model.final_layer_norm(encoded.hidden_states[-skip])
        return {"hidden_state": merge_chunks(hidden, chunks, factors)}

    def unet_inputs(
        self, text: dict[str, Tensor], dtype: torch.dtype, sizes: Tensor, controls: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        return text["hidden_state"].to(dtype), None

    def is_read(self, part: str, path: str, layers: int) -> bool:
        """Return whether a parameter of the text encoder affects its output: not in the layers that clip_skip skips."""
        unread = range(layers - (self.config.model.clip_skip or 1) + 1, layers)
        return not path.startswith(tuple(f"encoder.layers.{number}." for number in unread))

    def adapter_name(self, part: str, path: str) -> str:
        return keys.adapter_name(part, path)


def _encoder_layers(path: Path) -> int:
    """Return the number of layers of the text encoder in a file or a diffusers folder, 0 if no header tells it."""
    files = weights.files(path / "text_encoder" if path.is_dir() else path) if path.exists() else []
    names = [name for file in files if file.suffix == ".safetensors" for name in weights.header(file)]
    numbers = [int(match[1]) for name in names if (match := re.search(r"encoder\.layers\.(\d+)\.", name))]
    return max(numbers, default=-1) + 1


_complete: type[Family] = Sd15Family  # the type checker names what is missing
