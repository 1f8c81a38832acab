"""A tiny FLUX.1 in the real formats: every part, every name, a few megabytes; random weights that a signal passes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from library.families import tiny
from library.families.flux import keys
from library.families.flux.model import Flux, Sizes
from library.families.shared import autoencoder, clip


@dataclass(frozen=True)
class Tiny:
    """How large the tiny model is. Widths of CLIP are multiples of 64 (heads), of the autoencoder of 32 (groups)."""

    hidden: int = 64
    head: int = 32
    double_blocks: int = 2
    single_blocks: int = 4
    clip_l: int = 64
    t5xxl: int = 64
    layers: int = 2
    vae: tuple[int, ...] = (32, 32, 32, 32)
    channels: int = 16


def write(
    folder: Path,
    seed: int = 0,
    guidance: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    tiny_sizes: Tiny | None = None,
) -> dict[str, Path]:
    """Write the four files of a tiny dev (schnell without `guidance`) model and its tokenizers into a folder.

    Returns paths by part: flux, clip_l, t5xxl, ae (all .safetensors), tokenizer and tokenizer_2 (folders).
    """
    folder, of = Path(folder), tiny_sizes or Tiny()
    places = {"tokenizer": folder / "tokenizer", "tokenizer_2": folder / "tokenizer_2"}
    words = tiny.clip_tokenizer(places["tokenizer"]), tiny.t5_tokenizer(places["tokenizer_2"])
    networks = {
        "flux": (f"tiny-flux1-{'dev' if guidance else 'schnell'}", denoiser(of, guidance)),
        "clip_l": ("clip_l", clip_l(of, words[0])),
        "t5xxl": ("t5xxl_fp16", t5xxl(of, words[1])),
        "ae": ("ae", vae(of)),
    }
    for i, (part, (stem, network)) in enumerate(networks.items()):
        shapes = [(name, tuple(t.shape)) for name, t in named(part, network).items()]
        tensors = tiny.noise(shapes, seed * 10 + i, dtype)
        if part == "ae":
            tensors = autoencoder.to_single(clear(tensors))
        places[part] = folder / f"{stem}.safetensors"
        save(tensors, places[part])
    return places


def write_diffusers(single_file: Path, folder: Path, shards: int = 3) -> Path:
    """Write a tiny single file's transformer as the `transformer` folder of a diffusers model; returns that folder."""
    folder = Path(folder) / "transformer"
    tensors = keys.to_diffusers(load(single_file))
    names, index = list(tensors), {}
    for i in range(shards):
        file = f"diffusion_pytorch_model-{i + 1:05d}-of-{shards:05d}.safetensors"
        file = file if shards > 1 else "diffusion_pytorch_model.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        index |= dict.fromkeys(part, file)
        save({name: tensors[name] for name in part}, folder / file)
    if shards > 1:
        about = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": index}
        write_json(folder / "diffusion_pytorch_model.safetensors.index.json", about)
    write_json(folder / "config.json", diffusers_config(load(single_file)))
    write_json(folder.parent / "model_index.json", {"_class_name": "FluxPipeline"})
    return folder


def write_fp8(single_file: Path, target: Path, prefix: str = "") -> Path:
    """Write a copy of a file with every tensor as float8_e4m3fn, as such files are shared; returns its path."""
    stored = {prefix + name: tensor.to(torch.float8_e4m3fn) for name, tensor in load(single_file).items()}
    return save(stored, target)


def diffusers_config(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What diffusers' FluxTransformer2DModel is told to become the same model."""
    of = Sizes.of({name: tuple(t.shape) for name, t in tensors.items()})
    return {
        "_class_name": "FluxTransformer2DModel",
        "in_channels": of.in_channels,
        "num_layers": of.double_blocks,
        "num_single_layers": of.single_blocks,
        "attention_head_dim": of.head,
        "num_attention_heads": of.hidden // of.head,
        "joint_attention_dim": of.text_channels,
        "pooled_projection_dim": of.vector_channels,
        "guidance_embeds": of.guidance,
        "axes_dims_rope": of.axes,
    }


def denoiser(of: Tiny, guidance: bool) -> nn.Module:
    """The transformer without memory."""
    sizes = Sizes(
        in_channels=4 * of.channels,
        out_channels=4 * of.channels,
        vector_channels=of.clip_l,
        text_channels=of.t5xxl,
        hidden=of.hidden,
        head=of.head,
        mlp=4 * of.hidden,
        double_blocks=of.double_blocks,
        single_blocks=of.single_blocks,
        guidance=guidance,
    )
    with torch.device("meta"):
        return Flux(sizes)


def clip_l(of: Tiny, words: int) -> nn.Module:
    """CLIP-L without memory."""
    from transformers import CLIPTextConfig, CLIPTextModel

    with torch.device("meta"):
        return CLIPTextModel(
            CLIPTextConfig(
                vocab_size=words,
                hidden_size=of.clip_l,
                intermediate_size=4 * of.clip_l,
                num_hidden_layers=of.layers,
                num_attention_heads=of.clip_l // clip.HEAD,
                max_position_embeddings=clip.LENGTH,
                bos_token_id=words - 2,
                eos_token_id=words - 1,
            )
        )


def t5xxl(of: Tiny, words: int) -> nn.Module:
    """T5 without memory."""
    from transformers import T5Config, T5EncoderModel

    sizes = {"d_model": of.t5xxl, "d_kv": 16, "d_ff": 2 * of.t5xxl, "num_layers": of.layers, "num_heads": 4}
    with torch.device("meta"):
        return T5EncoderModel(T5Config(vocab_size=words, feed_forward_proj="gated-gelu", **sizes))


def vae(of: Tiny) -> nn.Module:
    """The autoencoder without memory; unlike SDXL's it has no convolutions around its latents."""
    from diffusers import AutoencoderKL

    levels = len(of.vae)
    with torch.device("meta"):
        return AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            block_out_channels=of.vae,
            layers_per_block=2,
            latent_channels=of.channels,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )


def named(part: str, network: nn.Module) -> dict[str, Tensor]:
    """A network's tensors as its file names them (the autoencoder's: diffusers' names)."""
    if part == "clip_l":
        return clip.tensors_of(network)
    return {name: t for name, t in network.state_dict().items() if name != "encoder.embed_tokens.weight"}


def clear(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Let the random encoder answer like a trained one: latents of about unit size, with nearly no variance."""
    half = tensors["encoder.conv_out.bias"].shape[0] // 2
    tensors["encoder.conv_out.weight"][:half] *= 6
    tensors["encoder.conv_out.weight"][half:] *= 0.1
    tensors["encoder.conv_out.bias"][half:] = -12.0
    return tensors


def load(path: Path) -> dict[str, Tensor]:
    """All tensors of a .safetensors file."""
    from safetensors.torch import load_file

    return load_file(path)


def save(tensors: Mapping[str, Tensor], path: Path) -> Path:
    """Write a .safetensors file and its folder."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
    return path


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(dict(value), indent=1) + "\n", encoding="utf-8", newline="\n")
