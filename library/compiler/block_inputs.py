"""The inputs of blocks of one class, stated by their family and used by the compiler. Needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockInputs:
    """The arguments of blocks of one class, by position, so that one graph can serve all of them.

    Blocks that run `before_trainable` ones have a graph of their own, as no gradient goes through them.
    """

    streams: tuple[int, ...]  # passed from block to block: all but the first block's carry a gradient
    dynamic: tuple[tuple[int, int], ...]  # (position, dimension) of sizes that depend on the bucket
    sizes: int = 1  # the number of different sizes, where each is compiled on its own
    level: int = 0  # Family.resolution_level, where sizes are compiled one by one: other levels see other sizes
    before_trainable: bool = False  # the block runs before any trained parameter
