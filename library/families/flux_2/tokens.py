"""FLUX.2's image tokens, and their positions: (image, row, column, word)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from library.families.shared import packing

APART = 10  # distance between the target and the first reference image, and between two of these


class Flux2Positions(packing.Positions):
    """Cached position tensors with a fourth number, which counts words."""

    def image(
        self, height: int, width: int, device: torch.device, references: Sequence[tuple[int, int]] = ()
    ) -> Tensor:
        """Return positions of an image's tokens, then those of reference images, whose first number is 10, 20, ..."""

        def make() -> Tensor:
            positions = packing.Positions.image(self, height, width, device, references)
            numbers = positions[:, :1] * APART
            return torch.cat((numbers, positions[:, 1:], torch.zeros_like(numbers)), dim=1)

        return self._cached(("image of four numbers", height, width, device, *references), make)

    def text(self, length: int, device: torch.device) -> Tensor:
        """Return positions of a text, whose fourth number counts words."""

        def make() -> Tensor:
            ids = torch.zeros(length, 4, device=device)
            ids[:, 3] = torch.arange(length, dtype=torch.float32, device=device)
            return ids

        return self._cached(("words", length, device), make)


def append_controls(tokens: Tensor, controls: Sequence[Tensor]) -> Tensor:
    """Append the tokens of reference latents to those of the noised image [B, S, C]."""
    more = [packing.pack(latents).to(tokens).expand(len(tokens), -1, -1) for latents in controls]
    return torch.cat((tokens, *more), dim=1) if more else tokens
