"""The static facts of FLUX.2."""

import re

from library.families.facts import (
    AdapterModule,
    BlockGroup,
    FamilyFacts,
    FewStepLora,
    HubFile,
    HubModel,
    ImportedModel,
    Shapes,
    has_tensor,
    hub_files,
)

FLUX_2_TRANSFORMER = "a FLUX.2 transformer"
VAE = "a FLUX.2 VAE"
MODULATION_MARKS = ("double_stream_modulation_img.lin.weight", "double_stream_modulation_img.linear.weight")
# Of a double block; single blocks of other models have such an MLP, too.
GATED = re.compile(r"_mlp\.0\.weight$|(^|\.)transformer_blocks\.\d+\.ff(_context)?\.linear_in\.weight$")
MODEL_OPTION = "pretrained_model_name_or_path"
FLUX_2_VAE = ("split_files/vae/flux2-vae", 336_000_000)  # its place in a repository, and its size


def recognise_flux_2(shapes: Shapes) -> str:
    """Describe a FLUX.2 checkpoint in either layout: one modulation serves all blocks; a part without modulations is
    recognised by gated MLPs six times as wide as the stream.
    """
    gated = any(shape[0] == 6 * shape[-1] for name, shape in shapes.items() if shape and GATED.search(name))
    # In the diffusers layout, single blocks have one matrix for q, k, v and the gated MLP.
    joined = any("single_transformer_blocks." in name and "to_qkv_mlp_proj" in name for name in shapes)
    return FLUX_2_TRANSFORMER if gated or joined or any(mark in shapes for mark in MODULATION_MARKS) else ""


def recognise_flux_2_part(shapes: Shapes) -> str:
    # FLUX.2's VAE stores the statistics of its latents; FLUX.1's has none.
    marks = ("bn.running_mean", "decoder.conv_in.weight")
    return VAE if all(any(name.endswith(mark) for name in shapes) for mark in marks) else ""


KLEINS = ("klein-base-9b", "klein-base-4b", "klein-9b", "klein-4b")  # some have identical headers
EMBEDDING_SHAPES = ((151936, 2560), (151936, 4096), (131072, 5120))  # Qwen3 4B and 8B, Mistral


def flux_2_hub_model(size: str, length: int, encoder: tuple[str, int]) -> HubModel:
    """Return a base klein of Black Forest Labs, with text encoder and VAE from ComfyUI's repository."""
    name, repository, (words, of_words) = f"klein-base-{size}", f"Comfy-Org/flux2-klein-{size}", encoder
    denoiser = HubFile(MODEL_OPTION, f"black-forest-labs/FLUX.2-{name}", f"flux-2-{name.lower()}.safetensors", length)
    text_encoder = (f"split_files/text_encoders/{words}", of_words)
    parts = hub_files(repository, text_encoder=text_encoder, vae=FLUX_2_VAE)
    return HubModel(f"FLUX.2 klein base {size}", (denoiser, *parts), {"model_version": name.lower()})


FACTS = FamilyFacts(
    name="flux_2",
    title="FLUX.2",
    base_model=FLUX_2_TRANSFORMER,
    model_options={"Flux2Pipeline": {"model_version": "dev", "cache_text_encoder_outputs_to_disk": True}},
    scripts={
        "flux_2_train_network": "library.families.flux_2.options:Flux2Lora",
        "flux_2_train": "library.families.flux_2.options:Flux2Train",
    },
    family="library.families.flux_2.family:Flux2Family",
    pipelines=("Flux2KleinPipeline", "Flux2Pipeline"),
    recognise=recognise_flux_2,
    recognised_first=True,  # FLUX.1 shares its names
    recognise_part=recognise_flux_2_part,
    base_models=(FLUX_2_TRANSFORMER,),
    base_model_version="flux_2_klein_4b",
    architecture="Flux.2-klein-4b",
    implementation="https://github.com/black-forest-labs/flux2",
    adapter_modules={"networks.lora_flux_2": AdapterModule("library.families.flux_2.options:Flux2Args")},
    blocks=(
        BlockGroup("Double blocks", 8, r"_double_blocks_(\d+)_"),
        BlockGroup("Single blocks", 24, r"_single_blocks_(\d+)_"),
    ),
    most_blocks_swapped=20,
    imported=ImportedModel(20, 19, size_shift="flux2_shift"),
    text_tokens=512,
    graphs={"DoubleStreamBlock": 1, "SingleStreamBlock": 1},
    compile_seconds=15,
    has_sd_scripts_defaults=False,
    prompt_images={"control_image_path": {"vae_dtype": ("float32", "bfloat16")}},
    named_options={name.replace("-", "[-_]?"): {"model_version": name} for name in KLEINS},
    few_step_loras=(
        FewStepLora(
            "FLUX.2-dev-Turbo-8steps",
            "fal/FLUX.2-dev-Turbo/flux.2-turbo-lora.safetensors",
            prompt={
                "sample_sigmas": (1.0, 0.6509, 0.4374, 0.2932, 0.1893, 0.1108, 0.0495, 0.00031),
                "scale": 1.0,
                "guidance_scale": 2.5,
            },
        ),
    ),
    hub_models=(
        flux_2_hub_model("4B", 7_752_000_000, ("qwen_3_4b", 8_044_982_048)),
        flux_2_hub_model("9B", 18_158_000_000, ("qwen_3_8b_fp8mixed", 8_660_000_000)),
        HubModel(
            "FLUX.2 dev",
            (
                HubFile(MODEL_OPTION, "black-forest-labs/FLUX.2-dev", "flux2-dev.safetensors", 64_446_000_000),
                *hub_files(
                    "Comfy-Org/flux2-dev",
                    text_encoder=("split_files/text_encoders/mistral_3_small_flux2_fp8", 18_030_000_000),
                    vae=FLUX_2_VAE,
                ),
            ),
            {"model_version": "dev", "cache_text_encoder_outputs_to_disk": True},
        ),
    ),
    part_options={
        "text_encoder": lambda shapes: tuple(shapes.get("model.embed_tokens.weight", ())) in EMBEDDING_SHAPES,
        "vae": lambda shapes: (
            recognise_flux_2_part(shapes) == VAE and has_tensor("decoder.conv_in.weight", 512, 32, 3, 3)(shapes)
        ),
    },
)
