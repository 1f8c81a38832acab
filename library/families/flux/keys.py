"""Names of FLUX.1 tensors: the single file's own (BFL), and diffusers', with the tables between them.

A BFL tensor is made of one or several diffusers tensors, put together along their rows. The one exception is the last
modulation, whose two halves (shift, scale) diffusers keeps the other way round.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

SWAPPED = "final_layer.adaLN_modulation.1"

# BFL module -> diffusers modules, in the order of their rows.
OUTSIDE = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
    SWAPPED: ("norm_out.linear",),
    "final_layer.linear": ("proj_out",),
}
DOUBLE = {
    "img_mod.lin": ("norm1.linear",),
    "txt_mod.lin": ("norm1_context.linear",),
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
}
SINGLE = {
    "modulation.lin": ("norm.linear",),
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
}
# In place of these, which it lacks, Chroma has an approximator.
MODULATIONS = ("time_in.", "vector_in.", SWAPPED, "img_mod.", "txt_mod.", "modulation.")
APPROXIMATOR = "distilled_guidance_layer."
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


def is_diffusers(names: Iterable[str]) -> bool:
    """Whether plain keys are those of diffusers' FLUX transformer. SD3 shares some, but has no single blocks."""
    return {"transformer_blocks.0.attn.add_k_proj.weight", "single_transformer_blocks.0.proj_mlp.weight"} <= set(names)


def blocks(names: Iterable[str]) -> dict[str, int]:
    """How many blocks of each class a transformer has, from its plain keys in either layout."""
    names = list(names)
    double, single = ("transformer_blocks", "single_transformer_blocks") if is_diffusers(names) else (
        "double_blocks", "single_blocks")  # fmt: skip
    return {"DoubleStreamBlock": _count(names, double), "SingleStreamBlock": _count(names, single)}


def sources(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Diffusers keys -> {BFL key: the diffusers keys it is made of, in the order of their rows}.

    Raises KeyError with the name of a tensor that is missing.
    """
    present = set(names)
    doubles, singles = (_count(present, f"{kind}transformer_blocks") for kind in ("", "single_"))
    guided = "time_text_embed.guidance_embedder.linear_1.weight" in present
    table = dict(_pairs(doubles, singles, guided, _layers(present)))
    missing = [name for made_of in table.values() for name in made_of if name not in present]
    if missing:
        raise KeyError(missing[0])
    return table


def _count(names: Iterable[str], blocks: str) -> int:
    return len({name.split(".")[1] for name in names if name.startswith(f"{blocks}.")})


def _layers(names: Iterable[str]) -> int:
    """How many layers the approximator has; 0 where there is none, as in FLUX.1."""
    layers = f"{APPROXIMATOR}layers."
    return len({name.removeprefix(layers).split(".")[0] for name in names if name.startswith(layers)})


def _pairs(doubles: int, singles: int, guided: bool, layers: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every BFL key of a model with so many blocks and approximator's layers, and the diffusers keys of its rows."""
    outside = {bfl: made_of for bfl, made_of in OUTSIDE.items() if guided or not bfl.startswith("guidance_in.")}
    for bfl, made_of in (*_linears(outside, "", ""), *_blocks(doubles, singles)):
        if not layers or not bfl.startswith(MODULATIONS) and not bfl.split(".", 2)[-1].startswith(MODULATIONS):
            yield bfl, made_of
    if layers:
        yield from _linears({name: (name,) for name in ("in_proj", "out_proj")}, APPROXIMATOR, APPROXIMATOR)
    for i in range(layers):
        layer, norm = f"{APPROXIMATOR}layers.{i}.", f"{APPROXIMATOR}norms.{i}."
        yield from _linears({"in_layer": ("linear_1",), "out_layer": ("linear_2",)}, layer, layer)
        yield f"{norm}scale", (f"{norm}weight",)


def _blocks(doubles: int, singles: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    for kind, count, table, norms in (("", doubles, DOUBLE, DOUBLE_NORMS), ("single_", singles, SINGLE, SINGLE_NORMS)):
        for i in range(count):
            bfl, diffusers = f"{kind or 'double_'}blocks.{i}.", f"{kind}transformer_blocks.{i}."
            yield from _linears(table, bfl, diffusers)
            yield from ((bfl + ours, (diffusers + theirs,)) for ours, theirs in norms.items())


def _linears(table: Mapping[str, tuple[str, ...]], bfl: str, diffusers: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for ours, theirs in table.items():
        for end in (".weight", ".bias"):
            yield bfl + ours + end, tuple(diffusers + name + end for name in theirs)


def joined(name: str, rows: list[Tensor]) -> Tensor:
    """The diffusers tensors of one BFL key -> its tensor."""
    if name.startswith(SWAPPED):
        scale, shift = rows[0].chunk(2)
        return torch.cat((shift, scale))
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def to_bfl(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A diffusers state dict -> the single file's."""
    return {name: joined(name, [tensors[part] for part in made_of]) for name, made_of in sources(tensors).items()}


def to_diffusers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The single file's state dict -> diffusers'. Rows of fused tensors are views."""
    doubles, singles = _count(tensors, "double_blocks"), _count(tensors, "single_blocks")
    hidden, guided = tensors["img_in.weight"].shape[0], "guidance_in.in_layer.weight" in tensors
    out: dict[str, Tensor] = {}
    for name, made_of in _pairs(doubles, singles, guided, _layers(tensors)):
        tensor = tensors[name]
        if name.startswith(SWAPPED):
            shift, scale = tensor.chunk(2)
            tensor = torch.cat((scale, shift))
        sizes = [hidden, hidden, hidden, tensor.shape[0] - 3 * hidden][: len(made_of)]
        parts = tensor.split(sizes) if len(made_of) > 1 else (tensor,)
        out.update(zip(made_of, parts, strict=True))
    return out
