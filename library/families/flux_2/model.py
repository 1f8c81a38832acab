"""The FLUX.2 denoiser, in the tree of its own checkpoints.

Module paths are the keys of the single files (`double_blocks.0.img_attn.qkv.weight`) and the names of LoRA modules.
Fused matrices (q, k, v; q, k, v and MLP) stay fused. Nothing has a bias, and one modulation of each kind serves all
blocks.

Shape letters in this file: B images, S tokens (I of the image, L of the text, S = L + I), C hidden width, H heads, D
width of one head, so that C = H * D.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from library.families.shared import packing
from library.families.shared.double_stream import (
    BlockLayers,
    DoubleStreamBlock,
    LastLayer,
    MLPEmbedder,
    Modulation,
    PositionTables,
    SingleStreamBlock,
    count_stream_blocks,
)
from library.families.shared.transformer import TIME_CHANNELS, equal_axes, sinusoids

DOUBLE, SINGLE = DoubleStreamBlock.__name__, SingleStreamBlock.__name__
ROPE_THETA = 2000.0

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


@dataclass(frozen=True)
class Flux2Shape:
    """The sizes of a FLUX.2 model, read from the shapes of its tensors."""

    in_channels: int
    text_channels: int
    hidden: int
    head: int
    mlp: int
    double_blocks: int
    single_blocks: int
    guidance: bool

    @classmethod
    def of(cls, shapes: Mapping[str, Iterable[int]]) -> "Flux2Shape":
        """Return sizes from tensor shapes by single-file key. Raises KeyError naming the first missing key."""
        hidden, in_channels = shapes["img_in.weight"]
        return cls(
            in_channels=in_channels,
            text_channels=tuple(shapes["txt_in.weight"])[1],
            hidden=hidden,
            head=tuple(shapes["double_blocks.0.img_attn.norm.query_norm.scale"])[0],
            mlp=tuple(shapes["double_blocks.0.img_mlp.2.weight"])[1],
            double_blocks=count_stream_blocks(shapes, "double_blocks"),
            single_blocks=count_stream_blocks(shapes, "single_blocks"),
            guidance="guidance_in.in_layer.weight" in shapes,
        )

    @property
    def axes(self) -> tuple[int, ...]:
        """The share of a head's width that each axis of a position gets: (image, row, column, word)."""
        return equal_axes(self.head)


class Flux2(PositionTables, nn.Module):
    """FLUX.2 klein, or dev, depending on its sizes."""

    theta = ROPE_THETA

    def __init__(self, sizes: Flux2Shape):
        super().__init__()
        hidden = sizes.hidden
        layers = BlockLayers(hidden, sizes.head, sizes.mlp, external_modulation=True, bias=False, gated=True)
        self.sizes = sizes
        self.axes = sizes.axes
        self.img_in = nn.Linear(sizes.in_channels, hidden, bias=False)
        self.txt_in = nn.Linear(sizes.text_channels, hidden, bias=False)
        self.time_in = MLPEmbedder(TIME_CHANNELS, hidden, bias=False)
        self.guidance_in = MLPEmbedder(TIME_CHANNELS, hidden, bias=False) if sizes.guidance else None
        self.double_stream_modulation_img = Modulation(hidden, 2, bias=False)
        self.double_stream_modulation_txt = Modulation(hidden, 2, bias=False)
        self.single_stream_modulation = Modulation(hidden, 1, bias=False)
        self.double_blocks = nn.ModuleList(DoubleStreamBlock(layers) for _ in range(sizes.double_blocks))
        self.single_blocks = nn.ModuleList(SingleStreamBlock(layers) for _ in range(sizes.single_blocks))
        self.final_layer = LastLayer(hidden, sizes.in_channels, bias=False)

    def forward(  # noqa: PLR0913 - the inputs and conditions of the model
        self,
        img: Tensor,
        img_ids: Tensor,
        txt: Tensor,
        txt_ids: Tensor,
        timesteps: Tensor,
        guidance: Tensor | None = None,
    ) -> Tensor:
        """Predict the packed velocity of packed latents.

        img [B, I, in channels]; img_ids [I, 4] and txt_ids [L, 4], positions shared by the batch; txt [B, L, text
        channels]; timesteps [B] in 0..1 and guidance [B], float32, unused by klein.
        """
        vec = self.time_in(sinusoids(timesteps))
        if self.guidance_in is not None and guidance is not None:
            vec = vec + self.guidance_in(sinusoids(guidance))
        halves = self.double_stream_modulation_img(vec), self.double_stream_modulation_txt(vec)
        double = torch.cat(halves, dim=-1)[:, 0].unflatten(-1, (12, -1))  # of the image, then of the text
        single = self.single_stream_modulation(vec)[:, 0].unflatten(-1, (3, -1))
        img = self.img_in(img.to(self.img_in.weight.dtype))
        txt = self.txt_in(txt.to(self.txt_in.weight.dtype))
        pe = self.positions(txt_ids, img_ids)
        for block in self.double_blocks:
            img, txt = block(img, txt, double, pe)
        joint = torch.cat((txt, img), dim=1)
        for block in self.single_blocks:
            joint = block(joint, single, pe)
        return self.final_layer(joint[:, txt.shape[1] :], vec)
