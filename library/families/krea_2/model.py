"""The Krea 2 denoiser, in the tree of its own files; `keys` handles those of diffusers, and LyCORIS finds blocks by
their class names.

Shape letters in this file: B images, S tokens (I of the image, L of the text), T layers of the text encoder, C width of
the tokens, H heads, G heads of keys and values, D width of one head, so that C = H * D.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.families.shared.packing import image_positions
from library.families.shared.tensor_names import count_list_blocks
from library.families.shared.transformer import (
    TIME_CHANNELS,
    DenoiserWithTables,
    finite,
    grouped_sdpa,
    projections,
    rope,
    rotate_pairs,
    sinusoids,
)

KREA_2_EPS = 1e-5
KREA_2_THETA = 1000.0
BLOCK, LAYERWISE, REFINER = "SingleDiTBlock", "Krea2LayerwiseBlock", "Krea2RefinerBlock"
# Class of blocks -> the list that holds them.
CONTAINERS = {
    LAYERWISE: "txtfusion.layerwise_blocks",
    REFINER: "txtfusion.refiner_blocks",
    BLOCK: "blocks",
}


@dataclass(frozen=True)
class Krea2Stack:
    """The sizes of blocks of one width."""

    hidden: int
    head: int
    key_values: int  # width of all heads of keys, and of values
    mlp: int

    @classmethod
    def of(cls, shapes: Mapping[str, Iterable[int]], block: str) -> "Krea2Stack":
        """Return the sizes from those of one block. Raises KeyError naming the first missing key."""
        key_values, hidden = shapes[f"{block}.attn.wk.weight"]
        return cls(
            hidden=hidden,
            head=tuple(shapes[f"{block}.attn.qknorm.qnorm.scale"])[0],
            key_values=key_values,
            mlp=tuple(shapes[f"{block}.mlp.gate.weight"])[0],
        )


@dataclass(frozen=True)
class Krea2Shape:
    """The sizes of a model, read from the shapes of its tensors."""

    in_channels: int
    text_layers: int
    image: Krea2Stack
    text: Krea2Stack
    blocks: int
    layerwise: int
    refiners: int

    @classmethod
    def of(cls, shapes: Mapping[str, Iterable[int]]) -> "Krea2Shape":
        """Return sizes from tensor shapes by this model's keys. Raises KeyError naming the first missing key."""
        counts = count_krea_2_blocks(shapes)
        return cls(
            in_channels=tuple(shapes["first.weight"])[1],
            text_layers=tuple(shapes["txtfusion.projector.weight"])[1],
            image=Krea2Stack.of(shapes, "blocks.0"),
            text=Krea2Stack.of(shapes, f"{CONTAINERS[REFINER]}.0"),
            blocks=counts[BLOCK],
            layerwise=counts[LAYERWISE],
            refiners=counts[REFINER],
        )

    @property
    def axes(self) -> tuple[int, int, int]:
        """The share of a head's width that each axis of a position gets: of 128 (32, 48, 48)."""
        side = 6 * (self.image.head // 16)
        if self.image.head % 2 or not side:
            raise ValueError(f"a head of width {self.image.head} cannot be shared by three axes; 16 is the least")
        return self.image.head - 2 * side, side, side


def count_krea_2_blocks(names: Iterable[str]) -> dict[str, int]:
    """Return the number of blocks of each class in a transformer, from its keys."""
    names = list(names)
    return {kind: count_list_blocks(names, place) for kind, place in CONTAINERS.items()}


class Krea2Norm(nn.Module):
    """RMS norm in float32, whose stored scale is the distance from 1."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same in float32."""
        return F.rms_norm(x.float(), self.scale.shape, 1 + self.scale.float(), KREA_2_EPS)


class Krea2HeadNorms(nn.Module):
    """The norms of queries and keys."""

    def __init__(self, head: int):
        super().__init__()
        self.qnorm, self.knorm = Krea2Norm(head), Krea2Norm(head)


class Krea2Attention(nn.Module):
    """Self-attention with fewer heads of keys and values than of queries, and a gate on its output."""

    def __init__(self, sizes: Krea2Stack):
        super().__init__()
        hidden, narrow = sizes.hidden, sizes.key_values
        self.wq = nn.Linear(hidden, hidden, bias=False)
        self.wk, self.wv = nn.Linear(hidden, narrow, bias=False), nn.Linear(hidden, narrow, bias=False)
        self.gate = nn.Linear(hidden, hidden, bias=False)
        self.qknorm = Krea2HeadNorms(sizes.head)
        self.wo = nn.Linear(hidden, hidden, bias=False)

    def inputs(self, x: Tensor, pe: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[B, S, C] -> q [B, H, S, D], k and v [B, G, S, D], and the gate [B, S, C]. `pe` rotates q and k, if given."""
        q, k, v, gate = projections(x, self.wq, self.wk, self.wv, self.gate)
        head = self.qknorm.qnorm.scale.shape[0]
        q, k, v = (output.unflatten(-1, (-1, head)).transpose(1, 2) for output in (q, k, v))
        q, k = self.qknorm.qnorm(q), self.qknorm.knorm(k)
        if pe is not None:
            q, k = rotate_pairs(q, pe), rotate_pairs(k, pe)
        return q.to(v.dtype), k.to(v.dtype), v, gate


class Krea2MLP(nn.Module):
    """The gated layers after attention."""

    def __init__(self, sizes: Krea2Stack):
        super().__init__()
        self.gate = nn.Linear(sizes.hidden, sizes.mlp, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.mlp, bias=False)
        self.down = nn.Linear(sizes.mlp, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C]."""
        gate, value = projections(x, self.gate, self.up)
        return self.down(F.silu(gate) * value)


class Krea2Layers(nn.Module):
    """Common layers of all blocks."""

    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = staticmethod(grouped_sdpa)

    def __init__(self, sizes: Krea2Stack):
        super().__init__()
        self.prenorm, self.postnorm = Krea2Norm(sizes.hidden), Krea2Norm(sizes.hidden)
        self.attn = Krea2Attention(sizes)
        self.mlp = Krea2MLP(sizes)

    def attended(self, x: Tensor, pe: Tensor | None, mask: Tensor | None) -> Tensor:
        """Normed tokens [B, S, C] -> what attention adds to them."""
        q, k, v, gate = self.attn.inputs(x, pe)
        return self.attn.wo(self.attend(q, k, v, mask) * gate.sigmoid())

    def refined(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the tokens [B, S, C] after attention and MLP, without positions and modulation."""
        x = x + self.attended(self.prenorm(x).to(x.dtype), None, mask)
        return finite(x + self.mlp(self.postnorm(x).to(x.dtype)))


class Krea2LayerwiseBlock(Krea2Layers):
    """A block in which the layers of the text encoder attend to each other, for each token on its own."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, T, C] -> [B, L, T, C]."""
        return self.refined(x.flatten(0, 1), None).view(x.shape)


class Krea2RefinerBlock(Krea2Layers):
    """A block for the text alone, in which its tokens attend to each other."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x [B, L, C], mask [B, L] -> x."""
        return self.refined(x, mask)


class Krea2Modulation(nn.Module):
    """What a block, or the last layer, adds to the modulation by the timestep."""

    def __init__(self, *shape: int):
        super().__init__()
        self.lin = nn.Parameter(torch.zeros(shape))


class SingleDiTBlock(Krea2Layers):
    """A block over image and text, modulated by the timestep."""

    def __init__(self, sizes: Krea2Stack):
        super().__init__(sizes)
        self.mod = Krea2Modulation(6 * sizes.hidden)

    def forward(self, x: Tensor, modulation: Tensor, pe: Tensor, mask: Tensor) -> Tensor:
        """x [B, S, C], modulation [B, 6 * C], pe [2, S, D / 2], mask [B, S] -> x."""
        scale1, shift1, gate1, scale2, shift2, gate2 = (modulation + self.mod.lin)[:, None].chunk(6, dim=-1)
        x = x + gate1 * self.attended((1 + scale1) * self.prenorm(x).to(x.dtype) + shift1, pe, mask)
        return finite(x + gate2 * self.mlp((1 + scale2) * self.postnorm(x).to(x.dtype) + shift2))


class TextFusionBlock(nn.ModuleList):
    """Blocks of one kind of the text fusion. LyCORIS finds their layers by this name, which others have for a block."""


class Krea2TextFusion(nn.Module):
    """From the outputs of several layers of the text encoder to one state for each token."""

    def __init__(self, sizes: Krea2Shape):
        super().__init__()
        self.layerwise_blocks = TextFusionBlock(Krea2LayerwiseBlock(sizes.text) for _ in range(sizes.layerwise))
        self.projector = nn.Linear(sizes.text_layers, 1, bias=False)
        self.refiner_blocks = TextFusionBlock(Krea2RefinerBlock(sizes.text) for _ in range(sizes.refiners))

    def forward(self, txt: Tensor, mask: Tensor) -> Tensor:
        """txt [B, L, T, C], mask [B, L] -> [B, L, C]."""
        for block in self.layerwise_blocks:
            txt = block(txt)
        txt = self.projector(txt.transpose(2, 3)).squeeze(-1)
        for block in self.refiner_blocks:
            txt = block(txt, mask)
        return txt


class Krea2Last(nn.Module):
    """The modulated norm and the projection after the blocks."""

    def __init__(self, hidden: int, outputs: int):
        super().__init__()
        self.norm, self.linear = Krea2Norm(hidden), nn.Linear(hidden, outputs)
        self.modulation = Krea2Modulation(2, hidden)

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        """x [B, S, C], temb [B, C] -> [B, S, outputs]."""
        scale, shift = (temb[:, None] + self.modulation.lin).chunk(2, dim=1)
        return self.linear((1 + scale) * self.norm(x).to(x.dtype) + shift)


def _gelu() -> nn.Module:
    return nn.GELU(approximate="tanh")


class Krea2(DenoiserWithTables):
    """Krea 2 (or a smaller one), depending on its sizes."""

    def __init__(self, sizes: Krea2Shape):
        super().__init__()
        self.sizes, self.axes = sizes, sizes.axes
        hidden, text = sizes.image.hidden, sizes.text.hidden
        self.first = nn.Linear(sizes.in_channels, hidden)
        self.blocks = nn.ModuleList(SingleDiTBlock(sizes.image) for _ in range(sizes.blocks))
        self.tmlp = nn.Sequential(nn.Linear(TIME_CHANNELS, hidden), _gelu(), nn.Linear(hidden, hidden))
        self.txtfusion = Krea2TextFusion(sizes)
        self.txtmlp = nn.Sequential(Krea2Norm(text), nn.Linear(text, hidden), _gelu(), nn.Linear(hidden, hidden))
        self.last = Krea2Last(hidden, sizes.in_channels)
        self.tproj = nn.Sequential(_gelu(), nn.Linear(hidden, 6 * hidden))

    def forward(self, img: Tensor, size: tuple[int, int], txt: Tensor, txt_mask: Tensor, timesteps: Tensor) -> Tensor:
        """Predict the packed velocity of packed latents.

        img [B, I, in channels], of `size` (height, width) in tokens; txt [B, L, T, text channels]; txt_mask [B, L], 1
        or true for the tokens of the caption; timesteps [B] in 0..1, float32.
        """
        dtype, count = self.first.weight.dtype, img.shape[1]
        temb = self.tmlp(sinusoids(timesteps).to(dtype))
        modulation = self.tproj(temb)
        is_caption = txt_mask.to(torch.bool)
        fused = self.txtfusion(txt.to(dtype), is_caption)
        norm, first, gelu, last = self.txtmlp
        fused = last(gelu(first(norm(fused).to(fused.dtype))))
        joint = torch.cat((self.first(img.to(dtype)), fused), dim=1)
        everywhere = torch.ones(img.shape[:2], dtype=torch.bool, device=img.device)
        mask = torch.cat((everywhere, is_caption), dim=1)
        pe = self.positions(*size, txt.shape[1], img.device)
        for block in self.blocks:
            joint = block(joint, modulation, pe, mask)
        return self.last(joint[:, :count], temb)

    def positions(self, height: int, width: int, length: int, device: torch.device) -> Tensor:
        """Return the RoPE table [2, I + L, D / 2] of an image and a text with these numbers of tokens, cached by size.
        All tokens of the text are at 0.
        """

        def make() -> Tensor:
            text = torch.zeros(length, 3, device=device)
            return rope(torch.cat((image_positions(height, width, device), text)), self.axes, KREA_2_THETA)

        return self._tables.of((height, width, length), device, make)
