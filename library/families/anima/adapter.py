"""Anima's text adapter: T5 tokens with cross-attention to Qwen3's states of the same caption. Part of the denoiser.

Shape letters as in `model`: B images, L and T tokens of the text for Qwen3 and for T5, H heads, D width of one head.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from library.families.shared.tensor_names import count_list_blocks
from library.families.shared.transformer import RopeTableCache, WeightedRMSNorm, projections, rope, rotated_halves, sdpa

ADAPTER_NAMES_PREFIX = "llm_adapter."
ADAPTER_BLOCK = "LLMAdapterTransformerBlock"


@dataclass(frozen=True)
class AdapterShape:
    """The sizes of an adapter."""

    words: int
    source: int
    width: int
    head: int
    mlp: int
    blocks: int

    @classmethod
    def of(cls, shapes: Mapping[str, Iterable[int]]) -> "AdapterShape":
        """Return sizes from tensor shapes by the denoiser's keys. Raises KeyError naming the first missing key."""
        words, width = shapes[f"{ADAPTER_NAMES_PREFIX}embed.weight"]
        first = f"{ADAPTER_NAMES_PREFIX}blocks.0"
        return cls(
            words=words,
            source=tuple(shapes[f"{first}.cross_attn.k_proj.weight"])[1],
            width=width,
            head=tuple(shapes[f"{first}.cross_attn.q_norm.weight"])[0],
            mlp=tuple(shapes[f"{first}.mlp.0.weight"])[0],
            blocks=count_adapter_blocks(shapes),
        )


def count_adapter_blocks(names: Iterable[str]) -> int:
    return count_list_blocks(names, f"{ADAPTER_NAMES_PREFIX}blocks")


class Projections(nn.Module):
    """Query, key and value of one attention."""

    def __init__(self, width: int, context: int, head: int):
        super().__init__()
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(context, width, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = WeightedRMSNorm(head), WeightedRMSNorm(head)

    def qkv(
        self, x: Tensor, context: Tensor, pe: Tensor | None = None, pe_context: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, C], context [B, T, any] -> q, k (normed and, with their tables, rotated) and v, each [B, H, S or T,
        D].
        """
        if context is x:
            projected = projections(x, self.q_proj, self.k_proj, self.v_proj)
        else:
            projected = (self.q_proj(x), *projections(context, self.k_proj, self.v_proj))
        q, k, v = (tensor.unflatten(-1, (-1, self.q_norm.weight.shape[0])).transpose(1, 2) for tensor in projected)
        q, k = self.q_norm(q), self.k_norm(k)
        q = q if pe is None else rotated_halves(q, pe)
        k = k if pe_context is None else rotated_halves(k, pe_context)
        return q.to(v.dtype), k.to(v.dtype), v


class AdapterAttention(Projections):
    """Attention of T5's tokens over themselves, or over Qwen3's states; the block calls the kernel."""

    def __init__(self, width: int, context: int, head: int):
        super().__init__(width, context, head)
        self.o_proj = nn.Linear(width, width, bias=False)


class LLMAdapterTransformerBlock(nn.Module):
    """Self-attention, cross-attention to Qwen3's tokens, MLP."""

    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = staticmethod(sdpa)

    def __init__(self, sizes: AdapterShape):
        super().__init__()
        width = sizes.width
        self.norm_self_attn = WeightedRMSNorm(width)
        self.self_attn = AdapterAttention(width, width, sizes.head)
        self.norm_cross_attn = WeightedRMSNorm(width)
        self.cross_attn = AdapterAttention(width, sizes.source, sizes.head)
        self.norm_mlp = WeightedRMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, sizes.mlp), nn.GELU(), nn.Linear(sizes.mlp, width))

    def forward(  # noqa: PLR0913 - two rows of tokens, each with a mask and a table
        self, x: Tensor, states: Tensor, mask: Tensor, states_mask: Tensor, pe: Tensor, pe_states: Tensor
    ) -> Tensor:
        """x [B, T, C], states [B, L, source], mask [B, T] and states_mask [B, L], true for visible tokens, pe and
        pe_states [2, T or L, D / 2] -> x.
        """
        normed = self.norm_self_attn(x).to(x.dtype)
        x = x + self.self_attn.o_proj(self.attend(*self.self_attn.qkv(normed, normed, pe, pe), mask))
        normed = self.norm_cross_attn(x).to(x.dtype)
        x = x + self.cross_attn.o_proj(self.attend(*self.cross_attn.qkv(normed, states, pe, pe_states), states_mask))
        return x + self.mlp(self.norm_mlp(x).to(x.dtype))


class AnimaAdapter(nn.Module):
    """The text adapter: an embedding of T5's tokens, and blocks (six, as published)."""

    def __init__(self, sizes: AdapterShape):
        super().__init__()
        self.head = sizes.head
        self.embed = nn.Embedding(sizes.words, sizes.width)
        self.blocks = nn.ModuleList(LLMAdapterTransformerBlock(sizes) for _ in range(sizes.blocks))
        self.out_proj = nn.Linear(sizes.width, sizes.width)
        self.norm = WeightedRMSNorm(sizes.width)
        self.tables = RopeTableCache()

    def forward(self, states: Tensor, mask: Tensor, ids: Tensor, ids_mask: Tensor) -> Tensor:
        """States of Qwen3 [B, L, source], zero after each caption, with their mask, and ids of T5 [B, T] with theirs ->
        the text for the denoiser [B, T, C], zero after each caption.
        """
        is_caption, is_visible = ids_mask.to(torch.bool), mask.to(torch.bool)
        # An empty caption would have no visible token, for which attention may return NaN, so it sees the zeros after
        # it.
        is_visible = is_visible | ~is_visible.any(dim=1, keepdim=True)
        x = self.embed(ids.long()).to(states.dtype)
        pe, pe_states = (self.positions(row, tokens.shape[1], ids.device) for row, tokens in enumerate((ids, states)))
        for block in self.blocks:
            x = block(x, states, is_caption, is_visible, pe, pe_states)
        return self.norm(self.out_proj(x)).to(states.dtype) * is_caption[..., None]

    def positions(self, row: int, length: int, device: torch.device) -> Tensor:
        """Return the RoPE table for a text [2, length, D / 2], cached by length."""
        # Each row of tokens has its own table: sharing a tensor would become a guard of the compiled block, whose
        # failure recompiles it and ends the recording of a CUDA graph.
        return self.tables.of(
            (row, length), device, lambda: rope(torch.arange(length, device=device)[:, None], (self.head,))
        )
