"""State dicts of FLUX.1 and FLUX.2 by the names of the single file (BFL's) and by diffusers' names."""

import torch

from library.families.flux import keys
from library.families.flux_2 import keys as flux_2_keys
from library.families.shared.double_stream_keys import SWAPPED, join_tensors


def split_tensors(tensors, pairs, sizes):
    """The single file's tensors by diffusers' names. `sizes` returns the rows of each slice of a fused tensor; slices
    are views."""
    out = {}
    for name, made_of in pairs:
        tensor = tensors[name]
        if name.startswith(SWAPPED):
            shift, scale = tensor.chunk(2)
            tensor = torch.cat((scale, shift))
        parts = tensor.split(sizes(tensor, len(made_of))) if len(made_of) > 1 else (tensor,)
        out.update(zip(made_of, parts, strict=True))
    return out


def flux_to_bfl(tensors):
    sources = keys.flux_sources(tensors)
    return {name: join_tensors(name, [tensors[part] for part in made_of]) for name, made_of in sources.items()}


def flux_to_diffusers(tensors):
    hidden, guided = tensors["img_in.weight"].shape[0], "guidance_in.in_layer.weight" in tensors

    # Query, key, value, and in single blocks the MLP, which is the rest.
    def sizes(tensor, pieces):
        return [hidden, hidden, hidden, tensor.shape[0] - 3 * hidden][:pieces]

    pairs = keys.key_pairs(*keys.TREES.counts(tensors), guided, keys.count_approximator_layers(tensors))
    return split_tensors(tensors, pairs, sizes)


def in_equal_pieces(tensor, pieces):
    return [len(tensor) // pieces] * pieces


def flux_2_to_diffusers(tensors):
    trees = flux_2_keys.TREES
    pairs = trees.pairs(*trees.counts(tensors), "guidance_in.in_layer.weight" in tensors)
    return split_tensors(tensors, pairs, in_equal_pieces)
