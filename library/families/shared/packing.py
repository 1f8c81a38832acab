"""Latents as a sequence of tokens: patches of 2 by 2 latent pixels, and their positions."""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor


def token_grid(latents: Tensor) -> tuple[int, int]:
    """Return height and width in tokens of latents [..., 2 h, 2 w]."""
    return latents.shape[-2] // 2, latents.shape[-1] // 2


def pack(latents: Tensor) -> Tensor:
    """Latents [B, C, 2 h, 2 w] -> tokens [B, h * w, 4 C]; inside a token the order is channel, row, column."""
    return latents.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Tokens [B, h * w, 4 C] -> latents [B, C, 2 h, 2 w]; `height` and `width` count tokens."""
    squares = tokens.unflatten(1, (height, width)).unflatten(-1, (-1, 2, 2))
    return squares.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def pack_with_references(latents: Tensor, references: Sequence[Tensor]) -> tuple[Tensor, tuple[tuple[int, int], ...]]:
    """Pack latents [B, C, 2 h, 2 w] of an image, then those of reference images; return the tokens of all in turn [B,
    I, 4 C], and height and width of each in tokens.
    """
    images = [latents, *(reference.to(latents).expand(len(latents), -1, -1, -1) for reference in references)]
    sizes = tuple(map(token_grid, images))
    return torch.cat([pack(image) for image in images], dim=1), sizes


def pack_channels_last(latents: Tensor) -> Tensor:
    """Latents [B, C, 2 h, 2 w] -> tokens [B, h * w, 4 C]; inside a token the order is row, column, channel."""
    return latents.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2)).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpack_channels_last(tokens: Tensor, height: int, width: int) -> Tensor:
    """Tokens [B, h * w, 4 C] -> latents [B, C, 2 h, 2 w]; `height` and `width` count tokens."""
    squares = tokens.unflatten(1, (height, width)).unflatten(-1, (2, 2, -1))
    return squares.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def image_positions(height: int, width: int, device: torch.device) -> Tensor:
    """Return positions of an image's tokens [h * w, 3]: (0, row, column), float32."""
    ids = torch.zeros(height, width, 3, device=device)
    ids[..., 1] = torch.arange(height, dtype=torch.float32, device=device)[:, None]
    ids[..., 2] = torch.arange(width, dtype=torch.float32, device=device)
    return ids.flatten(0, 1)


def centred_positions(frame: int, size: tuple[int, int], device: torch.device) -> Tensor:
    """Return positions of an image's tokens [h * w, 3]: (frame, row, column), float32, counted from its centre."""
    height, width = size
    rows = torch.arange(height, device=device) - (height - height // 2)
    columns = torch.arange(width, device=device) - (width - width // 2)
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1)
    return torch.cat((torch.full_like(places[:, :1], frame), places), dim=1).float()


class Positions:
    """Position tensors, cached by size: the denoiser caches its RoPE tables by the identity of these tensors."""

    MAX_PACKED = 64

    def __init__(self) -> None:
        self._known: dict[Hashable, Tensor] = {}

    def image(
        self, height: int, width: int, device: torch.device, references: Sequence[tuple[int, int]] = ()
    ) -> Tensor:
        """Return positions of an image's tokens [h * w, 3], then those of reference images, whose first coordinate is
        1, 2 and so on.
        """

        def make() -> Tensor:
            per_image = [image_positions(*size, device) for size in ((height, width), *references)]
            for number, positions in enumerate(per_image):
                positions[:, 0] = number
            return torch.cat(per_image)

        return self._cached(("image", height, width, device, *references), make)

    def text(self, length: int, device: torch.device) -> Tensor:
        """Return positions of a text [L, 3], all zero."""
        # Text encodings already contain the order.
        return self._cached(("text", length, device), lambda: torch.zeros(length, 3, device=device))

    def _cached(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._known:
            if len(self._known) >= self.MAX_PACKED:
                self._known.clear()
            # A tensor created for sample images is also used in training, which rejects inference tensors.
            with torch.inference_mode(False):
                self._known[key] = make()
        return self._known[key]
