"""The Z-Image denoiser, in the tree of diffusers and of other trainers' LoRA files.

Module paths are the names of LoRA modules; `keys` handles files with other names.

Shape letters in this file: B images, S tokens (I of the image, L of the text, both with their padding), C hidden width,
H heads, D width of one head, so that C = H * D. Times run from 0 (noise) to 1 (image), unlike sigmas.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.families.shared.packing import image_positions
from library.families.shared.tensor_names import count_list_blocks
from library.families.shared.transformer import (
    TIME_CHANNELS,
    DenoiserWithTables,
    FinalLayer,
    WeightedRMSNorm,
    finite,
    projections,
    rope,
    rotate_pairs,
    sdpa,
    sinusoids,
)

NORM_EPS = 1e-5
ROPE_THETA = 256.0
MULTIPLE = 32  # text and image tokens are padded to multiples of this; the padding is visible
PATCH = "2-1"  # part of names: a token is 2 by 2 latents of 1 frame


@dataclass(frozen=True)
class ZImageShape:
    """The sizes of a model, read from the shapes of its tensors."""

    in_channels: int
    text_channels: int
    hidden: int
    head: int
    mlp: int
    time: tuple[int, int]  # widths of the MLP behind the sinusoids
    layers: int
    noise_refiners: int
    context_refiners: int

    @classmethod
    def of(cls, shapes: Mapping[str, Iterable[int]]) -> "ZImageShape":
        """Return sizes from tensor shapes by this model's keys. Raises KeyError naming the first missing key."""
        hidden, in_channels = shapes[f"all_x_embedder.{PATCH}.weight"]
        middle, last = (tuple(shapes[f"t_embedder.mlp.{n}.weight"])[0] for n in (0, 2))
        return cls(
            in_channels=in_channels,
            text_channels=tuple(shapes["cap_embedder.1.weight"])[1],
            hidden=hidden,
            head=tuple(shapes["layers.0.attention.norm_q.weight"])[0],
            mlp=tuple(shapes["layers.0.feed_forward.w1.weight"])[0],
            time=(middle, last),
            **{
                name: number
                for (_, name), number in zip(CONTAINERS.values(), count_zimage_blocks(shapes).values(), strict=True)
            },
        )

    @property
    def axes(self) -> tuple[int, int, int]:
        """The share of a head's width that each axis of a position gets: of 128 (32, 48, 48)."""
        if self.head % 16:
            raise ValueError(f"a head of width {self.head} cannot be shared by three axes; it must be a multiple of 16")
        return self.head // 4, 3 * self.head // 8, 3 * self.head // 8


# Class of blocks -> the list that holds them, and their number in ZImageShape.
CONTAINERS = {
    "ZImageNoiseRefiner": ("noise_refiner", "noise_refiners"),
    "ZImageContextRefiner": ("context_refiner", "context_refiners"),
    "ZImageTransformerBlock": ("layers", "layers"),
}


def count_zimage_blocks(names: Iterable[str]) -> dict[str, int]:
    """Return the number of blocks of each class in a transformer, from its keys."""
    names = list(names)
    return {kind: count_list_blocks(names, container) for kind, (container, _) in CONTAINERS.items()}


class ZImageAttention(nn.Module):
    """Self-attention of one row of tokens; the block calls the kernel."""

    def __init__(self, hidden: int, head: int):
        super().__init__()
        self.norm_q, self.norm_k = WeightedRMSNorm(head, NORM_EPS), WeightedRMSNorm(head, NORM_EPS)
        self.to_q, self.to_k, self.to_v = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(hidden, hidden, bias=False)])

    def qkv(self, x: Tensor, pe: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, C] -> q, k (normed and rotated) and v, each [B, H, S, D]."""
        q, k, v = (
            output.unflatten(-1, (-1, self.norm_q.weight.shape[0])).transpose(1, 2)
            for output in projections(x, self.to_q, self.to_k, self.to_v)
        )
        return rotate_pairs(self.norm_q(q), pe).to(v.dtype), rotate_pairs(self.norm_k(k), pe).to(v.dtype), v


class ZImageMLP(nn.Module):
    """The gated layers after attention."""

    def __init__(self, hidden: int, mlp: int):
        super().__init__()
        self.w1, self.w3 = nn.Linear(hidden, mlp, bias=False), nn.Linear(hidden, mlp, bias=False)
        self.w2 = nn.Linear(mlp, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, C] -> [B, S, C]."""
        gate, value = projections(x, self.w1, self.w3)
        return self.w2(F.silu(gate) * value)


class ZImageLayers(nn.Module):
    """Common layers of all blocks."""

    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = staticmethod(sdpa)

    def __init__(self, sizes: ZImageShape):
        super().__init__()
        hidden = sizes.hidden
        self.attention = ZImageAttention(hidden, sizes.head)
        self.feed_forward = ZImageMLP(hidden, sizes.mlp)
        self.attention_norm1, self.ffn_norm1 = WeightedRMSNorm(hidden, NORM_EPS), WeightedRMSNorm(hidden, NORM_EPS)
        self.attention_norm2, self.ffn_norm2 = WeightedRMSNorm(hidden, NORM_EPS), WeightedRMSNorm(hidden, NORM_EPS)

    def refined(self, x: Tensor, pe: Tensor, mask: Tensor, modulation: tuple[Tensor, ...] | None) -> Tensor:
        """Return the tokens after attention and MLP; `modulation` has scale and gate of both, each [B, 1, C]."""
        scale1, gate1, scale2, gate2 = modulation or (None,) * 4
        normed = self.attention_norm1(x).to(x.dtype)
        normed = normed if scale1 is None else normed * (1 + scale1)
        output = self.attention.to_out[0](self.attend(*self.attention.qkv(normed, pe), mask))
        output = self.attention_norm2(output).to(x.dtype)
        x = x + (output if gate1 is None else gate1.tanh() * output)
        normed = self.ffn_norm1(x).to(x.dtype)
        normed = normed if scale2 is None else normed * (1 + scale2)
        output = self.ffn_norm2(self.feed_forward(normed)).to(x.dtype)
        return finite(x + (output if gate2 is None else gate2.tanh() * output))


class ZImageContextRefiner(ZImageLayers):
    """A block for the text alone, without modulation by the timestep."""

    def forward(self, x: Tensor, pe: Tensor, mask: Tensor) -> Tensor:
        """x [B, L, C], pe [2, 1, 1, L, D / 2], mask [B, L] -> x."""
        return self.refined(x, pe, mask, None)


class ZImageTransformerBlock(ZImageLayers):
    """A block modulated by the time."""

    def __init__(self, sizes: ZImageShape):
        super().__init__(sizes)
        self.adaLN_modulation = nn.Sequential(nn.Linear(sizes.time[1], 4 * sizes.hidden))

    def forward(self, x: Tensor, temb: Tensor, pe: Tensor, mask: Tensor) -> Tensor:
        """x [B, S, C], temb [B, 256], pe [2, B, 1, S, D / 2], mask [B, S] -> x."""
        return self.refined(x, pe, mask, self.adaLN_modulation(temb)[:, None].chunk(4, dim=-1))


class ZImageNoiseRefiner(ZImageTransformerBlock):
    """A modulated block for the image alone."""


class ZImageTimeMLP(nn.Module):
    """The conditioning vector."""

    def __init__(self, middle: int, last: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(TIME_CHANNELS, middle), nn.SiLU(), nn.Linear(middle, last))

    def forward(self, times: Tensor) -> Tensor:
        """[B] in 0..1 -> [B, 256]."""
        return self.mlp(sinusoids(times).to(next(self.parameters()).dtype))


class RopeTables(NamedTuple):
    """RoPE tables of cosines and sines [2, ...] for one size of image and one length of text."""

    image: Tensor  # [2, I, D / 2], of an image whose first axis is 0
    inside: Tensor  # [I]: whether a token belongs to the image, and is no padding
    text: Tensor  # [2, L, D / 2]
    first: Tensor  # [2, L + 2, first axis / 2], of the first axis alone

    def of_images(self, start: Tensor) -> Tensor:
        """Return the table of images that begin at `start` [B] on the first axis: [2, B, 1, I, D / 2]."""
        start_tables = self.first[:, torch.where(self.inside, start[:, None], 0)]
        other_axes = self.image[:, None, :, start_tables.shape[-1] :].expand(-1, len(start), -1, -1)
        return torch.cat((start_tables, other_axes), dim=-1)[:, :, None]

    def of_texts(self) -> Tensor:
        """Return the table of all texts, [2, 1, 1, L, D / 2]."""
        return self.text[:, None, None]


class ZImage(DenoiserWithTables):
    """Z-Image (or a smaller one), depending on its sizes."""

    def __init__(self, sizes: ZImageShape):
        super().__init__()
        self.sizes = sizes
        self.axes = sizes.axes
        self.x_pad_token = nn.Parameter(torch.zeros(1, sizes.hidden))
        self.cap_pad_token = nn.Parameter(torch.zeros(1, sizes.hidden))
        self.t_embedder = ZImageTimeMLP(*sizes.time)
        self.all_x_embedder = nn.ModuleDict({PATCH: nn.Linear(sizes.in_channels, sizes.hidden)})
        norm = WeightedRMSNorm(sizes.text_channels, NORM_EPS)
        self.cap_embedder = nn.Sequential(norm, nn.Linear(sizes.text_channels, sizes.hidden))
        self.noise_refiner = nn.ModuleList(ZImageNoiseRefiner(sizes) for _ in range(sizes.noise_refiners))
        self.context_refiner = nn.ModuleList(ZImageContextRefiner(sizes) for _ in range(sizes.context_refiners))
        self.layers = nn.ModuleList(ZImageTransformerBlock(sizes) for _ in range(sizes.layers))
        last, scale = nn.Linear(sizes.hidden, sizes.in_channels), nn.Linear(sizes.time[1], sizes.hidden)
        final = FinalLayer(last, adaLN_modulation=nn.Sequential(nn.SiLU(), scale))
        self.all_final_layer = nn.ModuleDict({PATCH: final})

    def forward(self, img: Tensor, size: tuple[int, int], txt: Tensor, txt_mask: Tensor, times: Tensor) -> Tensor:
        """Predict image minus noise from packed noisy latents, packed alike.

        img [B, I without padding, in channels], of `size` (height, width) in tokens; txt [B, any, text channels];
        txt_mask [B, the same], 1 or true for the tokens of the caption; times [B] in 0..1, float32.
        """
        dtype = self.x_pad_token.dtype
        temb = self.t_embedder(times)
        number, count = img.shape[:2]
        gap = -txt.shape[1] % MULTIPLE
        txt, txt_mask = F.pad(txt, (0, 0, 0, gap)), F.pad(txt_mask, (0, gap))
        positions = self.positions(*size, txt.shape[1], img.device)
        img = self.all_x_embedder[PATCH](img.to(dtype))
        padding = self.x_pad_token.to(img.dtype).expand(number, len(positions.inside) - count, -1)
        img = torch.cat((img, padding), dim=1)
        is_caption = txt_mask.to(torch.bool)
        txt = self.cap_embedder[1](self.cap_embedder[0](txt).to(dtype))
        txt = torch.where(is_caption[..., None], txt, self.cap_pad_token.to(txt.dtype))

        lengths = (is_caption.sum(1) + MULTIPLE - 1) // MULTIPLE * MULTIPLE  # of each caption with its visible padding
        is_visible = torch.arange(txt.shape[1], device=txt.device) < lengths[:, None]
        everywhere = torch.ones(img.shape[:2], dtype=torch.bool, device=img.device)
        images, texts = positions.of_images(lengths + 1), positions.of_texts()
        for block in self.noise_refiner:
            img = block(img, temb, images, everywhere)
        for block in self.context_refiner:
            txt = block(txt, texts, is_visible)
        joint = torch.cat((img, txt.to(img.dtype)), dim=1)
        pe = torch.cat((images, texts.expand(-1, number, -1, -1, -1)), dim=3)
        mask = torch.cat((everywhere, is_visible), dim=1)
        for block in self.layers:
            joint = block(joint, temb, pe, mask)
        return self.all_final_layer[PATCH](joint[:, :count], temb)

    def positions(self, height: int, width: int, length: int, device: torch.device) -> RopeTables:
        """Return the RoPE tables for an image and a text with these numbers of tokens, cached by size."""
        return self._tables.of(
            (height, width, length), device, lambda: rope_tables(height, width, length, device, self.axes)
        )


def rope_tables(height: int, width: int, length: int, device: torch.device, axes: tuple[int, int, int]) -> RopeTables:
    """Return the RoPE tables: text counts from 1 on the first axis, its image continues there, with rows and columns;
    padding of the image is at 0.
    """
    count = height * width
    padded = -(-count // MULTIPLE) * MULTIPLE
    grid = image_positions(height, width, device)
    image = torch.cat((grid, grid.new_zeros(padded - count, 3)))
    firsts = torch.arange(length + 2, device=device)[:, None]
    text = torch.cat((firsts[1:-1], firsts.new_zeros(length, 2)), dim=1)
    return RopeTables(
        rope(image, axes, ROPE_THETA),
        torch.arange(padded, device=device) < count,
        rope(text, axes, ROPE_THETA),
        rope(firsts, axes[:1], ROPE_THETA),
    )
