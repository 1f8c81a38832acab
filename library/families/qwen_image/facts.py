"""The static facts of Qwen-Image."""

import re

from library.families.facts import (
    AdapterModule,
    BlockGroup,
    FamilyFacts,
    FewStepLora,
    HubModel,
    ImportedModel,
    Shapes,
    hub_files,
)
from library.families.qwen_image.variants import EDIT_2511, EDITS, QWEN_VARIANTS, TRANSFORMER

VAE = "a Qwen-Image VAE"
TEXT_ENCODER = "a Qwen2.5-VL text encoder"
INDEX = "__index_timestep_zero__"  # empty tensor by which ComfyUI recognises Qwen-Image-Edit-2511
# Tensors that only other variants have.
RELATIVES = {"time_text_embed.addition_t_embedding.weight": "Qwen-Image-Layered", INDEX: EDIT_2511}
QWEN_MODULATION = re.compile(r"(^|\.)transformer_blocks\.\d+\.(img|txt)_mod\.1\.weight$")


def recognise_qwen(shapes: Shapes) -> str:
    """Describe a Qwen-Image checkpoint, with or without a prefix. Any block is enough, so that shards are recognised,
    too.
    """
    if not any(map(QWEN_MODULATION.search, shapes)):
        return ""
    return next((title for mark, title in RELATIVES.items() if any(n.endswith(mark) for n in shapes)), TRANSFORMER)


def recognise_qwen_part(shapes: Shapes) -> str:
    """Describe another file of Qwen-Image: its VAE has convolutions over time, its text encoder biases in attention."""
    for name, shape in shapes.items():
        if (
            shape[1:2] == (16,)
            and len(shape) == 5
            and name.endswith(("decoder.conv_in.weight", "decoder.conv1.weight"))
        ):
            channels = shapes.get(f"{name.rpartition('decoder.')[0]}encoder.conv_in.weight", (0, 3))[1]
            return VAE if channels == 3 else "a VAE of Qwen-Image-Layered"
    if any(name.endswith("layers.0.self_attn.q_proj.bias") and "vision" not in name for name in shapes) and any(
        name.endswith("embed_tokens.weight") for name in shapes
    ):
        return TEXT_ENCODER
    return ""


def options_of(version: str) -> dict[str, str | bool]:
    return {"model_version": version, "cache_text_encoder_outputs": True} if version else {}


def qwen_hub_model(title: str, name: str, version: str = "") -> HubModel:
    """Return a transformer of a repository, with the parts that all of them share."""
    denoiser = hub_files(
        f"Comfy-Org/Qwen-Image{'-Edit' if version else ''}_ComfyUI",
        pretrained_model_name_or_path=(f"split_files/diffusion_models/{name}", 40_861_031_488),
    )
    parts = hub_files(
        "Comfy-Org/Qwen-Image_ComfyUI",
        text_encoder=("split_files/text_encoders/qwen_2.5_vl_7b", 16_584_415_576),
        vae=("split_files/vae/qwen_image_vae", 253_806_246),
    )
    return HubModel(title, (*denoiser, *parts), options_of(version))


FACTS = FamilyFacts(
    name="qwen_image",
    title="Qwen-Image",
    base_model=TRANSFORMER,
    scripts={
        "qwen_image_train_network": "library.families.qwen_image.options:QwenLora",
        "qwen_image_train": "library.families.qwen_image.options:QwenTrain",
    },
    family="library.families.qwen_image.family:QwenFamily",
    pipelines=("QwenImagePipeline", "QwenImageEditPipeline", "QwenImageEditPlusPipeline"),
    model_options={
        EDIT_2511: options_of("edit-2511"),
        "QwenImageEditPipeline": options_of("edit"),
        "QwenImageEditPlusPipeline": options_of("edit-2509"),
    },
    named_options={
        "edit[-_]2511": options_of("edit-2511"),
        "edit[-_](plus|2509)": options_of("edit-2509"),
        "image[-_]edit": options_of("edit"),
    },
    recognise=recognise_qwen,
    recognise_part=recognise_qwen_part,
    base_models=(TRANSFORMER, EDIT_2511),
    base_model_version="qwen_image",
    architecture="Qwen-Image",
    relatives={EDIT_2511: (QWEN_VARIANTS["edit-2511"].base_model_version, QWEN_VARIANTS["edit-2511"].architecture)},
    implementation="https://github.com/QwenLM/Qwen-Image",
    adapter_modules={"networks.lora_qwen_image": AdapterModule("library.families.qwen_image.options:QwenArgs")},
    blocks=(BlockGroup("Blocks", 60, r"_transformer_blocks_(\d+)_"),),
    demo_variants={"qwen_image_edit": QWEN_VARIANTS["edit-2511"].title},
    prompt_images={"control_image_path": {"model_version": EDITS}},
    exceeds_fp16=True,
    most_blocks_swapped=59,
    imported=ImportedModel(60, 59, size_shift="qwen_shift"),
    text_tokens=192,
    graphs={"QwenImageTransformerBlock": 1},
    compile_seconds=15,
    decoder_memory=3.4,
    has_sd_scripts_defaults=False,
    few_step_loras=tuple(
        FewStepLora(
            f"Qwen-Image-Lightning-{steps}steps",
            f"lightx2v/Qwen-Image-Lightning/Qwen-Image-Lightning-{steps}steps-{version}-bf16.safetensors",
            prompt={"sample_steps": steps, "scale": 1.0, "flow_shift": 3.0},
        )
        for steps, version in ((4, "V1.0"), (8, "V1.1"))
    ),
    hub_models=(
        qwen_hub_model("Qwen-Image", "qwen_image_bf16"),
        qwen_hub_model("Qwen-Image 2512", "qwen_image_2512_bf16"),
        *(
            qwen_hub_model(QWEN_VARIANTS[version].title, f"qwen_image_{version.replace('-', '_')}_bf16", version)
            for version in EDITS
        ),
    ),
    part_options={
        "text_encoder": lambda shapes: recognise_qwen_part(shapes) == TEXT_ENCODER,
        "vae": lambda shapes: recognise_qwen_part(shapes) == VAE,
    },
)
