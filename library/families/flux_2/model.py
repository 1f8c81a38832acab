"""The FLUX.2 denoiser, in the tree of its own checkpoints.

Module paths are the keys of the single files (`double_blocks.0.img_attn.qkv.weight`) and the names of LoRA modules. The
matrices that the files hold fused (q, k, v; q, k, v and MLP) stay fused. Nothing has a bias, and one modulation of each
kind serves all blocks.

Shape letters in this file: B images, S tokens (I of the image, L of the text, S = L + I), C hidden width, H heads,
D width of one head, so that C = H * D.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.families.shared.double_stream import (
    Attend,
    MLPEmbedder,
    Modulation,
    PositionTables,
    QKNorm,
    SelfAttention,
    count,
    joint_attention,
    split_heads,
)
from library.families.shared.transformer import TIME_CHANNELS, finite, modulated, rotated, sdpa, sinusoids

DOUBLE, SINGLE = "DoubleStreamBlock", "SingleStreamBlock"  # by these names the LyCORIS package finds them
THETA = 2000.0


@dataclass(frozen=True)
class Flux2Shape:
    """What tells one FLUX.2 model from another, read from the shapes of its tensors."""

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
        """Tensor shapes by key of the single file -> sizes. KeyError names the first key that is missing."""
        hidden, in_channels = shapes["img_in.weight"]
        return cls(
            in_channels=in_channels,
            text_channels=tuple(shapes["txt_in.weight"])[1],
            hidden=hidden,
            head=tuple(shapes["double_blocks.0.img_attn.norm.query_norm.scale"])[0],
            mlp=tuple(shapes["double_blocks.0.img_mlp.2.weight"])[1],
            double_blocks=count(shapes, "double_blocks"),
            single_blocks=count(shapes, "single_blocks"),
            guidance="guidance_in.in_layer.weight" in shapes,
        )

    @property
    def axes(self) -> tuple[int, ...]:
        """How the width of a head is shared by the four axes of a position: (image, row, column, word)."""
        if self.head % 8:
            raise ValueError(f"a head of width {self.head} cannot be shared by four axes; it must be a multiple of 8")
        return (self.head // 4,) * 4


class SwiGLU(nn.Module):
    """The first half of the channels as the gate of the second."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2 * width] -> [..., width]."""
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value


def gated_mlp(hidden: int, mlp: int) -> nn.Sequential:
    """What stands behind attention in each stream of a double block."""
    return nn.Sequential(nn.Linear(hidden, 2 * mlp, bias=False), SwiGLU(), nn.Linear(mlp, hidden, bias=False))


class DoubleStreamBlock(nn.Module):
    """Image and text, each with weights of its own, that attend to one another."""

    attend: Attend = staticmethod(sdpa)

    def __init__(self, hidden: int, head: int, mlp: int):
        super().__init__()
        self.img_attn = SelfAttention(hidden, head, bias=False)
        self.img_mlp = gated_mlp(hidden, mlp)
        self.txt_attn = SelfAttention(hidden, head, bias=False)
        self.txt_mlp = gated_mlp(hidden, mlp)

    def forward(self, img: Tensor, txt: Tensor, img_mod: Tensor, txt_mod: Tensor, pe: Tensor) -> tuple[Tensor, Tensor]:
        """img [B, I, C], txt [B, L, C], both mods [B, 1, 6 * C], pe [2, L + I, D / 2] -> img, txt."""
        i_shift1, i_scale1, i_gate1, i_shift2, i_scale2, i_gate2 = img_mod.chunk(6, dim=-1)
        t_shift1, t_scale1, t_gate1, t_shift2, t_scale2, t_gate2 = txt_mod.chunk(6, dim=-1)
        img_out, txt_out = joint_attention(
            self.attend,
            modulated(img, i_shift1, i_scale1),
            self.img_attn,
            modulated(txt, t_shift1, t_scale1),
            self.txt_attn,
            pe,
        )
        img = img + i_gate1 * self.img_attn.proj(img_out)
        img = img + i_gate2 * self.img_mlp(modulated(img, i_shift2, i_scale2))
        txt = txt + t_gate1 * self.txt_attn.proj(txt_out)
        txt = txt + t_gate2 * self.txt_mlp(modulated(txt, t_shift2, t_scale2))
        return img, finite(txt)


class SingleStreamBlock(nn.Module):
    """Text and image as one stream; attention and MLP side by side, behind one fused matrix."""

    attend: Attend = staticmethod(sdpa)

    def __init__(self, hidden: int, head: int, mlp: int):
        super().__init__()
        self.linear1 = nn.Linear(hidden, 3 * hidden + 2 * mlp, bias=False)
        self.linear2 = nn.Linear(hidden + mlp, hidden, bias=False)
        self.norm = QKNorm(head)
        self.gate = SwiGLU()

    def forward(self, joint: Tensor, mod: Tensor, pe: Tensor) -> Tensor:
        """joint [B, S, C], mod [B, 1, 3 * C], pe [2, S, D / 2] -> joint."""
        shift, scale, gate = mod.chunk(3, dim=-1)
        both = self.linear1(modulated(joint, shift, scale))
        split = 3 * joint.shape[-1]
        q, k, v = split_heads(both[..., :split], self.norm)
        seen = self.attend(rotated(q, pe).to(v.dtype), rotated(k, pe).to(v.dtype), v, None)
        return finite(joint + gate * self.linear2(torch.cat((seen, self.gate(both[..., split:])), dim=-1)))


class LastLayer(nn.Module):
    """The conditioned norm and the projection back to latent patches."""

    def __init__(self, hidden: int, out_channels: int):
        super().__init__()
        self.linear = nn.Linear(hidden, out_channels, bias=False)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden, bias=False))

    def forward(self, img: Tensor, vec: Tensor) -> Tensor:
        """img [B, I, C], vec [B, C] -> [B, I, out channels]."""
        shift, scale = self.adaLN_modulation(vec)[:, None].chunk(2, dim=-1)
        return self.linear(modulated(img, shift, scale))


class Flux2(PositionTables, nn.Module):
    """FLUX.2 klein, or dev, as its sizes say."""

    theta = THETA

    def __init__(self, sizes: Flux2Shape):
        super().__init__()
        hidden, width = sizes.hidden, (sizes.hidden, sizes.head, sizes.mlp)
        self.sizes = sizes
        self.axes = sizes.axes
        self.img_in = nn.Linear(sizes.in_channels, hidden, bias=False)
        self.txt_in = nn.Linear(sizes.text_channels, hidden, bias=False)
        self.time_in = MLPEmbedder(TIME_CHANNELS, hidden, bias=False)
        self.guidance_in = MLPEmbedder(TIME_CHANNELS, hidden, bias=False) if sizes.guidance else None
        self.double_stream_modulation_img = Modulation(hidden, 2, bias=False)
        self.double_stream_modulation_txt = Modulation(hidden, 2, bias=False)
        self.single_stream_modulation = Modulation(hidden, 1, bias=False)
        self.double_blocks = nn.ModuleList(DoubleStreamBlock(*width) for _ in range(sizes.double_blocks))
        self.single_blocks = nn.ModuleList(SingleStreamBlock(*width) for _ in range(sizes.single_blocks))
        self.final_layer = LastLayer(hidden, sizes.in_channels)

    def forward(  # noqa: PLR0913 - what the model is conditioned on
        self,
        img: Tensor,
        img_ids: Tensor,
        txt: Tensor,
        txt_ids: Tensor,
        timesteps: Tensor,
        guidance: Tensor | None = None,
    ) -> Tensor:
        """Packed latents -> the velocity, packed alike.

        img [B, I, in channels]; img_ids [I, 4] and txt_ids [L, 4], positions shared by the whole batch; txt [B, L, text
        channels]; timesteps [B] in 0..1 and guidance [B], float32, which klein does not read.
        """
        vec = self.time_in(sinusoids(timesteps))
        if self.guidance_in is not None and guidance is not None:
            vec = vec + self.guidance_in(sinusoids(guidance))
        img_mod, txt_mod = self.double_stream_modulation_img(vec), self.double_stream_modulation_txt(vec)
        joint_mod = self.single_stream_modulation(vec)
        img = self.img_in(img.to(self.img_in.weight.dtype))
        txt = self.txt_in(txt.to(self.txt_in.weight.dtype))
        pe = self.positions(txt_ids, img_ids)
        for block in self.double_blocks:
            img, txt = block(img, txt, img_mod, txt_mod, pe)
        joint = torch.cat((txt, img), dim=1)
        for block in self.single_blocks:
            joint = block(joint, joint_mod, pe)
        return self.final_layer(joint[:, txt.shape[1] :], vec)
