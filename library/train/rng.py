"""The random numbers of a run: agreed on by all processes, and the same again after a resume."""

import hashlib
import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int | None, ranks: int) -> int:
    """Seed every source of random numbers of this process; the seed, which is one by chance where none is given."""
    if seed is None:
        box = [random.SystemRandom().randint(0, 2**31 - 1)]
        if ranks > 1:  # all processes must agree on the order of the data
            torch.distributed.broadcast_object_list(box)
        seed = box[0]
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return seed


def derive_seed(text: str) -> int:
    """A seed that depends on a text and on nothing else: as many independent generators as there are texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def get_rng_state(device: torch.device) -> dict[str, Any]:
    """Where the sources stand that everyone shares; plain values and tensors."""
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_rng_state(known: dict[str, Any], device: torch.device) -> None:
    """Put them back there."""
    version, numbers, gauss = known["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(known["torch"])
    if known["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(known["cuda"], device)
