"""Random networks of Stable Diffusion: its U-Net, and a model's tensors and tokenizers in its own file format."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from library import families
from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.shared import clip, random_networks, unet
from library.families.shared.diffusers_layers import LayerSizes, layer_sizes
from library.families.shared.random_networks import RandomNetworks
from library.families.shared.unet_checkpoint import UnetCheckpoints
from library.files import write_atomic
from library.imports import without_optional

Parts = dict[str, dict[str, Tensor]]
# Compiling all kinds of U-Net blocks takes minutes on a CPU; these take seconds, and do most of the work.
COMPILE_BLOCKS_LINE = ("compile_blocks", "transformer:all", "all kinds of blocks, without this line, compile longer")


def random_unet(widths: Sequence[int], depth: Sequence[int], heads: int | None, others: Mapping[str, Any]) -> nn.Module:
    """Return a U-Net of these widths on the meta device; `depth` is the number of transformer layers of each level's
    attention, 0 for none, and `others` are more arguments of diffusers' class.
    """
    with without_optional("diffusers"):
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    attention = tuple(layers > 0 for layers in depth)
    unet_class: Any = UNet2DConditionModel  # its annotations lack the per-level lists that it accepts
    module = random_networks.build_on_meta(
        lambda: unet_class(
            block_out_channels=tuple(widths),
            down_block_types=tuple("CrossAttnDownBlock2D" if a else "DownBlock2D" for a in attention),
            up_block_types=tuple("CrossAttnUpBlock2D" if a else "UpBlock2D" for a in reversed(attention)),
            transformer_layers_per_block=tuple(max(1, layers) for layers in depth),
            attention_head_dim=heads or tuple(max(1, width // clip.HEAD_CHANNELS) for width in widths),
            **others,
        )
    )
    return unet.empty_unet({name: tuple(p.shape) for name, p in module.state_dict().items()}, heads)


def random_tensors(networks: RandomNetworks, seed: int, dtype: torch.dtype) -> Parts:
    """Return random tensors of every part by diffusers name."""
    parts: dict[str, nn.Module] = {"denoiser": networks.denoiser(), "vae": networks.vae()}
    parts |= {name: make() for name, make in networks.encoders.items()}
    out = {}
    for i, (part, network) in enumerate(parts.items()):
        named = clip.clip_tensors(network) if part in networks.encoders else network.state_dict()
        shapes = [(name, tuple(t.shape)) for name, t in named.items()]
        out[part] = random_networks.random_weights(shapes, seed * 10 + i, dtype)
    return out


def write_single_file(
    path: Path, checkpoints: UnetCheckpoints, parts: Parts, others: Mapping[str, Tensor], title: str
) -> Path:
    """Write all parts, and other tensors, in the layout of a single file; returns its path."""
    file: dict[str, Tensor] = {}
    for part, tensors in parts.items():
        file |= checkpoints.single.to_single(part, tensors)
    file = {name: tensor.contiguous() for name, tensor in {**file, **others}.items()}
    return write_atomic(path, lambda temporary: save_file(file, temporary, {"modelspec.title": title}))


def convert_unet_lora(tensors: JsonObject, config: RunConfig, loader: str) -> tuple[JsonObject, LayerSizes]:
    """Return a LoRA file's adapters by diffusers' names, as this class of diffusers reads them, and the layer sizes of
    its model.
    """
    from diffusers import loaders, utils

    denoiser = families.family_for(config).load(torch.float32).denoiser
    renamed = getattr(loaders, loader).lora_state_dict(dict(tensors), unet_config=denoiser.config)[0]
    unet_tensors = {name.removeprefix("unet."): tensor for name, tensor in renamed.items() if name.startswith("unet.")}
    return utils.convert_unet_state_dict_to_peft(unet_tensors), layer_sizes(denoiser)
