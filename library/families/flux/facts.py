"""What FLUX.1 states about itself."""

from library.families.facts import AdapterModule, FamilyFacts, Shapes
from library.families.flux.variants import CHROMA, FOLDER, RADIANCE, TRANSFORMER, VARIANTS


def recognise(shapes: Shapes) -> str:
    """What a checkpoint is of FLUX.1. SD3 shares names with it, but has no single blocks."""

    def some(part: str) -> bool:
        return any(part in name for name in shapes)

    layout = "" if some("double_blocks.0.img_attn.qkv.weight") else FOLDER
    if layout and not some("single_transformer_blocks.0."):
        return ""
    if some("distilled_guidance_layer."):
        return f"{RADIANCE if some('nerf_') else CHROMA}{layout}"
    return f"{TRANSFORMER}{layout}"


FACTS = FamilyFacts(
    name="flux",
    title="FLUX.1",
    base_model=TRANSFORMER,
    scripts={
        "flux_train_network": "library.families.flux.options:FluxLora",
        "flux_train": "library.families.flux.options:FluxTrain",
    },
    family="library.families.flux.family:FluxFamily",
    pipelines=("FluxPipeline", "ChromaPipeline"),
    recognise=recognise,
    base_models=(TRANSFORMER, CHROMA),
    base_model_version="flux1",
    architecture="flux-1-dev",
    relatives={CHROMA: ("chroma", "chroma"), CHROMA + FOLDER: ("chroma", "chroma")},
    implementation="https://github.com/black-forest-labs/flux",
    has_prediction_type=False,
    adapter_modules={"networks.lora_flux": AdapterModule("library.families.flux.network_args:FluxArgs")},
    lora_names="library.families.flux.lora_names:NAMES",
    demo="library.families.flux.demo",
    demo_variants={"chroma": VARIANTS["chroma"].title},
    trained_in_compute_dtype=True,
    saves_all_parts=False,
    most_blocks_swapped=34,
    text_tokens=512,
    graphs=2,
    compile_seconds=20,
)
