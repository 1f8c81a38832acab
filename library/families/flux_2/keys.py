"""Names of FLUX.2 tensors: the single file's own (BFL), and diffusers', with the tables between them; LoRA modules."""

from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

from library.families.flux_2.facts import FLUX_2_TRANSFORMER
from library.families.shared import double_stream_keys
from library.families.shared.double_stream_keys import DOUBLE_STREAM_ATTENTION, SWAPPED, DoubleStreamKeys
from library.families.shared.double_stream_lora import DoubleStreamLoraNames
from library.families.shared.lora_names import Shapes, SharedForm

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
    """Diffusers keys -> {BFL key: its diffusers keys, in the order of their rows}.

    Raises KeyError with the name of a missing tensor.
    """
    names = set(names)
    guided = "time_guidance_embed.guidance_embedder.linear_1.weight" in names
    return double_stream_keys.present_pairs(TREES.pairs(*TREES.counts(names), guided), names)


class Flux2LoraNames(DoubleStreamLoraNames):
    """BFL's tree and diffusers'; ComfyUI and diffusers both load all of a file with kohya's names."""

    title: ClassVar[str] = "FLUX.2"
    version_word: ClassVar[str] = "flux_2"
    words: ClassVar[tuple[str, ...]] = (
        "to_qkv_mlp_proj",
        "linear_in",
        "linear_out",
        "time_guidance_embed",
        "double_stream_modulation_img",
        "double_stream_modulation_txt",
        "single_stream_modulation",
    )
    # Distinguished from FLUX.1 by names in diffusers' tree, in BFL's only by sizes.
    marks: ClassVar[str] = (
        r"\.(to_qkv_mlp_proj|attn\.to_out(?!\.\d))(\.|$)|^transformer_blocks\.\d+\.ff(_context)?\.linear_(in|out)(\.|$)"
    )
    ratios: ClassVar[Mapping[str, int]] = {"linear1": 9, "img_mlp.0": 6, "txt_mlp.0": 6}
    shared: ClassVar[SharedForm] = SharedForm(has_alphas=False, has_lokr=True)  # diffusers rejects alphas
    mergeable: ClassVar[tuple[str, ...]] = (FLUX_2_TRANSFORMER,)
    layouts: ClassVar[DoubleStreamKeys] = TREES
    sources: ClassVar[Callable[[Shapes], Mapping[str, tuple[str, ...]]]] = staticmethod(flux_2_sources)


LORA_NAMES = Flux2LoraNames()
