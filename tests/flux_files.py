"""FLUX.1 files in the other layouts that they are shared in, made from a tiny single file."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from library.families.flux.model import Sizes
from tests import double_stream

PIPELINES = {"FluxTransformer2DModel": "FluxPipeline", "ChromaTransformer2DModel": "ChromaPipeline"}


def write_diffusers(single_file, folder, shards=3):
    """Write a tiny single file's transformer as the `transformer` folder of a diffusers model; returns that folder."""
    folder = Path(folder) / "transformer"
    tensors = double_stream.flux_to_diffusers(load(single_file))
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
    config = diffusers_config(load(single_file))
    write_json(folder / "config.json", config)
    write_json(folder.parent / "model_index.json", {"_class_name": PIPELINES[config["_class_name"]]})
    return folder


def write_fp8(single_file, target, prefix=""):
    """Write a copy of a file with every tensor as float8_e4m3fn, as such files are shared; returns its path."""
    stored = {prefix + name: tensor.to(torch.float8_e4m3fn) for name, tensor in load(single_file).items()}
    return save(stored, target)


def diffusers_config(tensors):
    """The config.json with which diffusers builds the same model."""
    sizes = Sizes.of({name: tuple(t.shape) for name, t in tensors.items()})
    if sizes.approximator:
        names = ("approximator_num_channels", "approximator_hidden_dim", "approximator_layers")
        class_options = {"_class_name": "ChromaTransformer2DModel", **dict(zip(names, sizes.approximator, strict=True))}
    else:
        class_options = {
            "_class_name": "FluxTransformer2DModel",
            "pooled_projection_dim": sizes.vector_channels,
            "guidance_embeds": sizes.guidance,
        }
    return class_options | {
        "in_channels": sizes.in_channels,
        "num_layers": sizes.double_blocks,
        "num_single_layers": sizes.single_blocks,
        "attention_head_dim": sizes.head,
        "num_attention_heads": sizes.hidden // sizes.head,
        "joint_attention_dim": sizes.text_channels,
        "axes_dims_rope": sizes.axes,
    }


def load(path):
    return load_file(path)


def save(tensors, path, metadata=None):
    """Write a .safetensors file and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"} | (metadata or {})
    )
    return path


def write_json(path, value):
    path.write_text(json.dumps(dict(value), indent=1) + "\n", encoding="utf-8", newline="\n")
