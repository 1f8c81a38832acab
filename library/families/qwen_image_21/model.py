"""The Qwen-Image-2.1 denoiser, in the tree of diffusers' files; `keys` handles those of ComfyUI.

The condition, which is the text with the reference images inside of it, comes before the image. It is modulated as at
time 0 and sees neither the image nor what follows in itself, so it does not depend on the image.

Shape letters in this file: B images, P tokens of the condition (L of the text, the others of reference images), I
tokens of the image, C hidden width, H heads, D width of one head, so that C = H * D.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.families.shared.packing import centred_positions
from library.families.shared.tensor_names import count_list_blocks
from library.families.shared.transformer import (
    EPS,
    DenoiserWithTables,
    TimeTextEmbed,
    WeightedRMSNorm,
    causal_sdpa,
    finite,
    projections,
    rope,
    rope_axes,
    rotate_pairs,
    sdpa,
)

Size = tuple[int, int]  # height and width in tokens
BLOCK, BLOCK_LIST = "JointTransformerBlock", "transformer_blocks"


@dataclass(frozen=True)
class Qwen21Shape:
    """The sizes of a model, read from the shapes of its tensors."""

    in_channels: int
    text_channels: int
    hidden: int
    head: int
    mlp: int
    blocks: int

    @classmethod
    def of(cls, shapes: Mapping[str, Iterable[int]]) -> "Qwen21Shape":
        """Return sizes from tensor shapes by this model's keys. Raises KeyError naming the first missing key."""
        hidden, in_channels = shapes["img_in.weight"]
        return cls(
            in_channels=in_channels,
            text_channels=tuple(shapes["txt_in.in_layer.weight"])[1],
            hidden=hidden,
            head=tuple(shapes[f"{BLOCK_LIST}.0.attn.norm_q.weight"])[0],
            mlp=tuple(shapes[f"{BLOCK_LIST}.0.img_mlp.proj.weight"])[0],
            blocks=count_list_blocks(shapes, BLOCK_LIST),
        )

    @property
    def axes(self) -> tuple[int, int, int]:
        return rope_axes(self.head)


class Qwen21Attention(nn.Module):
    """The layers around attention, which the condition and the image share."""

    def __init__(self, hidden: int, head: int):
        super().__init__()
        self.norm_q, self.norm_k = WeightedRMSNorm(head), WeightedRMSNorm(head)
        self.to_q, self.to_k, self.to_v = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(hidden, hidden, bias=False)])

    def inputs(self, x: Tensor, pe: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, S, C] -> q, k (normed and rotated) and v, each [B, H, S, D]."""
        head = self.norm_q.weight.shape[0]
        q, k, v = (
            output.unflatten(-1, (-1, head)).transpose(1, 2)
            for output in projections(x, self.to_q, self.to_k, self.to_v)
        )
        return rotate_pairs(self.norm_q(q), pe).to(v.dtype), rotate_pairs(self.norm_k(k), pe).to(v.dtype), v


class Qwen21FeedForward(nn.Module):
    """The gated layers after attention."""

    def __init__(self, hidden: int, mlp: int):
        super().__init__()
        self.proj = nn.Linear(hidden, mlp, bias=False)
        self.out = nn.Linear(mlp, hidden, bias=False)
        self.gate_layer = nn.Linear(hidden, mlp, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C]."""
        gate, value = projections(x, self.gate_layer, self.proj)
        return self.out(F.silu(gate) * value)


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale)


class JointTransformerBlock(nn.Module):
    """A block of one set of weights for both streams: the condition attends to itself, the image to all."""

    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = staticmethod(sdpa)
    attend_before: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = staticmethod(causal_sdpa)

    def __init__(self, hidden: int, head: int, mlp: int):
        super().__init__()
        self.attn = Qwen21Attention(hidden, head)
        self.img_mlp = Qwen21FeedForward(hidden, mlp)

    def forward(  # noqa: PLR0913 - the tensors of two streams, each dimension of which varies on its own
        self,
        img: Tensor,
        cond: Tensor,
        modulation: Tensor,
        still: Tensor,
        img_pe: Tensor,
        cond_pe: Tensor,
        mask: Tensor,
        among: Tensor | None = None,
        cond_k: Tensor | None = None,
        cond_v: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """img [B, I, C], cond [B, P, C], modulation [B, 4 * C], still [1, 4 * C], img_pe [2, B, 1, I, D / 2], cond_pe
        [2, P, D / 2], mask [B, P + I] -> img, cond.

        `among` [P, P] is true where a token of the condition sees another one; None if each sees all before it.
        `cond_k` and `cond_v` [B, H, P, D] are what `condition_in_block` returned earlier; `cond` is passed on then.
        """
        if cond_k is None or cond_v is None:
            cond, cond_k, cond_v = self.condition_in_block(cond, still, cond_pe, among)
        scale1, gate1, scale2, gate2 = modulation[:, None].chunk(4, dim=-1)
        q, k, v = self.attn.inputs(scaled(img, scale1), img_pe)
        seen = self.attend(q, torch.cat((cond_k, k), dim=2), torch.cat((cond_v, v), dim=2), mask)
        img = img + gate1.tanh() * self.attn.to_out[0](seen)
        img = img + gate2.tanh() * self.img_mlp(scaled(img, scale2))
        return finite(img), cond

    def condition_in_block(
        self, cond: Tensor, still: Tensor, cond_pe: Tensor, among: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the condition behind this block [B, P, C], and its keys and values in it [B, H, P, D]."""
        scale1, gate1, scale2, gate2 = still[:, None].chunk(4, dim=-1)
        q, k, v = self.attn.inputs(scaled(cond, scale1), cond_pe)
        cond = cond + gate1.tanh() * self.attn.to_out[0](self.attend_before(q, k, v, among))
        cond = cond + gate2.tanh() * self.img_mlp(scaled(cond, scale2))
        return finite(cond), k, v


class KnownCondition(NamedTuple):
    """What the image reads of a condition in every block, computed once for all steps of a picture."""

    tokens: Tensor  # [B, P, C], before the first block
    keys: tuple[Tensor, ...]  # of each block [B, H, P, D]
    values: tuple[Tensor, ...]


class Qwen21TextNorm(nn.Module):
    """RMS norm in float32, whose stored weight is the distance from 1."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same in float32."""
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), EPS)


class Qwen21TextProjection(nn.Module):
    """From the states of the text encoder to tokens."""

    def __init__(self, text_channels: int, hidden: int):
        super().__init__()
        self.text_norm = Qwen21TextNorm(text_channels)
        self.in_layer = nn.Linear(text_channels, hidden, bias=False)
        self.out_layer = nn.Linear(hidden, hidden, bias=False)

    def forward(self, txt: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, L, text channels] -> [B, L, C] in the dtype of the layers."""
        return self.out_layer(F.gelu(self.in_layer(self.text_norm(txt).to(dtype)), approximate="tanh"))


class Qwen21LastNorm(nn.Module):
    """The norm before the projection, which has a scale and no shift."""

    def __init__(self, hidden: int):
        super().__init__()
        self.linear = nn.Linear(hidden, hidden, bias=False)

    def forward(self, img: Tensor, temb: Tensor) -> Tensor:
        """img [B, I, C], temb [B, C] -> [B, I, C]."""
        return scaled(img, self.linear(F.silu(temb))[:, None])


class QwenImage21(DenoiserWithTables):
    """Qwen-Image-2.1 (or a smaller one), depending on its sizes."""

    def __init__(self, sizes: Qwen21Shape):
        super().__init__()
        self.sizes, self.axes = sizes, sizes.axes
        hidden = sizes.hidden
        self.time_text_embed = TimeTextEmbed(hidden, bias=False)
        self.txt_in = Qwen21TextProjection(sizes.text_channels, hidden)
        self.img_in = nn.Linear(sizes.in_channels, hidden, bias=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 4 * hidden, bias=False))
        self.transformer_blocks = nn.ModuleList(
            JointTransformerBlock(hidden, sizes.head, sizes.mlp) for _ in range(sizes.blocks)
        )
        self.norm_out = Qwen21LastNorm(hidden)
        self.proj_out = nn.Linear(hidden, sizes.in_channels, bias=False)

    def forward(  # noqa: PLR0913 - what a step reads, and where references stand in the text
        self,
        img: Tensor,
        sizes: Sequence[Size],
        txt: Tensor,
        txt_mask: Tensor,
        timesteps: Tensor,
        leads: Sequence[int] = (),
        known: KnownCondition | None = None,
    ) -> Tensor:
        """Predict the velocity of latents as tokens; of the image alone, without its reference images.

        img [B, I + ..., in channels]: the tokens of the image, then those of each reference image, of these `sizes`;
        txt [B, L, text channels]; txt_mask [B, L], 1 or true for the tokens of the text; timesteps [B] in 0..1,
        float32. `leads` are the numbers of tokens of the text before each reference image, each from the one before.
        `known` is the result of `know_condition` for the same text and references, whose tokens `img` may lack then.
        """
        dtype, count, device = self.img_in.weight.dtype, sizes[0][0] * sizes[0][1], img.device
        temb = self.time_text_embed(torch.cat((timesteps, timesteps.new_zeros(1))), dtype)
        modulation = self.modulation(temb)
        temb, modulation, still = temb[:-1], modulation[:-1], modulation[-1:]
        tokens, is_text = self.img_in(img.to(dtype)), txt_mask.to(torch.bool)
        shown, references = tokens[:, :count], tokens[:, count:]
        layout = ConditionLayout(tuple(sizes[1:]), tuple(leads), txt.shape[1])
        everywhere = torch.ones(shown.shape[0], layout.reference_tokens + count, 1, dtype=torch.bool, device=device)
        is_known = layout.joined(is_text[..., None], everywhere[:, count:])
        mask = torch.cat((is_known, everywhere[:, :count]), dim=1)[..., 0]
        img_pe = self.image_positions(sizes[0], is_text.sum(dim=1) + layout.reach)
        among = [layout.among(device)] if leads else []
        cond_pe = self.condition_positions(layout, device)
        cond = known.tokens if known else layout.joined(self.txt_in(txt, dtype), references)
        for at, block in enumerate(self.transformer_blocks):
            rest = (among[0] if leads else None, known.keys[at], known.values[at]) if known else among
            shown, cond = block(shown, cond, modulation, still, img_pe, cond_pe, mask, *rest)
        return self.proj_out(self.norm_out(shown, temb))

    @torch.no_grad()
    def know_condition(
        self, references: Tensor, sizes: Sequence[Size], txt: Tensor, leads: Sequence[int] = ()
    ) -> KnownCondition:
        """Compute what does not depend on image and time. `references` [B, ..., in channels] are the tokens of all
        reference images, of these `sizes`; `txt` and `leads` are those of `forward`.
        """
        dtype, device = self.img_in.weight.dtype, txt.device
        layout = ConditionLayout(tuple(sizes), tuple(leads), txt.shape[1])
        # As many rows as in a step, as products of other sizes may round differently.
        still = self.modulation(self.time_text_embed(torch.zeros(len(txt) + 1, device=device), dtype))[-1:]
        cond = tokens = layout.joined(self.txt_in(txt, dtype), self.img_in(references.to(dtype)))
        among, cond_pe = layout.among(device) if leads else None, self.condition_positions(layout, device)
        keys, values = [], []
        blocks: Any = self.transformer_blocks
        for block in blocks:
            cond, key, value = block.condition_in_block(cond, still, cond_pe, among)
            keys.append(key)
            values.append(value)
        return KnownCondition(tokens, tuple(keys), tuple(values))

    def condition_positions(self, layout: "ConditionLayout", device: torch.device) -> Tensor:
        """Return the RoPE table [2, P, D / 2] of a condition, cached by its layout."""
        key = (*(side for size in layout.sizes for side in size), *layout.leads, layout.length)
        return self._tables.of(key, device, lambda: rope(layout.positions(device), self.axes))

    def image_positions(self, size: Size, begin: Tensor) -> Tensor:
        """Return the RoPE table [2, B, 1, I, D / 2] of an image of `size` behind conditions that end at positions
        `begin` [B], not counting their padding.
        """
        device, (first, *_) = begin.device, self.axes
        table = self._tables.of((*size, -1), device, lambda: rope(centred_positions(0, size, device), self.axes))
        frames = rope(begin[:, None].float(), (first,))
        frames = frames[:, :, None, None].expand(-1, -1, 1, table.shape[1], -1)
        places = table[:, None, None, :, first // 2 :].expand(-1, len(begin), -1, -1, -1)
        return torch.cat((frames, places), dim=-1)


@dataclass(frozen=True)
class ConditionLayout:
    """Where the reference images stand in a text of `length` tokens."""

    sizes: tuple[Size, ...]
    leads: tuple[int, ...]
    length: int

    def joined(self, text: Tensor, references: Tensor) -> Tensor:
        """Text [B, L, ...] and references [B, ..., ...] -> the condition [B, P, ...]."""
        if not self.leads:
            return text
        pieces = text.split([*self.leads, self.length - sum(self.leads)], dim=1)
        images = references.split([height * width for height, width in self.sizes], dim=1)
        between = [part for pair in zip(pieces[:-1], images, strict=True) for part in pair]
        return torch.cat((*between, pieces[-1]), dim=1)

    @property
    def reference_tokens(self) -> int:
        return sum(height * width for height, width in self.sizes)

    @property
    def reach(self) -> int:
        """Return by how many positions the reference images shift the rest."""
        return sum(map(max, self.sizes))

    def positions(self, device: torch.device) -> Tensor:
        """Return positions [P, 3]: words count on all axes alike, an image stands at one frame."""
        parts, position = [], 0
        for size, lead in zip((*self.sizes, None), (*self.leads, self.length - sum(self.leads)), strict=True):
            parts.append(torch.arange(position, position + lead, device=device)[:, None].expand(-1, 3).float())
            position += lead
            if size:
                parts.append(centred_positions(position, size, device))
                position += max(size)
        return torch.cat(parts)

    def among(self, device: torch.device) -> Tensor:
        """Return [P, P], true where a token of the condition sees another one: those before it, and its own image."""
        counts = [height * width for height, width in self.sizes]
        total, start, ends = self.length + sum(counts), 0, []
        for lead, count in zip(self.leads, counts, strict=True):
            ends += [torch.arange(start, start + lead, device=device)]
            start += lead + count
            ends += [torch.full((count,), start - 1, device=device)]
        ends += [torch.arange(start, total, device=device)]
        return torch.arange(total, device=device) <= torch.cat(ends)[:, None]
