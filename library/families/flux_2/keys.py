"""Names of FLUX.2 tensors: the single file's own (BFL), and diffusers', with the tables between them."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from library.families.shared import double_stream_keys
from library.families.shared.double_stream_keys import DOUBLE_STREAM_ATTENTION, SWAPPED, DoubleStreamKeys, join_tensors

TREES = DoubleStreamKeys(
    outside={
        "img_in": ("x_embedder",),
        "txt_in": ("context_embedder",),
        "time_in.in_layer": ("time_guidance_embed.timestep_embedder.linear_1",),
        "time_in.out_layer": ("time_guidance_embed.timestep_embedder.linear_2",),
        "guidance_in.in_layer": ("time_guidance_embed.guidance_embedder.linear_1",),
        "guidance_in.out_layer": ("time_guidance_embed.guidance_embedder.linear_2",),
        "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
        "double_stream_modulation_txt.lin": ("double_stream_modulation_txt.linear",),
        "single_stream_modulation.lin": ("single_stream_modulation.linear",),
        SWAPPED: ("norm_out.linear",),
        "final_layer.linear": ("proj_out",),
    },
    double={
        **DOUBLE_STREAM_ATTENTION,
        "img_mlp.0": ("ff.linear_in",),
        "img_mlp.2": ("ff.linear_out",),
        "txt_mlp.0": ("ff_context.linear_in",),
        "txt_mlp.2": ("ff_context.linear_out",),
    },
    single={"linear1": ("attn.to_qkv_mlp_proj",), "linear2": ("attn.to_out",)},
    marks=("double_stream_modulation_img.linear.weight",),
    ends=(".weight",),
)


def flux_2_sources(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Diffusers keys -> {BFL key: the diffusers keys it is made of, in the order of their rows}.

    Raises KeyError with the name of a tensor that is missing.
    """
    names = set(names)
    guided = "time_guidance_embed.guidance_embedder.linear_1.weight" in names
    return double_stream_keys.present_pairs(TREES.pairs(*TREES.counts(names), guided), names)


def flux_2_to_bfl(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A diffusers state dict -> the single file's."""
    return {
        name: join_tensors(name, [tensors[part] for part in made_of])
        for name, made_of in flux_2_sources(tensors).items()
    }


def flux_2_to_diffusers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The single file's state dict -> diffusers'. Rows of fused tensors are views."""
    pairs = TREES.pairs(*TREES.counts(tensors), "guidance_in.in_layer.weight" in tensors)
    return double_stream_keys.split_tensors(tensors, pairs, lambda tensor, pieces: [len(tensor) // pieces] * pieces)
