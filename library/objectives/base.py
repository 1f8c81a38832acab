"""The batch that an objective produces. Importing this does not load torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class NoisedBatch:
    """Noised latents, timesteps, target and per-sample weight of one batch, all on the latents' device."""

    latents: "Tensor"  # float32 [B, C, h, w], the input of the denoiser
    timesteps: "Tensor"  # float32 [B], in the denoiser's own units: 0 to 999 of a diffusion model, 0 to 1 of flow
    target: "Tensor"  # float32 [B, C, h, w]
    weight: "Tensor"  # float32 [B]; the product of all weightings of timesteps
    sigmas: "Tensor | None" = None  # float32 [B], of flow matching
    huber_c: "Tensor | None" = None  # float32 [B], threshold of huber and smooth_l1
