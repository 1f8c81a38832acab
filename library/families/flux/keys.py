"""Names of FLUX.1 tensors: the single file's own (BFL), and diffusers', with the tables between them; LoRA modules."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ClassVar

from library.families.flux.variants import CHROMA, FILL, IN_DIFFUSERS_LAYOUT, TRANSFORMER
from library.families.shared import double_stream_keys
from library.families.shared.double_stream_keys import DOUBLE_STREAM_ATTENTION, SWAPPED, DoubleStreamKeys, linears
from library.families.shared.double_stream_lora import DoubleStreamLoraNames
from library.families.shared.lora_names import Shapes, SharedForm

TREES = DoubleStreamKeys(
    outside={
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
    },
    double={
        "img_mod.lin": ("norm1.linear",),
        "txt_mod.lin": ("norm1_context.linear",),
        **DOUBLE_STREAM_ATTENTION,
        "img_mlp.0": ("ff.net.0.proj",),
        "img_mlp.2": ("ff.net.2",),
        "txt_mlp.0": ("ff_context.net.0.proj",),
        "txt_mlp.2": ("ff_context.net.2",),
    },
    single={
        "modulation.lin": ("norm.linear",),
        "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
        "linear2": ("proj_out",),
    },
    # SD3 shares some of these, but has no single blocks.
    marks=("transformer_blocks.0.attn.add_k_proj.weight", "single_transformer_blocks.0.proj_mlp.weight"),
)
# Chroma has an approximator instead of these.
MODULATIONS = ("time_in.", "vector_in.", SWAPPED, "img_mod.", "txt_mod.", "modulation.")
APPROXIMATOR = "distilled_guidance_layer."


def count_flux_blocks(names: Iterable[str]) -> dict[str, int]:
    double, single = TREES.counts(names)
    return {"DoubleStreamBlock": double, "SingleStreamBlock": single}


def flux_sources(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Diffusers keys -> {BFL key: its diffusers keys, in the order of their rows}.

    Raises KeyError with the name of a missing tensor.
    """
    names = set(names)
    guided = "time_text_embed.guidance_embedder.linear_1.weight" in names
    return double_stream_keys.present_pairs(
        key_pairs(*TREES.counts(names), guided, count_approximator_layers(names)), names
    )


def count_approximator_layers(names: Iterable[str]) -> int:
    layers = f"{APPROXIMATOR}layers."
    return len({name.removeprefix(layers).split(".")[0] for name in names if name.startswith(layers)})


def key_pairs(doubles: int, singles: int, guided: bool, layers: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield every BFL key of a model with these numbers of blocks and of the approximator's layers, and the diffusers
    keys of its rows.
    """
    for bfl, made_of in TREES.pairs(doubles, singles, guided):
        if not layers or not bfl.startswith(MODULATIONS) and not bfl.split(".", 2)[-1].startswith(MODULATIONS):
            yield bfl, made_of
    if layers:
        yield from linears({name: (name,) for name in ("in_proj", "out_proj")}, APPROXIMATOR, APPROXIMATOR, TREES.ends)
    for i in range(layers):
        layer, norm = f"{APPROXIMATOR}layers.{i}.", f"{APPROXIMATOR}norms.{i}."
        yield from linears({"in_layer": ("linear_1",), "out_layer": ("linear_2",)}, layer, layer, TREES.ends)
        yield f"{norm}scale", (f"{norm}weight",)


class FluxLoraNames(DoubleStreamLoraNames):
    """A layer of BFL's tree is one or several layers of diffusers' tree."""

    prefixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "kohya": {"denoiser": "lora_unet_", "clip_l": "lora_te1_", "t5xxl": "lora_te3_"},
        "diffusers": {"denoiser": "transformer.", "clip_l": "text_encoder.", "t5xxl": "text_encoder_2."},
        "comfy": {
            "denoiser": "diffusion_model.",
            "clip_l": "text_encoders.clip_l.transformer.",
            "t5xxl": "text_encoders.t5xxl.transformer.",
        },
    }
    other_prefixes: ClassVar[Mapping[str, str]] = {
        "lora_te_": "clip_l",
        "lora_te2_": "t5xxl",
        "lora_transformer_": "denoiser",
        "lycoris_": "denoiser",
        "base_model.model.": "denoiser",
    }
    title: ClassVar[str] = "FLUX.1"
    # Of diffusers' tree, which FLUX.2 and Qwen-Image share; attention layers of double blocks are ambiguous.
    marks: ClassVar[str] = (
        r"\.ff_context\.net\.|\.norm1(_context)?\.linear$"
        r"|^single_transformer_blocks\.\d+\.(attn\.to_[qkv]$|proj_|norm\.linear$)"
    )
    absent: ClassVar[str] = r"^single_transformer_blocks\.\d+\.(ff\.|attn\.to_out)|^(txt_)?mode_blocks\."
    ratios: ClassVar[Mapping[str, int]] = {"linear1": 7, "img_mlp.0": 4, "txt_mlp.0": 4}
    encoder_names: ClassVar[tuple[str, ...]] = ("lora_te3_",)
    version_word: ClassVar[str] = "flux"
    # diffusers ignores lora_A under its own names of fused layers, and ComfyUI reads diffusers' names.
    shared: ClassVar[SharedForm] = SharedForm("diffusers", has_alphas=False)
    mergeable: ClassVar[tuple[str, ...]] = tuple(
        description + layout for description in (TRANSFORMER, FILL, CHROMA) for layout in ("", IN_DIFFUSERS_LAYOUT)
    )
    layouts: ClassVar[DoubleStreamKeys] = TREES
    sources: ClassVar[Callable[[Shapes], Mapping[str, tuple[str, ...]]]] = staticmethod(flux_sources)

    def shared_prefix(self, part: str) -> str:
        return self.prefixes["comfy" if part == "t5xxl" else "diffusers"][part]


LORA_NAMES = FluxLoraNames()
