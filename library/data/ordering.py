"""The images of each batch: a pure function of the seed and the epoch, the same in every process."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Draw:
    """One batch to load: the epoch, the batch's index in it (from 0), and the positions of its images.

    `slot` is the position of its first image in the global batch of all processes.
    """

    epoch: int
    index: int
    images: tuple[int, ...]
    slot: int = 0


def draws(
    buckets: Mapping[K, Sequence[int]],
    sizes: Mapping[K, int],
    seed: int,
    epoch: int,
    place: tuple[int, int],
) -> list[Draw]:
    """List one process' batches of an epoch; `buckets` has each image as often as its repeats.

    Batches never mix buckets; the last of a bucket may be short. `place` is (rank, world): all processes get the same
    number, ceil(batches / world).
    """
    # If possible all processes have the same bucket at the same time: none waits for larger images, and n processes use
    # the same images as one with n times the batch size.
    rank, world = place
    rows: list[list[tuple[tuple[int, ...], int]]] = []
    leftovers: list[tuple[tuple[int, ...], int]] = []
    for key, members in buckets.items():
        batches = _shuffled_batches(members, sizes[key], Random(f"{seed} {epoch} {key}"))
        full = len(batches) // world * world
        rows += [
            [(batch, i * sizes[key]) for i, batch in enumerate(batches[start : start + world])]
            for start in range(0, full, world)
        ]
        leftovers += [(batch, 0) for batch in batches[full:]]
    mix = Random(f"{seed} {epoch}")
    mix.shuffle(leftovers)
    if leftovers and len(leftovers) % world:  # repeat the first for equal numbers, as accelerate does
        all_batches = [batch for row in rows for batch in row] + leftovers
        leftovers += [all_batches[i % len(all_batches)] for i in range(-len(leftovers) % world)]
    rows += [leftovers[start : start + world] for start in range(0, len(leftovers), world)]
    mix.shuffle(rows)
    return [Draw(epoch, index, *row[rank]) for index, row in enumerate(rows)]


def _shuffled_batches(members: Sequence[int], size: int, random: Random) -> list[tuple[int, ...]]:
    mixed = list(members)
    random.shuffle(mixed)
    return [tuple(mixed[start : start + size]) for start in range(0, len(mixed), size)]
