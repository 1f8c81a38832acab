"""The static facts of FLUX 3."""

import re

from library.families.facts import AdapterModule, BlockGroup, FamilyFacts, ImportedModel, Shapes, is_qwen3_vl

FLUX_3_TRANSFORMER = "a FLUX.3 transformer"
DISTILLED = "a distilled FLUX.3 transformer"
# Of any block and of the modulations, in either layout: blocks of their own for each kind of tokens, and single blocks
# whose layers are not fused.
FLUX_3_MARKS = re.compile(
    r"(^|\.)(early|single)_stream_modulations\.|(^|\.)(content_|txt_)?mode_blocks\.|(^|\.)x_embedders\.image"
    r"|(^|\.)single_blocks\.\d+\.([qkv]_proj|attn_out|mlp_in|mlp_out)\."
    r"|(^|\.)single_transformer_blocks\.\d+\.(ff\.linear_|attn\.to_out\.0\.)"
)
DISTILLED_MARKS = re.compile(r"(^|\.)(ref_time_in|target_timestep_embedder)\.")


def recognise_flux_3(shapes: Shapes) -> str:
    """Describe a FLUX.3 checkpoint in either layout, of which any block is enough. A distilled one reads a second time,
    whose tensors tell it apart.
    """
    if not any(map(FLUX_3_MARKS.search, shapes)):
        return ""
    return DISTILLED if any(map(DISTILLED_MARKS.search, shapes)) else FLUX_3_TRANSFORMER


def is_vae_with_statistics(shapes: Shapes) -> bool:
    """Return whether these are the shapes of FLUX.2's VAE, which FLUX.3 shares: it has statistics of its latents."""
    sizes = {name.rpartition("decoder.conv_in.")[2]: tuple(shape) for name, shape in shapes.items()}
    return sizes.get("weight") == (512, 32, 3, 3) and any(name.endswith("bn.running_mean") for name in shapes)


FACTS = FamilyFacts(
    name="flux_3",
    title="FLUX.3",
    base_model=FLUX_3_TRANSFORMER,
    scripts={
        "flux_3_train_network": "library.families.flux_3.options:Flux3Lora",
        "flux_3_train": "library.families.flux_3.options:Flux3Train",
    },
    family="library.families.flux_3.family:Flux3Family",
    pipelines=("Flux3ModularPipeline", "Flux3DistilledModularPipeline"),
    recognise=recognise_flux_3,
    recognised_first=True,  # FLUX.1 shares its names
    base_models=(FLUX_3_TRANSFORMER, DISTILLED),
    base_model_version="flux_3_klein_base",
    architecture="Flux.3-klein-base",
    relatives={DISTILLED: ("flux_3_klein", "Flux.3-klein")},
    implementation="https://github.com/black-forest-labs/flux-3-image-klein",
    adapter_modules={"networks.lora_flux_3": AdapterModule("library.families.flux_3.options:Flux3Args")},
    blocks=(
        BlockGroup("Image blocks", 5, r"_content_mode_blocks_image_(\d+)_"),
        BlockGroup("Text blocks", 5, r"_txt_mode_blocks_(\d+)_"),
        BlockGroup("Joint blocks", 28, r"^lora_unet_single_blocks_(\d+)_"),
    ),
    exceeds_fp16=True,  # not known of its published models, which are trained in bf16
    most_blocks_swapped=27,
    imported=ImportedModel(28, 27),
    text_tokens=160,
    graphs={"Flux3ImageBlock": 1, "Flux3TextBlock": 1, "MMSingleStreamBlock": 1},  # one more with reference images
    compile_seconds=15,  # as of other families of three graphs; not measured
    has_sd_scripts_defaults=False,
    hub_folder="black-forest-labs/flux-3-image-klein-base",
    prompt_images={"control_image_path": {"vae_dtype": ("float32", "bfloat16")}},
    part_options={"text_encoder": is_qwen3_vl(2560), "vae": is_vae_with_statistics},
)
