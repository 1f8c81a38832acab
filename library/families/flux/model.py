"""The FLUX.1 denoiser and Chroma's, in the tree of their own checkpoints.

Module paths are the keys of the single files (`double_blocks.0.img_attn.qkv.weight`) and the names of LoRA modules, so
loading and saving rename nothing. Fused matrices (q, k, v; q, k, v and MLP) stay fused.

Shape letters in this file: B images, S tokens (I of the image, L of the text, S = L + I), C hidden width, H heads, D
width of one head, so that C = H * D.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from library.families.shared.double_stream import (
    BlockLayers,
    DoubleStreamBlock,
    LastLayer,
    MLPEmbedder,
    PositionTables,
    RMSNorm,
    SingleStreamBlock,
    count_stream_blocks,
)
from library.families.shared.transformer import TIME_CHANNELS, rope_axes, sinusoids

APPROXIMATOR = "distilled_guidance_layer"


@dataclass(frozen=True)
class Sizes:
    """The sizes and variants of a FLUX model, read from the shapes of its tensors."""

    in_channels: int
    out_channels: int
    vector_channels: int
    text_channels: int
    hidden: int
    head: int
    mlp: int
    double_blocks: int
    single_blocks: int
    guidance: bool
    approximator: tuple[int, int, int] | None = None  # Chroma's: input channels, width, layers

    @classmethod
    def of(cls, shapes: Mapping[str, Iterable[int]]) -> "Sizes":
        """Return sizes from tensor shapes by single-file key. Raises KeyError naming the first missing key."""
        hidden, in_channels = shapes["img_in.weight"]
        approximator = None
        if f"{APPROXIMATOR}.in_proj.weight" in shapes:
            width, inputs = shapes[f"{APPROXIMATOR}.in_proj.weight"]
            approximator = inputs, width, count_stream_blocks(shapes, f"{APPROXIMATOR}.layers")
        return cls(
            in_channels=in_channels,
            out_channels=tuple(shapes["final_layer.linear.weight"])[0],
            vector_channels=0 if approximator else tuple(shapes["vector_in.in_layer.weight"])[1],
            text_channels=tuple(shapes["txt_in.weight"])[1],
            hidden=hidden,
            head=tuple(shapes["double_blocks.0.img_attn.norm.query_norm.scale"])[0],
            mlp=tuple(shapes["double_blocks.0.img_mlp.0.weight"])[0],
            double_blocks=count_stream_blocks(shapes, "double_blocks"),
            single_blocks=count_stream_blocks(shapes, "single_blocks"),
            guidance="guidance_in.in_layer.weight" in shapes,
            approximator=approximator,
        )

    @property
    def is_schnell(self) -> bool:
        return not self.guidance and self.approximator is None

    @property
    def axes(self) -> tuple[int, int, int]:
        return rope_axes(self.head)


class Approximator(nn.Module):
    """Chroma's network that replaces all modulations of FLUX.1: it computes a vector for each of their outputs.

    Distilled from them and never trained, so no gradients are computed for it.
    """

    def __init__(self, channels: int, width: int, layers: int, hidden: int):
        super().__init__()
        self.channels = channels
        self.in_proj = nn.Linear(channels, width)
        self.layers = nn.ModuleList(MLPEmbedder(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(layers))
        self.out_proj = nn.Linear(width, hidden)

    @torch.no_grad()
    def forward(self, timesteps: Tensor, count: int) -> Tensor:
        """Timesteps [B] in 0..1 -> `count` vectors [B, count, C], each from its index, the time and guidance 0."""
        quarter = self.channels // 4
        time, guidance = sinusoids(timesteps, quarter), sinusoids(torch.zeros_like(timesteps), quarter)
        numbers = sinusoids(torch.arange(count, device=timesteps.device), 2 * quarter)
        per_image = torch.cat((time, guidance), dim=-1)[:, None].expand(-1, count, -1)
        x = torch.cat((per_image, numbers.expand(len(timesteps), -1, -1)), dim=-1)
        x = self.in_proj(x.to(self.in_proj.weight.dtype))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return self.out_proj(x)


class Flux(PositionTables, nn.Module):
    """FLUX.1 dev or schnell (or a smaller one), or Chroma, depending on its sizes."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        external_modulation = sizes.approximator is not None
        layers = BlockLayers(sizes.hidden, sizes.head, sizes.mlp, external_modulation)
        self.sizes = sizes
        self.axes = sizes.axes
        self.img_in = nn.Linear(sizes.in_channels, sizes.hidden)
        if sizes.approximator:
            self.distilled_guidance_layer = Approximator(*sizes.approximator, sizes.hidden)
        else:
            self.time_in = MLPEmbedder(TIME_CHANNELS, sizes.hidden)
            self.vector_in = MLPEmbedder(sizes.vector_channels, sizes.hidden)
        self.guidance_in = MLPEmbedder(TIME_CHANNELS, sizes.hidden) if sizes.guidance else None
        self.txt_in = nn.Linear(sizes.text_channels, sizes.hidden)
        self.double_blocks = nn.ModuleList(DoubleStreamBlock(layers) for _ in range(sizes.double_blocks))
        self.single_blocks = nn.ModuleList(SingleStreamBlock(layers) for _ in range(sizes.single_blocks))
        self.final_layer = LastLayer(sizes.hidden, sizes.out_channels, external_modulation=external_modulation)

    def forward(  # noqa: PLR0913 - the inputs and conditions of the model
        self,
        img: Tensor,
        img_ids: Tensor,
        txt: Tensor,
        txt_ids: Tensor,
        timesteps: Tensor,
        y: Tensor,
        guidance: Tensor | None = None,
        txt_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Predict the packed velocity of packed latents.

        img [B, I, in channels]; img_ids [I, 3] and txt_ids [L, 3], positions shared by the batch; txt [B, L, text
        channels]; timesteps [B] in 0..1 and guidance [B], float32; y [B, vector channels], unused by Chroma;
        txt_attention_mask [B, L], 1 or true where text is visible, None for all. A model without guidance ignores it.
        """
        doubles, singles, last = self.vectors(timesteps, y, guidance)
        img = self.img_in(img.to(self.img_in.weight.dtype))
        txt = self.txt_in(txt.to(self.txt_in.weight.dtype))
        pe = self.positions(txt_ids, img_ids)
        masks = () if txt_attention_mask is None else (self.joint_mask(txt_attention_mask, img),)

        for block, vec in zip(self.double_blocks, doubles, strict=True):
            img, txt = block(img, txt, vec, pe, *masks)

        joint = torch.cat((txt, img), dim=1)
        for block, vec in zip(self.single_blocks, singles, strict=True):
            joint = block(joint, vec, pe, *masks)

        return self.final_layer(joint[:, txt.shape[1] :], last)

    def vectors(
        self, timesteps: Tensor, y: Tensor, guidance: Tensor | None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor]:
        """Return the conditioning of each double block, each single block and the last layer."""
        double, single = self.sizes.double_blocks, self.sizes.single_blocks
        if not self.sizes.approximator:
            vec = self.conditioning(timesteps, y, guidance)
            return [vec] * double, [vec] * single, vec
        # Single blocks come first, then the image's half of the double blocks, the text's, and the last layer.
        counts = (3 * single, 6 * double, 6 * double, 2)
        of_single, of_img, of_txt, last = self.distilled_guidance_layer(timesteps, sum(counts)).split(counts, dim=1)
        halves = (rows.unflatten(1, (double, 6)) for rows in (of_img, of_txt))
        return torch.cat(tuple(halves), dim=2).unbind(1), of_single.unflatten(1, (single, 3)).unbind(1), last

    def conditioning(self, timesteps: Tensor, y: Tensor, guidance: Tensor | None) -> Tensor:
        """Return time, guidance and pooled text as one vector [B, C]."""
        vec = self.time_in(sinusoids(timesteps)) + self.vector_in(y)
        if self.guidance_in is None or guidance is None:
            return vec
        return vec + self.guidance_in(sinusoids(guidance))

    @staticmethod
    def joint_mask(txt_mask: Tensor, img: Tensor) -> Tensor:
        """[B, L] of the text -> [B, L + I] boolean; all image tokens are visible."""
        everywhere = torch.ones(img.shape[:2], dtype=torch.bool, device=img.device)
        return torch.cat((txt_mask.to(torch.bool), everywhere), dim=1)
