"""Differences between ComfyUI's formulas and the training: rewritten to match, rejected, or noted.

Formulas are those of ComfyUI 0.19. It applies a limit on rotations (OFT's `constraint`) to the whole layer, not times
its outputs; ignores OFT's learned scale, but not BOFT's; and lacks iA3.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from library.adapter_files.adapters import Lora
from library.adapter_files.changes import CHANGE_KINDS, MAGNITUDE, OFT_EPSILON, ON_INPUT, LayerChange, Parts
from library.adapter_files.names import ALPHA, lora_names_of
from library.config.problems import ConfigError, Message

BLOCKS, SCALE, CORE = "oft_blocks", "rescale", "bm.weight"
UNREAD = (
    "{path} is iA3 (first {module}), which ComfyUI has no names for: add it to a checkpoint with {merge}, or make a "
    "LoRA of it with {join}"
)


def prepare_for_comfyui(lora: Lora, path: str | Path) -> Lora:
    """Return a file's adapters so that ComfyUI computes them as trained, if possible. Raises ConfigError for kinds that
    it does not support.
    """
    if unread := next(
        (module for module, change in sorted(lora.other_changes.items()) if change.kind is CHANGE_KINDS[ON_INPUT]), None
    ):
        raise ConfigError(
            UNREAD,
            path=path,
            module=unread.kohya,
            merge=f"kohya tools merge {path} --base MODEL --out NEW",
            join=f"kohya tools merge {path} --trained_on MODEL --rank 16 --out NEW",
        )
    return replace(
        lora,
        other_changes={
            module: LayerChange(_as_comfyui_writes(change.parts)) for module, change in lora.other_changes.items()
        },
    )


def comfyui_notes(lora: Lora) -> Iterator[Message]:
    """Return a sentence for each kind that ComfyUI computes differently in any form, and one for those that diffusers
    does not support.
    """
    kinds = list(lora.other_changes.values())
    if any(MAGNITUDE in kind.parts and _scales_rows(kind.parts[MAGNITUDE]) for kind in kinds):
        yield Message(
            "ComfyUI computes DoRA over outputs otherwise than the training, so that images differ a little: add the "
            "file to a checkpoint for the same images, or train with {argument}",
            argument="wd_on_output=False",
        )
    if any(BLOCKS in kind.parts for kind in kinds):
        yield Message(
            "ComfyUI multiplies OFT and BOFT by the strength twice: use the file there at strength 1, or add it to a "
            "checkpoint with the strength that you want"
        )
    if unread := sorted({kind.title for kind in kinds if not _is_read_by_diffusers(kind, lora.family)}):
        yield Message(
            "diffusers does not read {kinds}: make a LoRA of the file for it, with {command}",
            kinds=", ".join(unread),
            command="kohya tools merge FILE --trained_on MODEL --rank 16 --out NEW",
        )


def _is_read_by_diffusers(change: LayerChange, family: str) -> bool:
    has_lokr = lora_names_of(family).shared.has_lokr
    return has_lokr and change.kind is CHANGE_KINDS["lokr_"] and not {MAGNITUDE, "lokr_t2"} & change.parts.keys()


def _scales_rows(magnitudes: Tensor) -> bool:
    return magnitudes.ndim == 1 or magnitudes.shape[0] == magnitudes.numel()


def _as_comfyui_writes(parts: Parts) -> Parts:
    if BLOCKS in parts:
        limited = _apply_limit(parts)
        return _as_butterfly(limited) if SCALE in limited and limited[BLOCKS].ndim == 3 else limited
    if CORE in parts:  # GLoRA's core on convolutions, which it ignores
        inner = torch.einsum("m n ..., n i -> m i ...", parts[CORE].float(), parts["b2.weight"].float().flatten(1))
        other_parts = {name: part for name, part in parts.items() if name != CORE}
        return {**other_parts, "b2.weight": inner.to(parts["b2.weight"].dtype)}
    return parts


def _apply_limit(parts: Parts) -> Parts:
    """Apply the limit inside the blocks, and write 0 as the alpha."""
    # Without an alpha ComfyUI fails on BOFT.
    blocks = parts[BLOCKS]
    outputs = blocks.shape[-3] * blocks.shape[-2]
    limit = float(parts.get(ALPHA, 0.0)) * outputs
    unlimited = {**parts, ALPHA: torch.zeros_like(parts.get(ALPHA, torch.tensor(0.0)))}
    if not limit:
        return unlimited
    stored = blocks.float()
    size = (stored - stored.transpose(-1, -2)).norm() + OFT_EPSILON
    return {**unlimited, BLOCKS: (stored * (limit / size).clamp(max=1.0)).to(blocks.dtype)}


def _as_butterfly(parts: Parts) -> Parts:
    """Convert OFT to a single stage of BOFT with the same result: rows of a block alternate between its halves there,
    and its blocks are applied from the other side. Blocks of odd size become pairs; a layer with an odd number of
    outputs is unchanged.
    """
    blocks = parts[BLOCKS]
    number, size, _ = blocks.shape
    if size % 2:
        if number % 2:
            return parts
        pairs = blocks.new_zeros(number // 2, 2 * size, 2 * size)
        pairs[:, :size, :size], pairs[:, size:, size:] = blocks[::2], blocks[1::2]
        blocks, size = pairs, 2 * size
    order = torch.arange(size).reshape(2, -1).T.flatten()
    turned = blocks.transpose(-1, -2)[:, order][:, :, order]
    return {**parts, BLOCKS: turned[None].contiguous()}
