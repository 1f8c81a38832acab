from library.families.flux_2 import keys
from library.families.shared import double_stream_keys


def to_diffusers(tensors):
    """The single file's tensors by diffusers' names, with the parts of joined ones apart."""
    pairs = keys.TREES.pairs(*keys.TREES.counts(tensors), "guidance_in.in_layer.weight" in tensors)
    return double_stream_keys.split_tensors(tensors, pairs, lambda tensor, pieces: [len(tensor) // pieces] * pieces)
