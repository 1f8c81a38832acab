"""The Qwen-Image denoiser, in the tree of its own checkpoints, which is also diffusers' tree.

Module paths are the keys of the files (`transformer_blocks.0.attn.to_q.weight`) and the names of LoRA modules, so
loading and saving rename nothing.

Shape letters in this file: B images, S tokens (I of the image and its reference images, L of the text, S = L + I), C
hidden width, H heads, D width of one head, so that C = H * D.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.families.shared.packing import centred_positions
from library.families.shared.tensor_names import count_list_blocks
from library.families.shared.transformer import (
    DenoiserWithTables,
    TimeTextEmbed,
    WeightedRMSNorm,
    finite,
    from_condition,
    modulated,
    projections,
    rope,
    rope_axes,
    rotate_pairs,
    sdpa,
)

Size = tuple[int, int]  # height and width in tokens
BLOCK_LIST = "transformer_blocks"


@dataclass(frozen=True)
class QwenShape:
    """The sizes of a model, read from the shapes of its tensors."""

    in_channels: int
    out_channels: int
    text_channels: int
    hidden: int
    head: int
    mlp: int
    blocks: int
    still_references: bool = False  # whether reference tokens are modulated as at time 0; no tensor shows it

    @classmethod
    def of(cls, shapes: Mapping[str, Iterable[int]], still_references: bool = False) -> "QwenShape":
        """Return sizes from tensor shapes by plain key. Raises KeyError naming the first missing key."""
        hidden, in_channels = shapes["img_in.weight"]
        return cls(
            in_channels=in_channels,
            out_channels=tuple(shapes["proj_out.weight"])[0],
            text_channels=tuple(shapes["txt_in.weight"])[1],
            hidden=hidden,
            head=tuple(shapes[f"{BLOCK_LIST}.0.attn.norm_q.weight"])[0],
            mlp=tuple(shapes[f"{BLOCK_LIST}.0.img_mlp.net.0.proj.weight"])[0],
            blocks=count_list_blocks(shapes, BLOCK_LIST),
            still_references=still_references,
        )

    @property
    def axes(self) -> tuple[int, int, int]:
        return rope_axes(self.head)


class Attention(nn.Module):
    """The parts of both streams' attention; the block joins the streams and calls them."""

    def __init__(self, hidden: int, head: int):
        super().__init__()
        self.norm_q, self.norm_k = WeightedRMSNorm(head), WeightedRMSNorm(head)
        self.to_q, self.to_k, self.to_v = (nn.Linear(hidden, hidden) for _ in range(3))
        self.add_k_proj, self.add_v_proj, self.add_q_proj = (nn.Linear(hidden, hidden) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(hidden, hidden)])
        self.to_add_out = nn.Linear(hidden, hidden)
        self.norm_added_q, self.norm_added_k = WeightedRMSNorm(head), WeightedRMSNorm(head)

    def image(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Image tokens [B, I, C] -> q, k (normed, float32) and v, each [B, H, I, D]."""
        q, k, v = map(self._heads, projections(x, self.to_q, self.to_k, self.to_v))
        return self.norm_q(q), self.norm_k(k), v

    def text(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Text tokens [B, L, C] -> q, k (normed, float32) and v, each [B, H, L, D]."""
        q, k, v = map(self._heads, projections(x, self.add_q_proj, self.add_k_proj, self.add_v_proj))
        return self.norm_added_q(q), self.norm_added_k(k), v

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.norm_q.weight.shape[0])).transpose(1, 2)


class GELU(nn.Module):
    """A layer and its activation, under their name in files."""

    def __init__(self, hidden: int, mlp: int):
        super().__init__()
        self.proj = nn.Linear(hidden, mlp)

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., mlp]."""
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    """The layers after attention."""

    def __init__(self, hidden: int, mlp: int):
        super().__init__()
        self.net = nn.ModuleList([GELU(hidden, mlp), nn.Identity(), nn.Linear(mlp, hidden)])

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](self.net[0](x))


class StreamModulation(nn.Sequential):
    """Compute shifts, scales and gates of a stream from the conditioning vector."""

    def __init__(self, hidden: int):
        super().__init__(nn.SiLU(), nn.Linear(hidden, 6 * hidden))

    def forward(self, input: Tensor) -> Tensor:
        """The conditioning vector [B, C] -> [B, 6 * C]."""
        return from_condition(self[1], input)


class QwenImageTransformerBlock(nn.Module):
    """Joint attention of image and text, each with its own weights."""

    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = staticmethod(sdpa)

    def __init__(self, hidden: int, head: int, mlp: int):
        super().__init__()
        self.img_mod = StreamModulation(hidden)
        self.attn = Attention(hidden, head)
        self.img_mlp = FeedForward(hidden, mlp)
        self.txt_mod = StreamModulation(hidden)
        self.txt_mlp = FeedForward(hidden, mlp)

    def forward(
        self, img: Tensor, txt: Tensor, temb: Tensor, pe: Tensor, mask: Tensor, still: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """img [B, I, C], txt [B, L, C], temb [B, C], pe [2, L + I, D / 2], mask [B, L + I] -> img, txt.

        With `still` [I], true for tokens of reference images, temb [B + 1, C] has the time of these in its last row.
        """
        img_mod = self.img_mod(temb)[:, None]
        if still is not None:
            img_mod, temb = torch.where(still[:, None], img_mod[-1:], img_mod[:-1]), temb[:-1]
        i_shift1, i_scale1, i_gate1, i_shift2, i_scale2, i_gate2 = img_mod.chunk(6, dim=-1)
        t_shift1, t_scale1, t_gate1, t_shift2, t_scale2, t_gate2 = self.txt_mod(temb)[:, None].chunk(6, dim=-1)

        img_q, img_k, img_v = self.attn.image(modulated(img, i_shift1, i_scale1))
        txt_q, txt_k, txt_v = self.attn.text(modulated(txt, t_shift1, t_scale1))
        v = torch.cat((txt_v, img_v), dim=2)
        q = rotate_pairs(torch.cat((txt_q, img_q), dim=2), pe).to(v.dtype)
        k = rotate_pairs(torch.cat((txt_k, img_k), dim=2), pe).to(v.dtype)
        txt_out, img_out = self.attend(q, k, v, mask).split((txt.shape[1], img.shape[1]), dim=1)

        img = img + i_gate1 * self.attn.to_out[0](img_out)
        txt = txt + t_gate1 * self.attn.to_add_out(txt_out)
        img = img + i_gate2 * self.img_mlp(modulated(img, i_shift2, i_scale2))
        txt = txt + t_gate2 * self.txt_mlp(modulated(txt, t_shift2, t_scale2))
        return finite(img), finite(txt)


class LastNorm(nn.Module):
    """The conditioned norm before the projection; here the scale comes before the shift."""

    def __init__(self, hidden: int):
        super().__init__()
        self.linear = nn.Linear(hidden, 2 * hidden)

    def forward(self, img: Tensor, temb: Tensor) -> Tensor:
        """img [B, I, C], temb [B, C] -> [B, I, C]."""
        scale, shift = self.linear(F.silu(temb))[:, None].chunk(2, dim=-1)
        return modulated(img, shift, scale)


class QwenImage(DenoiserWithTables):
    """Qwen-Image (or a smaller one), depending on its sizes."""

    def __init__(self, sizes: QwenShape):
        super().__init__()
        self.sizes = sizes
        self.axes = sizes.axes
        self.time_text_embed = TimeTextEmbed(sizes.hidden, bias=True)
        self.txt_norm = WeightedRMSNorm(sizes.text_channels)
        self.img_in = nn.Linear(sizes.in_channels, sizes.hidden)
        self.txt_in = nn.Linear(sizes.text_channels, sizes.hidden)
        width = (sizes.hidden, sizes.head, sizes.mlp)
        self.transformer_blocks = nn.ModuleList(QwenImageTransformerBlock(*width) for _ in range(sizes.blocks))
        self.norm_out = LastNorm(sizes.hidden)
        self.proj_out = nn.Linear(sizes.hidden, sizes.out_channels)

    def forward(
        self,
        img: Tensor,
        sizes: Sequence[Size],
        txt: Tensor,
        txt_mask: Tensor,
        timesteps: Tensor,
    ) -> Tensor:
        """Predict the packed velocity of packed latents, of the image alone without its reference images.

        img [B, I, in channels]: the tokens of the image, then those of each reference image, of these `sizes`; txt
        [B, L, text channels]; txt_mask [B, L], 1 or true for the tokens of the caption; timesteps [B] in 0..1, float32.
        """
        dtype, num_image_tokens = self.img_in.weight.dtype, sizes[0][0] * sizes[0][1]
        still = None
        if self.sizes.still_references:
            timesteps = torch.cat((timesteps, timesteps.new_zeros(1)))  # one more row for all reference tokens
            still = torch.arange(img.shape[1], device=img.device) >= num_image_tokens
        temb = self.time_text_embed(timesteps, dtype)
        img = self.img_in(img.to(dtype))
        txt = self.txt_in(self.txt_norm(txt).to(dtype))
        pe = self.positions(tuple(sizes), txt.shape[1], img.device)
        everywhere = torch.ones(img.shape[:2], dtype=torch.bool, device=img.device)
        mask = torch.cat((txt_mask.to(torch.bool), everywhere), dim=1)
        for block in self.transformer_blocks:
            img, txt = block(img, txt, temb, pe, mask, *([] if still is None else [still]))
        return self.proj_out(self.norm_out(img[:, :num_image_tokens], temb if still is None else temb[:-1]))

    def positions(self, sizes: tuple[Size, ...], length: int, device: torch.device) -> Tensor:
        key = (*(side for size in sizes for side in size), length)
        return self._tables.of(key, device, lambda: rope_table(sizes, length, device, self.axes))


def rope_table(sizes: Sequence[Size], length: int, device: torch.device, axes: tuple[int, int, int]) -> Tensor:
    """Return cosines and sines [2, L + I, D / 2]. Rows and columns of each image count from its centre, and its index
    is the first axis; text continues beyond the border of the largest, equally on all axes.
    """
    text = torch.arange(length, device=device) + max(side // 2 for size in sizes for side in size)
    ids = [text[:, None].expand(-1, 3).float()]
    ids += [centred_positions(number, size, device) for number, size in enumerate(sizes)]
    return rope(torch.cat(ids), axes)
