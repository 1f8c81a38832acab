"""Options of sd-scripts for FLUX.1 that became blocks_to_swap there, and that old configs still contain."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from library.config.schema import opt, section_options

SPLIT = 18  # blocks, as sd-scripts reads split_mode


@dataclass(frozen=True, kw_only=True, slots=True)
class OldBlocks:
    """How blocks were once sent to host memory."""

    split_mode: bool = opt(False, "Load the double and the single blocks in turn.")
    double_blocks_to_swap: int | None = opt(None, "Keep this many double blocks in CPU memory.", min=0)
    single_blocks_to_swap: int | None = opt(None, "Keep this many single blocks in CPU memory.", min=0)


OLD_BLOCKS = section_options(OldBlocks)


def blocks(old: Mapping[str, Any], given: bool) -> tuple[dict[str, Any], str]:
    """Checked values by old name -> the value of blocks_to_swap, if it has to be set, and a sentence about it.

    `given`: blocks_to_swap is set already, and then it is what counts, also when it is 0. The sentence is empty where
    the old options are off. As sd-scripts converts them: 18 for split_mode, else all double blocks and half the single
    ones.
    """
    on = [name for name in OLD_BLOCKS if old.get(name)]
    if not on:
        return {}, ""
    names, many = " and ".join(on), len(on) > 1
    if given:
        return {}, f"{names} {'have' if many else 'has'} no effect: blocks_to_swap is set, and counts alone"
    halves = (old.get("single_blocks_to_swap") or 0) // 2
    number = SPLIT if old.get("split_mode") else (old.get("double_blocks_to_swap") or 0) + halves
    if not number:
        return {}, f"{names} has no effect: one single block is less than one of blocks_to_swap"
    return {"blocks_to_swap": number}, f"{names} {'are' if many else 'is'} read as blocks_to_swap = {number}"
