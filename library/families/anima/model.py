"""The Anima denoiser: Cosmos-Predict2's transformer and the adapter for its text, in the tree of its own files.

Module paths are the names of LoRA modules, and LyCORIS finds blocks by their class names; `keys` knows diffusers'
names.

Shape letters in this file: B images, S tokens of the image, L and T tokens of the text for Qwen3 and for T5, C hidden
width, H heads, D width of one head, so that C = H * D. Times are sigmas, 0 (image) to 1 (noise).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.families.anima.adapter import AdapterShape, AnimaAdapter, Projections
from library.families.shared.packing import image_positions
from library.families.shared.tensor_names import count_list_blocks
from library.families.shared.transformer import (
    DenoiserWithTables,
    FinalLayer,
    TimestepEmbedding,
    WeightedRMSNorm,
    finite,
    modulated,
    rope,
    sdpa,
    sinusoids,
)

DENOISER_BLOCK = "Block"
PADDING = 4  # the last inputs of a token, which mark padding latents; an image has none
ROPE_THETA = 10000.0
STRETCH = 4.0  # positions are stretched for images this many times as wide as in the first training


@dataclass(frozen=True)
class AnimaShape:
    """The sizes of a model, read from the shapes of its tensors."""

    channels: int  # of the tokens of the latents
    hidden: int
    head: int
    context: int
    mlp: int
    modulation: int
    blocks: int
    adapter: AdapterShape

    @classmethod
    def of(cls, shapes: Mapping[str, Iterable[int]]) -> "AnimaShape":
        """Return sizes from tensor shapes by this model's keys. Raises KeyError naming the first missing key."""
        channels = tuple(shapes["final_layer.linear.weight"])[0]
        hidden, inputs = shapes["x_embedder.proj.1.weight"]
        if inputs != channels + PADDING:
            raise RuntimeError(f"x_embedder reads {inputs} numbers of a token, and {channels + PADDING} were expected")
        return cls(
            channels=channels,
            hidden=hidden,
            head=tuple(shapes["blocks.0.self_attn.q_norm.weight"])[0],
            context=tuple(shapes["blocks.0.cross_attn.k_proj.weight"])[1],
            mlp=tuple(shapes["blocks.0.mlp.layer1.weight"])[0],
            modulation=tuple(shapes["blocks.0.adaln_modulation_self_attn.1.weight"])[0],
            blocks=count_list_blocks(shapes, "blocks"),
            adapter=AdapterShape.of(shapes),
        )

    @property
    def axes(self) -> tuple[int, int, int]:
        side = self.head // 6 * 2
        return self.head - 2 * side, side, side

    @property
    def theta(self) -> float:
        # The frame is always 0, so one base serves all axes.
        side = self.axes[1]
        return ROPE_THETA * STRETCH ** (side / (side - 2))


class AnimaAttention(Projections):
    """Attention of the image's tokens over themselves, or over the text; the block calls the kernel."""

    def __init__(self, width: int, context: int, head: int):
        super().__init__(width, context, head)
        self.output_proj = nn.Linear(width, width, bias=False)


class AnimaMLP(nn.Module):
    """The layers after attention."""

    def __init__(self, hidden: int, mlp: int):
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(hidden, mlp, bias=False), nn.Linear(mlp, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(F.gelu(self.layer1(x)))


def modulation(sizes: AnimaShape, number: int) -> nn.Sequential:
    """Return layers that map the time embedding to `number` vectors."""
    narrow, wide = sizes.modulation, number * sizes.hidden
    down, up = nn.Linear(sizes.hidden, narrow, bias=False), nn.Linear(narrow, wide, bias=False)
    return nn.Sequential(nn.SiLU(), down, up)


class Block(nn.Module):
    """Self-attention, cross-attention to the text, MLP; each modulated by the time."""

    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = staticmethod(sdpa)

    def __init__(self, sizes: AnimaShape):
        super().__init__()
        self.self_attn = AnimaAttention(sizes.hidden, sizes.hidden, sizes.head)
        self.cross_attn = AnimaAttention(sizes.hidden, sizes.context, sizes.head)
        self.mlp = AnimaMLP(sizes.hidden, sizes.mlp)
        self.adaln_modulation_self_attn = modulation(sizes, 3)
        self.adaln_modulation_cross_attn = modulation(sizes, 3)
        self.adaln_modulation_mlp = modulation(sizes, 3)

    def forward(self, x: Tensor, temb: Tensor, shared: Tensor, context: Tensor, pe: Tensor) -> Tensor:
        """x [B, S, C], temb [B, C], shared [B, 3 * C], context [B, T, text channels], pe [2, S, D / 2] -> x."""
        shift, scale, gate = (self.adaln_modulation_self_attn(temb) + shared)[:, None].chunk(3, dim=-1)
        normed = modulated(x, shift, scale).to(x.dtype)
        attended = self.attend(*self.self_attn.qkv(normed, normed, pe, pe), None)
        x = x + gate * self.self_attn.output_proj(attended)
        shift, scale, gate = (self.adaln_modulation_cross_attn(temb) + shared)[:, None].chunk(3, dim=-1)
        normed = modulated(x, shift, scale).to(x.dtype)
        attended = self.attend(*self.cross_attn.qkv(normed, context), None)
        x = x + gate * self.cross_attn.output_proj(attended)
        shift, scale, gate = (self.adaln_modulation_mlp(temb) + shared)[:, None].chunk(3, dim=-1)
        return finite(x + gate * self.mlp(modulated(x, shift, scale).to(x.dtype)))


class PatchEmbed(nn.Module):
    """The projection before the blocks."""

    def __init__(self, sizes: AnimaShape):
        super().__init__()
        self.proj = nn.Sequential(nn.Identity(), nn.Linear(sizes.channels + PADDING, sizes.hidden, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S, channels] -> [B, S, C]. No token is padding."""
        return self.proj(F.pad(tokens, (0, PADDING)))


class Anima(DenoiserWithTables):
    """Anima (or a smaller one), depending on its sizes."""

    def __init__(self, sizes: AnimaShape):
        super().__init__()
        self.sizes = sizes
        self.x_embedder = PatchEmbed(sizes)
        hidden = sizes.hidden
        time = TimestepEmbedding(hidden, hidden, 3 * hidden, bias=False)  # the modulation that all blocks share
        self.t_embedder = nn.Sequential(nn.Identity(), time)
        self.t_embedding_norm = WeightedRMSNorm(hidden)
        self.llm_adapter = AnimaAdapter(sizes.adapter)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.blocks))
        last = nn.Linear(hidden, sizes.channels, bias=False)
        self.final_layer = FinalLayer(last, adaln_modulation=modulation(sizes, 2))

    def forward(  # noqa: PLR0913 - the text comes in four parts
        self,
        img: Tensor,
        size: tuple[int, int],
        txt: Tensor,
        txt_mask: Tensor,
        ids: Tensor,
        ids_mask: Tensor,
        times: Tensor,
    ) -> Tensor:
        """Predict noise minus image from packed noisy latents, packed with the channel last.

        img [B, S, channels], of `size` (height, width) in tokens; txt [B, L, width] of Qwen3 and txt_mask [B, L]; ids
        [B, T] of T5 and ids_mask [B, T], masks 1 or true for the tokens of the caption; times [B] in 0..1, float32.
        """
        dtype = self.t_embedding_norm.weight.dtype
        context = self.llm_adapter(txt.to(dtype), txt_mask, ids, ids_mask)
        waves = sinusoids(times, self.sizes.hidden, scale=1.0)
        shared = self.t_embedder(waves.to(dtype))
        temb = self.t_embedding_norm(waves).to(dtype)
        x, pe = self.x_embedder(img.to(dtype)), self.positions(*size, img.device)
        for block in self.blocks:
            x = block(x, temb, shared, context, pe)
        return self.final_layer(x, temb, shared[:, : 2 * self.sizes.hidden])

    def as_one_graph(self) -> None:
        super().as_one_graph()
        self.llm_adapter.tables.keeps = False

    def positions(self, height: int, width: int, device: torch.device) -> Tensor:
        """Return the RoPE table for an image with this number of tokens [2, S, D / 2], cached by size."""
        return self._tables.of(
            (height, width),
            device,
            lambda: rope(image_positions(height, width, device), self.sizes.axes, self.sizes.theta),
        )
