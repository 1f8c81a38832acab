"""The static facts of Z-Image."""

import re

from library.families.facts import (
    AdapterModule,
    BlockGroup,
    FamilyFacts,
    HubLora,
    HubModel,
    ImportedModel,
    Shapes,
    has_tensor,
    hub_files,
)

ZIMAGE_TRANSFORMER = "a Z-Image transformer"
ZIMAGE_MODULATION = re.compile(r"^layers\.\d+\.adaLN_modulation\.0\.weight$")
OMNI = "a Z-Image-Omni transformer"


def recognise_zimage(shapes: Shapes) -> str:
    """Describe a Z-Image checkpoint. Lumina 2 shares most names, but pads no tokens, and has other modulation layers in
    its blocks; Turbo has the same names.
    """
    whole = {"cap_embedder.1.weight", "cap_pad_token", "layers.0.attention_norm1.weight"} <= shapes.keys()
    if not whole and not any(map(ZIMAGE_MODULATION.search, shapes)):
        return ""
    return OMNI if any(name.startswith("siglip_embedder.") for name in shapes) else ZIMAGE_TRANSFORMER


def zimage_hub_model(title: str, name: str, version: str) -> HubModel:
    """Return a transformer of ComfyUI's repositories, with the parts that all of them need."""
    files = hub_files(
        f"Comfy-Org/{name}",
        pretrained_model_name_or_path=(f"split_files/diffusion_models/{name}_bf16", 12_309_866_400),
        text_encoder=("split_files/text_encoders/qwen_3_4b", 8_044_982_048),
        vae=("split_files/vae/ae", 335_304_388),
    )
    return HubModel(title, files, {"model_version": version})


FACTS = FamilyFacts(
    name="zimage",
    title="Z-Image",
    base_model=ZIMAGE_TRANSFORMER,
    scripts={
        "zimage_train_network": "library.families.zimage.options:ZImageLora",
        "zimage_train": "library.families.zimage.options:ZImageTrain",
    },
    family="library.families.zimage.family:ZImageFamily",
    pipelines=("ZImagePipeline",),
    recognise=recognise_zimage,
    base_models=(ZIMAGE_TRANSFORMER,),
    base_model_version="z_image",
    architecture="Z-Image",
    implementation="https://github.com/Tongyi-MAI/Z-Image",
    adapter_modules={"networks.lora_zimage": AdapterModule("library.families.zimage.options:ZImageArgs")},
    blocks=(BlockGroup("Blocks", 30, r"_layers_(\d+)_"),),
    exceeds_fp16=True,
    most_blocks_swapped=29,
    imported=ImportedModel(30, 29, size_shift="flux_shift", model_version="base"),
    unguided_scale=0.0,
    text_tokens=128,
    graphs={"ZImageNoiseRefiner": 1, "ZImageContextRefiner": 1, "ZImageTransformerBlock": 1},
    compile_seconds=15,
    has_sd_scripts_defaults=False,
    named_options={r"de[-_]?turbo": {"model_version": "base"}, "turbo": {"model_version": "turbo"}},
    assistant_loras=(
        HubLora(
            "Z-Image-Turbo-adapter-v2",
            "ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter_v2.safetensors",
        ),
    ),
    hub_models=(
        zimage_hub_model("Z-Image", "z_image", "base"),
        zimage_hub_model("Z-Image Turbo", "z_image_turbo", "turbo"),
    ),
    part_options={
        "text_encoder": has_tensor("model.embed_tokens.weight", 151936, 2560),
        "vae": has_tensor("decoder.conv_in.weight", 512, 16, 3, 3),
    },
)
