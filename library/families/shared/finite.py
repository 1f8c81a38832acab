"""An image that is not made of numbers, which would be kept as a black one."""

from typing import Any

import torch
from torch import Tensor

from library.config.problems import ConfigError

NO_LATENTS = (
    "the model computed NaN or infinity: lower the scale or the strength of its LoRA, or use mixed_precision = bf16"
)
NO_PIXELS = "the VAE gave NaN or infinity; it is damaged, so replace it"
OVERFLOW = "the VAE overflows in fp16; add no_half_vae, or use bf16, or a VAE made for fp16"


def require_finite(pixels: Tensor, latents: Tensor, vae: Any) -> None:
    """Raise ConfigError, with the part that is to blame, unless all pixels are finite."""
    if bool(pixels.isfinite().all()):
        return
    if not bool(latents.isfinite().all()):
        raise ConfigError(NO_LATENTS)
    raise ConfigError(OVERFLOW if next(vae.parameters()).dtype == torch.float16 else NO_PIXELS)
