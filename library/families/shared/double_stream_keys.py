"""Tensor names of transformers with double-stream and single-stream blocks: BFL's single file, and diffusers'.

A BFL tensor is the concatenation of one or several diffusers tensors along their rows. The only exception is the last
modulation, whose two halves (shift, scale) are swapped in diffusers.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from library.families.shared.tensor_names import count_list_blocks

LAST_MODULATION = re.compile(r"final_layer\.(\w+\.)?adaLN_modulation\.1\.")
Made = Mapping[str, tuple[str, ...]]  # BFL module -> diffusers modules, in the order of their rows
SWAPPED = "final_layer.adaLN_modulation.1"
DOUBLE_NORMS = {
    "img_attn.norm.query_norm.scale": "attn.norm_q.weight",
    "img_attn.norm.key_norm.scale": "attn.norm_k.weight",
    "txt_attn.norm.query_norm.scale": "attn.norm_added_q.weight",
    "txt_attn.norm.key_norm.scale": "attn.norm_added_k.weight",
}
SINGLE_NORMS = {
    "norm.query_norm.scale": "attn.norm_q.weight",
    "norm.key_norm.scale": "attn.norm_k.weight",
}
DOUBLE_STREAM_ATTENTION: Made = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
}


def linears(table: Made, bfl: str, diffusers: str, ends: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the tensors of layers under a prefix in each tree: BFL key, diffusers keys."""
    for ours, theirs in table.items():
        for end in ends:
            yield bfl + ours + end, tuple(diffusers + name + end for name in theirs)


@dataclass(frozen=True)
class DoubleStreamKeys:
    """The two trees of names of one model."""

    outside: Made
    double: Made
    single: Made
    marks: tuple[str, ...]  # plain keys that exist only in diffusers' tree
    ends: tuple[str, ...] = (".weight", ".bias")

    def is_diffusers(self, names: Iterable[str]) -> bool:
        return set(self.marks) <= set(names)

    def counts(self, names: Iterable[str]) -> tuple[int, int]:
        """Return the numbers of double and single blocks of a transformer, from its plain keys in either layout."""
        names = list(names)
        if self.is_diffusers(names):
            return count_list_blocks(names, "transformer_blocks"), count_list_blocks(names, "single_transformer_blocks")
        return count_list_blocks(names, "double_blocks"), count_list_blocks(names, "single_blocks")

    def pairs(self, doubles: int, singles: int, guided: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield every BFL key of a model with these numbers of blocks, and the diffusers keys of its rows."""
        outside = {bfl: of for bfl, of in self.outside.items() if guided or not bfl.startswith("guidance_in.")}
        yield from linears(outside, "", "", self.ends)
        blocks = (("", doubles, self.double, DOUBLE_NORMS), ("single_", singles, self.single, SINGLE_NORMS))
        for kind, number, table, norms in blocks:
            for i in range(number):
                bfl, diffusers = f"{kind or 'double_'}blocks.{i}.", f"{kind}transformer_blocks.{i}."
                yield from linears(table, bfl, diffusers, self.ends)
                yield from ((bfl + ours, (diffusers + theirs,)) for ours, theirs in norms.items())

    def canonical(self, path: str) -> tuple[str, int, int] | None:
        """A diffusers path -> (BFL path, index of the slice, number of slices). A BFL path is its own single slice;
        None for a diffusers path that is not a layer.
        """
        for bfl, made_of in self.outside.items():
            if path in made_of:
                return bfl, 0, 1
        if not path.startswith(("transformer_blocks.", "single_transformer_blocks.")):
            return path, 0, 1
        kind, number, inner = path.split(".", 2)
        double = kind == "transformer_blocks"
        table, blocks = (self.double, "double_blocks") if double else (self.single, "single_blocks")
        for bfl, made_of in table.items():
            if inner in made_of:
                return f"{blocks}.{number}.{bfl}", made_of.index(inner), len(made_of)
        return None

    def pieces(self, path: str) -> tuple[str, ...]:
        """A BFL path -> its diffusers modules, in the order of its rows; none without an equivalent."""
        if path in self.outside:
            return self.outside[path]
        kind, _, below = path.partition(".")
        number, _, inner = below.partition(".")
        table, blocks = {
            "double_blocks": (self.double, "transformer_blocks"),
            "single_blocks": (self.single, "single_transformer_blocks"),
        }.get(kind, ({}, ""))
        return tuple(f"{blocks}.{number}.{name}" for name in table.get(inner, ()))


def present_pairs(pairs: Iterable[tuple[str, tuple[str, ...]]], names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return these pairs as a table. Raises KeyError naming the first diffusers key that is missing."""
    table, names = dict(pairs), set(names)
    missing = [name for made_of in table.values() for name in made_of if name not in names]
    if missing:
        raise KeyError(missing[0])
    return table


def join_tensors(name: str, rows: list[Tensor]) -> Tensor:
    """Join the diffusers tensors of one BFL key to its tensor."""
    if LAST_MODULATION.match(name):
        scale, shift = rows[0].chunk(2)
        return torch.cat((shift, scale))
    return rows[0] if len(rows) == 1 else torch.cat(rows)
