"""The static facts of Qwen-Image-2.1."""

import re

from library.families.facts import (
    AdapterModule,
    BlockGroup,
    FamilyFacts,
    HubLora,
    HubModel,
    ImportedModel,
    Shapes,
    hub_files,
    is_qwen3_vl,
)

QWEN_21_TRANSFORMER, QWEN_21_VAE = "a Qwen-Image-2.1 transformer", "a Qwen-Image-2.1 VAE"
# The norm of the text, and of any block its gated MLP, in either layout.
QWEN_21_MARKS = re.compile(r"^txt_in\.text_norm\.|^transformer_blocks\.\d+\.img_mlp\.(gate_up|gate_layer)\.")
CHANNELS = 64  # of the VAE's latents


def recognise_qwen_21(shapes: Shapes) -> str:
    """Describe a Qwen-Image-2.1 checkpoint, of which any block is enough; Turbo has the same names."""
    return QWEN_21_TRANSFORMER if any(map(QWEN_21_MARKS.search, shapes)) else ""


def recognise_qwen_21_part(shapes: Shapes) -> str:
    """Describe its VAE, whose latents have more channels than those of others, in either layout."""
    marks = ("decoder.conv_in.weight", "decoder.conv1.weight")
    kernels = (shape for name, shape in shapes.items() if name.endswith(marks) and len(shape) > 3)
    return QWEN_21_VAE if any(shape[1] == CHANNELS for shape in kernels) else ""


FACTS = FamilyFacts(
    name="qwen_image_21",
    title="Qwen-Image-2.1",
    base_model=QWEN_21_TRANSFORMER,
    scripts={
        "qwen_image_21_train_network": "library.families.qwen_image_21.options:Qwen21Lora",
        "qwen_image_21_train": "library.families.qwen_image_21.options:Qwen21Train",
    },
    family="library.families.qwen_image_21.family:Qwen21Family",
    pipelines=("QwenImage21Pipeline", "QwenImage21ModularPipeline", "QwenImage21TurboModularPipeline"),
    recognise=recognise_qwen_21,
    recognise_part=recognise_qwen_21_part,
    base_models=(QWEN_21_TRANSFORMER,),
    base_model_version="qwen_image_21",
    architecture="Qwen-Image-2.1",
    implementation="https://github.com/QwenLM/Qwen-Image-2.1",
    adapter_modules={"networks.lora_qwen_image_21": AdapterModule("library.families.qwen_image_21.options:Qwen21Args")},
    blocks=(BlockGroup("Blocks", 32, r"_transformer_blocks_(\d+)_"),),
    prompt_images={"control_image_path": {}},
    exceeds_fp16=True,  # not known of its published model, which is trained in bf16
    most_blocks_swapped=31,
    imported=ImportedModel(32, 31, size_shift="qwen_shift", model_version="base"),
    text_tokens=128,
    graphs={"JointTransformerBlock": 1},
    compile_seconds=15,  # as of other families of one graph; not measured
    decoder_memory=3.4,  # as of the VAE that it descends from; not measured
    has_sd_scripts_defaults=False,
    assistant_loras=(
        HubLora(
            "Qwen-Image-2.1-assistant-v3",
            "SimpleTuner/Qwen-Image-2.1-training-assistant-v3/pytorch_lora_weights.safetensors",
        ),
    ),
    named_options={
        "turbo": {"model_version": "turbo"},
        r"qwen[-_]image[-_]2[._]?1[-_](bf16|fp8|int8)": {"model_version": "base"},
    },
    hub_models=(
        HubModel(
            "Qwen-Image-2.1",
            hub_files(
                "Comfy-Org/Qwen-Image-2.1",
                pretrained_model_name_or_path=("diffusion_models/qwen_image_2.1_bf16", 14_230_000_000),
                text_encoder=("text_encoders/qwen3vl_8b_bf16", 17_500_000_000),
                vae=("vae/qwen_image_2.1_vae_bf16", 680_000_000),
            ),
            {"model_version": "base"},
        ),
    ),
    part_options={
        "text_encoder": is_qwen3_vl(4096),
        "vae": lambda shapes: recognise_qwen_21_part(shapes) == QWEN_21_VAE,
    },
)
