"""sd-scripts' former FLUX.1 options that old configs still contain, converted to blocks_to_swap."""

from dataclasses import dataclass

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import Message, Problem, option_name, together
from library.config.schema import opt, section_options

SPLIT = 18  # blocks, as sd-scripts reads split_mode


@dataclass(frozen=True, kw_only=True, slots=True)
class OldBlocks:
    """Former options for swapping blocks to CPU memory."""

    split_mode: bool = opt(False, "Load the double and the single blocks in turn.")
    double_blocks_to_swap: int | None = opt(None, "Keep this many double blocks in CPU memory.", min=0)
    single_blocks_to_swap: int | None = opt(None, "Keep this many single blocks in CPU memory.", min=0)


OLD_BLOCKS = section_options(OldBlocks)


def convert_blocks_to_swap(old: JsonMapping, is_set: bool) -> tuple[JsonObject, list[Problem]]:
    """Convert checked values by old name to blocks_to_swap, if that must be set, with a remark.

    `is_set`: blocks_to_swap is set already and wins, even if 0. Disabled old options give no remark. As in sd-scripts:
    18 for split_mode, else all double blocks and half of the single ones.
    """
    enabled = [name for name in OLD_BLOCKS if old.get(name)]
    if not enabled:
        return {}, []
    names, several = together(map(option_name, enabled[1:])), len(enabled) > 1
    if is_set:
        template = "and {names} have no effect: {why}" if several else "has no effect: {why}"
        return {}, [
            Problem(enabled[0], template, names=names, why=Message("blocks_to_swap is set and takes precedence"))
        ]
    # A single block has about half the weights of a double block.
    halves = (old.get("single_blocks_to_swap") or 0) // 2
    number = SPLIT if old.get("split_mode") else (old.get("double_blocks_to_swap") or 0) + halves
    if not number:
        why = Message("one single block is less than one of blocks_to_swap")
        return {}, [Problem(enabled[0], "has no effect: {why}", why=why)]
    template = "is read as blocks_to_swap = {number}"
    if several:
        template = "and {names} are read as blocks_to_swap = {number}"
    return {"blocks_to_swap": number}, [Problem(enabled[0], template, names=names, number=number)]
