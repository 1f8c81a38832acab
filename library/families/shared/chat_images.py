"""Images in the chat that a vision encoder of Qwen's reads: their patches, and the positions of words and images."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MERGED = 2  # patches of a token's side
FRAMES = 2  # frames that an image stands for: the encoders read videos, too
MULTIPLE = 32  # sides of reference images are multiples of this many pixels, as in the pipelines
Size = tuple[int, int]


class ImagePatches(NamedTuple):
    """An image as input of a text encoder."""

    patches: Tensor  # [rows * columns, 3 * FRAMES * side * side], the four of a token in a row
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        return self.rows * self.columns // MERGED**2


def scaled_size(size: Size, area: int) -> Size:
    """Return width and height of about `area` pixels with nearly the proportions of `size`."""
    width = math.sqrt(area * size[0] / size[1])
    height = width * size[1] / size[0]
    return max(MULTIPLE, round(width / MULTIPLE) * MULTIPLE), max(MULTIPLE, round(height / MULTIPLE) * MULTIPLE)


def cut_pixels(colours: Tensor, side: int) -> ImagePatches:
    """Cut pixels [H, W, 3] of whole tokens into patches of `side` pixels."""
    rows, columns = colours.shape[0] // side, colours.shape[1] // side
    cut = colours.view(rows // MERGED, MERGED, side, columns // MERGED, MERGED, side, 3)
    patches = cut.permute(0, 3, 1, 4, 6, 2, 5)[..., None, :, :].expand(*(-1,) * 5, FRAMES, -1, -1)
    return ImagePatches(patches.reshape(rows * columns, -1), rows, columns)


# Why: docs/decisions/2026-11-23-pictures-in-the-prompt.md
def chat_positions(ids: Sequence[int], picture: int, images: Iterable[ImagePatches]) -> Tensor:
    """Return frame, row and column of each token [3, L]: words count on all three axes alike, images from where they
    begin.

    `ids` contains the token `picture` once per image token.
    """
    grids, index, position, remaining = [], 0, 0, iter(images)
    while index < len(ids):
        if ids[index] != picture:
            grids.append(torch.full((3, 1), position))
            index, position = index + 1, position + 1
            continue
        image = next(remaining)
        rows, columns = image.rows // MERGED, image.columns // MERGED
        grid = torch.meshgrid(torch.zeros(1).long(), torch.arange(rows), torch.arange(columns), indexing="ij")
        grids.append(torch.stack([axis.flatten() for axis in grid]) + position)
        index, position = index + image.tokens, position + max(rows, columns)
    return torch.cat(grids, dim=1)


class SeeingModel(nn.Module):
    """A language model without its last layer or its norm, and a vision encoder, both of Qwen2.5-VL or Qwen3-VL."""

    def __init__(self, language: Any, visual: Any):
        super().__init__()
        self.language, self.visual = language, visual

    def forward(self, ids: Tensor, places: Tensor, picture: int, images: Sequence[ImagePatches]) -> Tensor:
        """Token ids [B, L], positions [3, B, L], the images of all rows in turn -> last hidden states [B, L, C]."""
        states, more = self.language.embed_tokens(ids), {}
        if images:
            device, is_picture = ids.device, ids == picture
            grid = torch.tensor([(1, image.rows, image.columns) for image in images], device=device)
            patches = torch.cat([image.patches for image in images]).to(device, states.dtype)
            seen = self.visual(patches, grid_thw=grid)
            states = states.masked_scatter(is_picture[..., None], seen.pooler_output.to(states.dtype))
            if deepstack := getattr(seen, "deepstack_features", None):  # of Qwen3-VL
                more = {"visual_pos_masks": is_picture, "deepstack_visual_embeds": list(deepstack)}
        return self.language(inputs_embeds=states, position_ids=places, **more).last_hidden_state
