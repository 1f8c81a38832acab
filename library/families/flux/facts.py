"""The static facts of FLUX.1."""

import re

from library.families.facts import (
    AdapterModule,
    BlockGroup,
    FamilyFacts,
    FewStepLora,
    HubFile,
    HubLora,
    HubModel,
    ImportedModel,
    Shapes,
    has_tensor,
    matching,
)
from library.families.flux.variants import (
    CHROMA,
    DEPTH,
    FILL,
    FLEX,
    FLUX_VARIANTS,
    IN_DIFFUSERS_LAYOUT,
    IN_FOLDER,
    RADIANCE,
    TRANSFORMER,
    options_naming,
)

# Tensors with the input and output channels of a transformer, in the layouts of BFL and diffusers.
IN_AND_OUT = (("img_in.weight", "final_layer.linear.weight"), ("x_embedder.weight", "proj_out.weight"))
# Later, unsupported models that share names with FLUX.1.
LATER = (
    (r"^double_blocks\.0\.img_(attn\.norm\.key_norm\.weight|mlp\.gate_proj)", None, "a transformer like FLUX.1's"),
)

# Tensors of later blocks, by which a part of a file is recognised, and the ratio of rows of a matrix in each.
LATER_BLOCKS = (
    (re.compile(r"(^|\.)double_blocks\.\d+\.(img|txt)_attn\.qkv\.weight$"), 3, ""),
    (re.compile(r"(^|\.)single_blocks\.\d+\.linear1\.weight$"), 7, ""),
    (re.compile(r"(^|\.)single_transformer_blocks\.\d+\.proj_mlp\.weight$"), 4, IN_DIFFUSERS_LAYOUT),
)
# Modulation of a block, absent in Chroma.
FLUX_MODULATION = re.compile(r"_mod\.lin\.|\.modulation\.lin\.|\.norm1?\.linear\.")


def part_of(shapes: Shapes) -> str:
    """Describe a part of a file without the first blocks."""
    for pattern, times, layout in LATER_BLOCKS:
        if any(pattern.search(name) and shape[0] == times * shape[-1] for name, shape in shapes.items() if shape):
            if any(map(FLUX_MODULATION.search, shapes)):
                return TRANSFORMER + layout
            return "" if any(".modulation." in name for name in shapes) else CHROMA + layout
    return ""


def recognise_flux(shapes: Shapes) -> str:
    """Describe a FLUX.1 checkpoint. SD3 shares names with it, but has no single blocks. A later model has a gated MLP,
    or one not four times as wide as its stream.
    """
    if any(name.endswith("_mlp.0.weight") and shape[0] != 4 * shape[-1] for name, shape in shapes.items() if shape):
        return ""
    if words := matching(LATER, shapes):
        return words

    def some(part: str) -> bool:
        return any(part in name for name in shapes)

    layout = "" if some("double_blocks.0.img_attn.qkv.weight") else IN_DIFFUSERS_LAYOUT
    if layout and not some("single_transformer_blocks.0."):
        return part_of(shapes)
    if some("distilled_guidance_layer."):
        return f"{RADIANCE if some('nerf_') else CHROMA}{layout}"
    sizes = {name.rpartition("diffusion_model.")[2]: shape for name, shape in shapes.items()}
    takes, gives = (sizes.get(name, (0, 0)) for name in IN_AND_OUT[bool(layout)])
    times = takes[1] // gives[0] if len(takes) == len(gives) == 2 and gives[0] else 1
    return {FLUX_VARIANTS["fill"].inputs: FILL, 2: DEPTH}.get(times, TRANSFORMER) + layout


MODEL_OPTION = "pretrained_model_name_or_path"
T5XXL = HubFile("t5xxl", "comfyanonymous/flux_text_encoders", "t5xxl_fp16.safetensors", 9_787_841_024)
AE = HubFile("ae", "Comfy-Org/Lumina_Image_2.0_Repackaged", "split_files/vae/ae.safetensors", 335_304_388)
FLUX_PARTS = (
    HubFile("clip_l", "comfyanonymous/flux_text_encoders", "clip_l.safetensors", 246_144_152),
    T5XXL,
    AE,
)


def flux_hub_model(title: str, name: str, size: int, model_type: str = "") -> HubModel:
    """Return a model published by Black Forest Labs as FLUX.1-NAME, with a file of the lower-case name."""
    file = f"flux1-{name.lower()}.safetensors"
    options = {"model_type": model_type} if model_type else {}
    return HubModel(
        title, (HubFile(MODEL_OPTION, f"black-forest-labs/FLUX.1-{name}", file, size), *FLUX_PARTS), options
    )


FACTS = FamilyFacts(
    name="flux",
    title="FLUX.1",
    base_model=TRANSFORMER,
    model_options={
        CHROMA: (chroma := {"model_type": "chroma", "apply_t5_attn_mask": True}),
        CHROMA + IN_DIFFUSERS_LAYOUT: chroma,
        "ChromaPipeline": chroma,
        "FluxKontextPipeline": {"model_type": "kontext"},
        FILL: (fill := {"model_type": "fill"}),
        FILL + IN_DIFFUSERS_LAYOUT: fill,
        "FluxFillPipeline": fill,
    },
    named_options={"kontext": {"model_type": "kontext"}, FLEX: {"bypass_guidance_embedding": True}},
    scripts={
        "flux_train_network": "library.families.flux.options:FluxLora",
        "flux_train": "library.families.flux.options:FluxTrain",
    },
    family="library.families.flux.family:FluxFamily",
    pipelines=("FluxPipeline", "FluxKontextPipeline", "FluxFillPipeline", "ChromaPipeline"),
    recognise=recognise_flux,
    base_models=(TRANSFORMER, FILL, CHROMA, *IN_FOLDER),
    base_model_version="flux1",
    architecture="flux-1-dev",
    relatives={
        variant.description + layout: (variant.base_model_version, variant.architecture or "flux-1-dev")
        for variant in FLUX_VARIANTS.values()
        for layout in ("", IN_DIFFUSERS_LAYOUT)
        if variant.description != TRANSFORMER
    },
    implementation="https://github.com/black-forest-labs/flux",
    adapter_modules={"networks.lora_flux": AdapterModule("library.families.flux.network_args:FluxArgs")},
    blocks=(
        BlockGroup("Double blocks", 19, r"_double_blocks_(\d+)_"),
        BlockGroup("Single blocks", 38, r"_single_blocks_(\d+)_"),
    ),
    demo_variants={name: FLUX_VARIANTS[name].title for name in ("chroma", "kontext", "fill")},
    most_blocks_swapped=34,
    imported=ImportedModel(38, 35, ("clip_l", "t5xxl", "ae"), "flux_shift"),
    text_tokens=512,
    graphs={"DoubleStreamBlock": 1, "SingleStreamBlock": 1},
    compile_seconds=20,
    prompt_images={
        "control_image_path": options_naming(lambda v: v.control_images.most > 0 or v.control_images.inpaints),
        "control_image_mask_path": options_naming(lambda v: v.control_images.inpaints),
    },
    few_step_loras=(
        FewStepLora(
            "FLUX.1-Turbo-Alpha-8steps",
            "alimama-creative/FLUX.1-Turbo-Alpha/diffusion_pytorch_model.safetensors",
            prompt={"sample_steps": 8, "scale": 1.0, "guidance_scale": 3.5},
        ),
        FewStepLora(
            "Hyper-FLUX.1-dev-8steps",
            "ByteDance/Hyper-SD/Hyper-FLUX.1-dev-8steps-lora.safetensors",
            strength=0.125,
            prompt={"sample_steps": 8, "scale": 1.0, "guidance_scale": 3.5},
        ),
    ),
    assistant_loras=(
        HubLora("FLUX.1-schnell-adapter", "ostris/FLUX.1-schnell-training-adapter/pytorch_lora_weights.safetensors"),
    ),
    hub_models=(
        flux_hub_model("FLUX.1 dev", "dev", 23_802_932_552),
        flux_hub_model("FLUX.1 schnell", "schnell", 23_782_506_688),
        flux_hub_model("FLUX.1 Krea dev", "Krea-dev", 23_802_932_552, "krea"),
        flux_hub_model("FLUX.1 Kontext dev", "Kontext-dev", 23_802_932_552, "kontext"),
        flux_hub_model("FLUX.1 Fill dev", "Fill-dev", 23_804_922_408, "fill"),
        HubModel(
            "Chroma1 HD",
            (HubFile(MODEL_OPTION, "lodestones/Chroma1-HD", "Chroma1-HD.safetensors", 17_800_038_288), T5XXL, AE),
            chroma,
        ),
    ),
    part_options={
        "clip_l": has_tensor("text_model.embeddings.token_embedding.weight", 49408, 768),
        "t5xxl": has_tensor("encoder.block.0.layer.0.SelfAttention.q.weight", 4096, 4096),
        "ae": has_tensor("decoder.conv_in.weight", 512, 16, 3, 3),
    },
)
