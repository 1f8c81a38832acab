"""Random numbers of a training: the same in all processes, and after a resume."""

import hashlib
import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int | None, ranks: int) -> int:
    """Seed Python, NumPy and PyTorch; return the seed, drawn at random if None."""
    if seed is None:
        drawn_seed = [random.SystemRandom().randint(0, 2**31 - 1)]  # a list, which broadcasting fills
        if ranks > 1:  # all processes must order the data alike
            torch.distributed.broadcast_object_list(drawn_seed)
        seed = drawn_seed[0]
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy takes 32 bits
    torch.manual_seed(seed)
    return seed


def derive_seed(text: str) -> int:
    # 63 bits fit the generators as a positive number; one independent generator for each text.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


# Two processes then draw what one draws with twice the batch size, and a resumed run needs no generator state.
# Why: docs/decisions/2026-11-22-noise-depends-on-the-step.md
class StepGenerators:
    """Generators seeded by the run's seed, the step and the batch number, independent of earlier draws.

    So a resumed step draws the same numbers, and no validation or sample changes the noise of later steps.
    """

    def __init__(self, seed: int, device: torch.device, rank: int) -> None:
        self.seed, self._rank = seed, rank
        self.noise = torch.Generator(device)  # noise and timesteps: equal in all processes, each takes its rows
        self.vae = torch.Generator(device)  # samples the VAE's posterior when latents are not cached

    def seed_batch(self, step: int, number: int) -> None:
        """Seed the draws of the `number`-th batch of a step."""
        text = f"{self.seed} {step} {number}"
        self.noise.manual_seed(derive_seed(text))
        self.vae.manual_seed(derive_seed(f"{text} {self._rank}"))


def get_rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of the global generators of Python, PyTorch and this GPU as plain values and tensors."""
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the global generators from a state of `get_rng_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
