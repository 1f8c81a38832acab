"""Shared modules of transformers with double-stream and single-stream blocks (FLUX.1, FLUX.2), named as in checkpoints.

Shape letters in this file: B images, S tokens (I of the image, L of the text, S = L + I), C hidden width, H heads,
D width of one head, so that C = H * D.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.families.shared.transformer import EPS, finite, from_condition, modulated, rope, rotate_pairs, sdpa

MAX_TABLES = 32  # cached RoPE tables, one per bucket and text length; 2.4 MB each at 1024 x 1024
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def count_stream_blocks(shapes: Mapping[str, Iterable[int]], blocks: str) -> int:
    """Return the number of blocks in a list of a model. Raises KeyError naming the first gap."""
    numbers = {key.removeprefix(f"{blocks}.").split(".")[0] for key in shapes if key.startswith(f"{blocks}.")}
    for number in range(len(numbers)):  # a pruned model may have gaps
        if str(number) not in numbers:
            raise KeyError(f"{blocks}.{number}")
    return len(numbers)


class RMSNorm(nn.Module):
    """RMS norm of each head's vector, in float32 for any input dtype, so that q and k are rounded only once."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D] in float32."""
        return F.rms_norm(x.float(), self.scale.shape, self.scale.float(), EPS)


class QKNorm(nn.Module):
    """The two norms of an attention, under their names in files."""

    def __init__(self, width: int):
        super().__init__()
        self.query_norm = RMSNorm(width)
        self.key_norm = RMSNorm(width)


class SelfAttention(nn.Module):
    """The attention layers of one stream; the block joins the streams and calls them."""

    def __init__(self, hidden: int, head: int, bias: bool = True):
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden, bias)
        self.norm = QKNorm(head)
        self.proj = nn.Linear(hidden, hidden, bias)


class MLPEmbedder(nn.Module):
    """A two-layer MLP that projects a conditioning vector to the width of the model."""

    def __init__(self, channels: int, hidden: int, bias: bool = True):
        super().__init__()
        self.in_layer = nn.Linear(channels, hidden, bias)
        self.silu = nn.SiLU()
        self.out_layer = nn.Linear(hidden, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels] -> [B, C]."""
        return self.out_layer(self.silu(self.in_layer(x.to(self.in_layer.weight.dtype))))


class Modulation(nn.Module):
    """Compute `triples` times shift, scale and gate from the conditioning vector, by one matrix."""

    def __init__(self, hidden: int, triples: int, bias: bool):
        super().__init__()
        self.lin = nn.Linear(hidden, 3 * triples * hidden, bias)

    def forward(self, vec: Tensor) -> Tensor:
        """[B, C] -> [B, 1, 3 * triples * C]; the caller chunks it."""
        return from_condition(self.lin, vec)[:, None]


class ExternalModulation(nn.Module):
    """Replace `Modulation` in a block whose shifts, scales and gates are computed outside of it."""

    def __init__(self, first: int, count: int):
        super().__init__()
        self.rows = slice(first, first + count)

    def forward(self, vec: Tensor) -> Tensor:
        """The block's own vectors [B, N, C] -> [B, 1, count * C]; the caller chunks it."""
        return vec[:, self.rows].flatten(1)[:, None]


class SwiGLU(nn.Module):
    """SwiGLU: the first half of the channels gates the second."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2 * width] -> [..., width]."""
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value


@dataclass(frozen=True)
class BlockLayers:
    """The configuration of a block's layers."""

    hidden: int
    head: int
    mlp: int
    external_modulation: bool = False  # shifts, scales and gates are computed outside of the blocks
    bias: bool = True
    gated: bool = False  # the MLP, by SwiGLU

    @property
    def inside(self) -> int:
        return 2 * self.mlp if self.gated else self.mlp

    def activation(self) -> nn.Module:
        return SwiGLU() if self.gated else nn.GELU(approximate="tanh")

    def mlp_layers(self) -> nn.Sequential:
        into, out = nn.Linear(self.hidden, self.inside, self.bias), nn.Linear(self.mlp, self.hidden, self.bias)
        return nn.Sequential(into, self.activation(), out)

    def modulation(self, first: int, triples: int) -> nn.Module:
        """Return the modulation of a stream; `first` is the index of its first vector if they are computed outside."""
        if self.external_modulation:
            return ExternalModulation(first, 3 * triples)
        return Modulation(self.hidden, triples, self.bias)


def split_heads(qkv: Tensor, norm: QKNorm) -> tuple[Tensor, Tensor, Tensor]:
    """[B, S, 3 * C] -> q, k (normed, float32) and v, each [B, H, S, D]. The width of a head is that of its norm."""
    q, k, v = qkv.unflatten(-1, (3, -1, norm.query_norm.scale.shape[0])).permute(2, 0, 3, 1, 4).unbind()
    return norm.query_norm(q), norm.key_norm(k), v


def joint_attention(  # noqa: PLR0913 - two streams, each with its layers
    attend: Attend,
    img: Tensor,
    img_attn: SelfAttention,
    txt: Tensor,
    txt_attn: SelfAttention,
    pe: Tensor,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend jointly over modulated img [B, I, C] and txt [B, L, C], each with its own layers; return the inputs of
    their `proj`, of the same shapes.
    """
    img_q, img_k, img_v = split_heads(img_attn.qkv(img), img_attn.norm)
    txt_q, txt_k, txt_v = split_heads(txt_attn.qkv(txt), txt_attn.norm)
    v = torch.cat((txt_v, img_v), dim=2)
    q = rotate_pairs(torch.cat((txt_q, img_q), dim=2), pe).to(v.dtype)
    k = rotate_pairs(torch.cat((txt_k, img_k), dim=2), pe).to(v.dtype)
    txt_out, img_out = attend(q, k, v, mask).split((txt.shape[1], img.shape[1]), dim=1)
    return img_out, txt_out


class DoubleStreamBlock(nn.Module):
    """Joint attention of image and text, each with its own weights. LyCORIS finds the class by its name."""

    attend: Attend = staticmethod(sdpa)

    def __init__(self, layers: BlockLayers):
        super().__init__()
        self.img_mod = layers.modulation(0, triples=2)
        self.img_attn = SelfAttention(layers.hidden, layers.head, layers.bias)
        self.img_mlp = layers.mlp_layers()
        self.txt_mod = layers.modulation(6, triples=2)
        self.txt_attn = SelfAttention(layers.hidden, layers.head, layers.bias)
        self.txt_mlp = layers.mlp_layers()

    def forward(
        self, img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """img [B, I, C], txt [B, L, C], vec [B, C], pe [2, L + I, D / 2], mask [B, L + I] -> img, txt.

        A `vec` of shifts, scales and gates is [B, 12, C]: six for the image, then six for the text.
        """
        i_shift1, i_scale1, i_gate1, i_shift2, i_scale2, i_gate2 = self.img_mod(vec).chunk(6, dim=-1)
        t_shift1, t_scale1, t_gate1, t_shift2, t_scale2, t_gate2 = self.txt_mod(vec).chunk(6, dim=-1)
        img_out, txt_out = joint_attention(
            self.attend,
            modulated(img, i_shift1, i_scale1),
            self.img_attn,
            modulated(txt, t_shift1, t_scale1),
            self.txt_attn,
            pe,
            mask,
        )
        img = img + i_gate1 * self.img_attn.proj(img_out)
        img = img + i_gate2 * self.img_mlp(modulated(img, i_shift2, i_scale2))
        txt = txt + t_gate1 * self.txt_attn.proj(txt_out)
        txt = txt + t_gate2 * self.txt_mlp(modulated(txt, t_shift2, t_scale2))
        return img, finite(txt)


class SingleStreamBlock(nn.Module):
    """Text and image as one stream; attention and MLP in parallel, with one fused input matrix. LyCORIS finds the class
    by its name.
    """

    attend: Attend = staticmethod(sdpa)

    def __init__(self, layers: BlockLayers):
        super().__init__()
        self.linear1 = nn.Linear(layers.hidden, 3 * layers.hidden + layers.inside, layers.bias)
        self.linear2 = nn.Linear(layers.hidden + layers.mlp, layers.hidden, layers.bias)
        self.norm = QKNorm(layers.head)
        self.modulation = layers.modulation(0, triples=1)
        self.activation = layers.activation()

    def forward(self, joint: Tensor, vec: Tensor, pe: Tensor, mask: Tensor | None = None) -> Tensor:
        """joint [B, S, C], vec [B, C] (of shift, scale and gate [B, 3, C]), pe [2, S, D / 2], mask [B, S]
        -> joint."""
        shift, scale, gate = self.modulation(vec).chunk(3, dim=-1)
        both, width = self.linear1(modulated(joint, shift, scale)), 3 * joint.shape[-1]
        # Not sliced: each slice's gradient would be as large as the whole.
        qkv, mlp = both.split((width, both.shape[-1] - width), dim=-1)
        q, k, v = split_heads(qkv, self.norm)
        attended = self.attend(rotate_pairs(q, pe).to(v.dtype), rotate_pairs(k, pe).to(v.dtype), v, mask)
        return finite(joint + gate * self.linear2(torch.cat((attended, self.activation(mlp)), dim=-1)))


class LastLayer(nn.Module):
    """The modulated norm and the projection to latent patches."""

    def __init__(self, hidden: int, out_channels: int, bias: bool = True, external_modulation: bool = False):
        super().__init__()
        self.linear = nn.Linear(hidden, out_channels, bias)
        self.adaLN_modulation = (
            nn.Flatten() if external_modulation else nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden, bias))
        )

    def forward(self, img: Tensor, vec: Tensor) -> Tensor:
        """img [B, I, C], vec [B, C] (of shift and scale [B, 2, C]) -> [B, I, out channels]."""
        shift, scale = self.adaLN_modulation(vec)[:, None].chunk(2, dim=-1)
        return self.linear(modulated(img, shift, scale))


class PositionTables:
    """The RoPE tables of a denoiser, cached by the identity of the position tensors."""

    axes: tuple[int, ...]
    theta = 10000.0

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._tables: list[tuple[Tensor, Tensor, Tensor]] = []

    def as_one_graph(self) -> None:
        # A cached table would become a constant of the compiled graph.
        self.positions = lambda txt_ids, img_ids: rope(torch.cat((txt_ids, img_ids)), self.axes, self.theta)

    def positions(self, txt_ids: Tensor, img_ids: Tensor) -> Tensor:
        """Return the RoPE table [2, L + I, D / 2] of a text and an image, cached by the identity of the id tensors.

        Comparing their values instead would need a device sync.
        """
        if img_ids.is_cuda and torch.cuda.is_current_stream_capturing():
            # A cached table may be evicted, but a CUDA graph keeps its address.
            return rope(torch.cat((txt_ids, img_ids)), self.axes, self.theta)
        for index, (txt_known, img_known, table) in enumerate(self._tables):
            if txt_known is txt_ids and img_known is img_ids:
                self._tables.append(self._tables.pop(index))
                return table
        table = rope(torch.cat((txt_ids, img_ids)), self.axes, self.theta)
        self._tables = [*self._tables[1 - MAX_TABLES :], (txt_ids, img_ids, table)]
        return table
