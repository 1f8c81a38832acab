"""A tiny SDXL checkpoint in the real formats: every part, every name, three levels, a few megabytes; random weights."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from library.families import tiny
from library.families.sdxl import keys, model
from library.families.sdxl.folder import usual_scheduler
from library.families.shared import clip
from library.files import write_atomic


@dataclass(frozen=True)
class Sizes:
    """How large the tiny model is. Widths are multiples of 32 (the norms' groups), the encoders' of 64 (heads)."""

    unet: tuple[int, ...] = (32, 64, 64)
    depth: tuple[int, ...] = (0, 1, 2)
    vae: tuple[int, ...] = (32, 32, 32, 32)
    clip_l: int = 64
    clip_g: int = 128
    layers: int = 2


def write(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float16, sizes: Sizes | None = None) -> Path:
    """Write `tiny_sdxl.safetensors` (the LDM layout) and its two tokenizers into a folder; returns the file's path."""
    from safetensors.torch import save_file

    parts = _tensors(Path(folder), seed, dtype, sizes or Sizes())
    file = {}
    for part, tensors in parts.items():
        file |= keys.to_single(part, tensors)
    file[keys.LOGIT_SCALE] = torch.tensor(keys.FULL_LOGIT_SCALE, dtype=dtype)
    path = Path(folder) / "tiny_sdxl.safetensors"
    file = {name: tensor.contiguous() for name, tensor in file.items()}
    return write_atomic(path, lambda temporary: save_file(file, temporary, {"modelspec.title": "tiny SDXL"}))


def write_diffusers(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.float16, sizes: Sizes | None = None
) -> Path:
    """Write the same model as a diffusers folder; returns the folder."""
    folder = Path(folder)
    parts = _tensors(folder, seed, dtype, sizes or Sizes())
    for part, tensors in parts.items():
        model.PARTS[part](tensors).save_pretrained(folder / model.FOLDERS[part])
    library = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "scheduler": "EulerDiscreteScheduler"}
    index = {name: ["diffusers", cls] for name, cls in library.items()}
    index |= {"text_encoder": ["transformers", "CLIPTextModel"], "tokenizer": ["transformers", "CLIPTokenizer"]}
    index |= {"text_encoder_2": ["transformers", "CLIPTextModelWithProjection"]}
    usual_scheduler().save_pretrained(folder / "scheduler")
    index |= {"tokenizer_2": ["transformers", "CLIPTokenizer"], "_class_name": "StableDiffusionXLPipeline"}
    write_atomic(folder / "model_index.json", json.dumps(index, indent=1) + "\n")
    return folder


def _tensors(folder: Path, seed: int, dtype: torch.dtype, sizes: Sizes) -> dict[str, dict[str, Tensor]]:
    """Random tensors of every part by diffusers name, and the tokenizers whose vocabularies fit them."""
    folder.mkdir(parents=True, exist_ok=True)
    words = tiny.clip_tokenizer(folder / "tokenizer")
    tiny.clip_tokenizer(folder / "tokenizer_2", pad="!")
    networks = {
        "denoiser": _unet(sizes),
        "vae": _vae(sizes),
        "clip_l": _encoder(sizes.clip_l, sizes.layers, words, "quick_gelu", False),
        "clip_g": _encoder(sizes.clip_g, sizes.layers, words, "gelu", True),
    }
    out = {}
    for i, (part, network) in enumerate(networks.items()):
        named = clip.tensors_of(network) if part.startswith("clip") else network.state_dict()
        out[part] = tiny.noise(((name, tuple(t.shape)) for name, t in named.items()), seed * 10 + i, dtype)
    return out


def _unet(sizes: Sizes) -> nn.Module:
    from accelerate import init_empty_weights
    from diffusers import UNet2DConditionModel

    attention = tuple(depth > 0 for depth in sizes.depth)
    with init_empty_weights():
        return UNet2DConditionModel(
            block_out_channels=sizes.unet,
            down_block_types=tuple("CrossAttnDownBlock2D" if a else "DownBlock2D" for a in attention),
            up_block_types=tuple("CrossAttnUpBlock2D" if a else "UpBlock2D" for a in reversed(attention)),
            transformer_layers_per_block=tuple(max(1, depth) for depth in sizes.depth),
            attention_head_dim=tuple(max(1, width // clip.HEAD) for width in sizes.unet),
            cross_attention_dim=sizes.clip_l + sizes.clip_g,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=model.SIZE_CHANNELS,
            projection_class_embeddings_input_dim=sizes.clip_g + 6 * model.SIZE_CHANNELS,
        )


def _vae(sizes: Sizes) -> nn.Module:
    from accelerate import init_empty_weights
    from diffusers import AutoencoderKL

    levels = len(sizes.vae)
    with init_empty_weights():
        return AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            block_out_channels=sizes.vae,
            layers_per_block=2,
            scaling_factor=model.SCALE,
        )


def _encoder(width: int, layers: int, words: int, act: str, projected: bool) -> nn.Module:
    from accelerate import init_empty_weights
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=width // clip.HEAD,
        hidden_act=act,
        eos_token_id=words - 1,
        bos_token_id=words - 2,
    )
    with init_empty_weights():
        return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)
