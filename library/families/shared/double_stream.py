"""What transformers of two streams and then one (FLUX.1, FLUX.2) have in common, in the tree of their own checkpoints.

Shape letters in this file: B images, S tokens (I of the image, L of the text, S = L + I), C hidden width, H heads,
D width of one head, so that C = H * D.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.families.shared.transformer import EPS, rope, rotated

TABLES_KEPT = 32  # RoPE tables, one per bucket and text length; 2.4 MB each at 1024 x 1024
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def count(shapes: Mapping[str, Iterable[int]], blocks: str) -> int:
    """How many blocks a list of a model has. KeyError names the first that is missing between others."""
    numbers = {key.removeprefix(f"{blocks}.").split(".")[0] for key in shapes if key.startswith(f"{blocks}.")}
    for number in range(len(numbers)):  # a model that was pruned may have been left with gaps
        if str(number) not in numbers:
            raise KeyError(f"{blocks}.{number}")
    return len(numbers)


class RMSNorm(nn.Module):
    """Bring each head's vector to length sqrt(D), in float32 whatever comes in, so that q and k are rounded once."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D] in float32."""
        return F.rms_norm(x.float(), self.scale.shape, self.scale.float(), EPS)


class QKNorm(nn.Module):
    """The two norms of an attention, under the names they have in the files."""

    def __init__(self, width: int):
        super().__init__()
        self.query_norm = RMSNorm(width)
        self.key_norm = RMSNorm(width)


class SelfAttention(nn.Module):
    """The parts of one stream's attention; the block joins the streams and calls them."""

    def __init__(self, hidden: int, head: int, bias: bool = True):
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden, bias)
        self.norm = QKNorm(head)
        self.proj = nn.Linear(hidden, hidden, bias)


class MLPEmbedder(nn.Module):
    """Two layers that turn a vector of conditioning into the width of the model."""

    def __init__(self, channels: int, hidden: int, bias: bool = True):
        super().__init__()
        self.in_layer = nn.Linear(channels, hidden, bias)
        self.silu = nn.SiLU()
        self.out_layer = nn.Linear(hidden, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels] -> [B, C]."""
        return self.out_layer(self.silu(self.in_layer(x.to(self.in_layer.weight.dtype))))


class Modulation(nn.Module):
    """The conditioning vector -> `triples` times shift, scale and gate, in one matrix."""

    def __init__(self, hidden: int, triples: int, bias: bool = True):
        super().__init__()
        self.lin = nn.Linear(hidden, 3 * triples * hidden, bias)

    def forward(self, vec: Tensor) -> Tensor:
        """[B, C] -> [B, 1, 3 * triples * C]; the caller chunks it."""
        return self.lin(F.silu(vec))[:, None]


def split_heads(qkv: Tensor, norm: QKNorm) -> tuple[Tensor, Tensor, Tensor]:
    """[B, S, 3 * C] -> q, k (normed, float32) and v, each [B, H, S, D]. The width of a head is that of its norm."""
    q, k, v = qkv.unflatten(-1, (3, -1, norm.query_norm.scale.shape[0])).permute(2, 0, 3, 1, 4)
    return norm.query_norm(q), norm.key_norm(k), v


def joint_attention(  # noqa: PLR0913 - two streams, each with its layers
    attend: Attend, img: Tensor, img_attn: SelfAttention, txt: Tensor, txt_attn: SelfAttention, pe: Tensor,
    mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Modulated img [B, I, C] and txt [B, L, C], each with its own layers, attend to one another -> what each of their
    `proj` is given."""
    img_q, img_k, img_v = split_heads(img_attn.qkv(img), img_attn.norm)
    txt_q, txt_k, txt_v = split_heads(txt_attn.qkv(txt), txt_attn.norm)
    v = torch.cat((txt_v, img_v), dim=2)
    q = rotated(torch.cat((txt_q, img_q), dim=2), pe).to(v.dtype)
    k = rotated(torch.cat((txt_k, img_k), dim=2), pe).to(v.dtype)
    joint = attend(q, k, v, mask)
    return joint[:, txt.shape[1] :], joint[:, : txt.shape[1]]


class PositionTables:
    """The RoPE tables of a denoiser, kept for the tensors that they were made from."""

    axes: tuple[int, ...]
    theta = 10000.0

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._tables: list[tuple[Tensor, Tensor, Tensor]] = []

    def as_one_graph(self) -> None:
        """Make RoPE tables anew in each call: a table that is kept would be a constant of one compiled graph."""
        self.positions = lambda txt_ids, img_ids: rope(torch.cat((txt_ids, img_ids)), self.axes, self.theta)

    def positions(self, txt_ids: Tensor, img_ids: Tensor) -> Tensor:
        """The RoPE table [2, L + I, D / 2] of a text and an image, kept for the tensors it was made from.

        A caller that passes the very same id tensors again gets the very same table; comparing their values instead
        would make the host wait for the device.
        """
        if img_ids.is_cuda and torch.cuda.is_current_stream_capturing():
            # A table that is kept may go, a recording stays.
            return rope(torch.cat((txt_ids, img_ids)), self.axes, self.theta)
        for index, (txt_known, img_known, table) in enumerate(self._tables):
            if txt_known is txt_ids and img_known is img_ids:
                self._tables.append(self._tables.pop(index))
                return table
        table = rope(torch.cat((txt_ids, img_ids)), self.axes, self.theta)
        self._tables = [*self._tables[1 - TABLES_KEPT :], (txt_ids, img_ids, table)]
        return table
