"""Differences between lycoris-lora's layers and what its files and trainings need: scales, ranks and dropouts."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def block_sizes(network: Any) -> dict[str, int]:
    # DyLoRA scales by alpha / blocks in use, other programs by alpha / rank: so a file's alpha, written for these, is
    # the network's alpha times the block size.
    return {adapter.lora_name: adapter.block_size for adapter in network.loras if hasattr(adapter, "up_list")}


def use_full_rank_outside_steps(adapter: Any) -> None:
    """Let a DyLoRA compute with all of its ranks unless it learns: the package draws some for samples and validation,
    too, which then differ from the file, and change the random numbers of the training.
    """
    if not hasattr(adapter, "up_list"):
        return
    drawn, whole = adapter.get_random_rank_weight, (adapter.block_count - 1) * adapter.block_size

    def weight() -> tuple[Tensor, Tensor, Tensor]:
        return drawn() if adapter.training else adapter.get_weight(whole)

    adapter.get_random_rank_weight = weight


def cast_output_to_layer_dtype(adapter: Any) -> None:
    """Let iA3 return what its layer would: beside a bf16 model its own numbers are float32, and in bypass mode the
    package multiplies the layer's output by them, which norms in bf16 refuse on a CPU.
    """
    if type(adapter).__name__ != "IA3Module":
        return
    scaled = adapter._channel_scale

    def channel_scale(x: Tensor, *args: Any) -> Tensor:
        return scaled(x, *args).to(x.dtype)

    adapter._channel_scale = channel_scale


def takes_the_weight(adapter: Any) -> bool:
    return getattr(adapter, "is_diff", None) is False


def adapter_alpha(adapter: Any) -> float:
    return float(getattr(adapter, "alpha", 0) or 0)


def follow_alpha(adapter: Any, before: float) -> None:
    """Adapt the scale of an adapter whose alpha was `before`: the package keeps what it computed from the config's."""
    if before and isinstance(getattr(adapter, "scale", None), float):
        adapter.scale *= adapter_alpha(adapter) / before


def match_scale_of_file(adapter: Any) -> None:
    """With rs_lora, train with the scale that readers of the file use: alpha / rank for GLoRA, whose alpha the package
    leaves unchanged, and 1 for LoKr of whole matrices, whose alpha nobody reads.
    """
    if not getattr(adapter, "rs_lora", False):
        return
    if type(adapter).__name__ == "GLoRAModule":
        adapter.alpha = adapter.alpha * math.sqrt(adapter.lora_dim)
    elif getattr(adapter, "use_w1", False) and getattr(adapter, "use_w2", False):
        adapter.scale = 1.0


def put_blocks(adapter: Any, tensors: Mapping[str, Tensor]) -> list[str]:
    """Load a DyLoRA, which the package writes whole but keeps in blocks of ranks. Returns the consumed names."""
    if not hasattr(adapter, "up_list"):
        return []
    names = [f"{adapter.lora_name}.lora_up.weight", f"{adapter.lora_name}.lora_down.weight"]
    if not all(name in tensors for name in names):
        return []
    up, down = (tensors[name].flatten(1) for name in names)
    ups, downs = up.split(adapter.block_size, dim=1), down.split(adapter.block_size)
    if len(ups) != len(adapter.up_list):
        raise RuntimeError(f"{names[0]} has rank {up.shape[1]}, the network has {adapter.lora_dim}")
    with torch.no_grad():
        for parameter, block in zip([*adapter.up_list, *adapter.down_list], [*ups, *downs], strict=True):
            parameter.copy_(block)
    return names


def draw_rank_dropout_on_device(adapter: Any) -> None:
    """Draw LoKr's rank_dropout on the device of its weights: the package draws on the CPU, which fails on a GPU."""
    original_get_weight, probability, is_rescaled = adapter.get_weight, adapter.rank_dropout, adapter.rank_dropout_scale
    adapter.rank_dropout = 0.0

    def get_weight(shape: Any) -> Tensor:
        weight = original_get_weight(shape)
        if not adapter.training:
            return weight
        mask = (torch.rand(len(weight), device=weight.device) > probability).to(weight.dtype)
        mask = mask / mask.mean() if is_rescaled else mask
        return weight * mask.view(-1, *[1] * (weight.ndim - 1))

    adapter.get_weight = get_weight
