"""The static facts of Krea 2."""

import re

from library.families.facts import (
    AdapterModule,
    BlockGroup,
    FamilyFacts,
    FewStepLora,
    HubLora,
    HubModel,
    ImportedModel,
    Shapes,
    hub_files,
    is_qwen3_vl,
)

KREA_2_TRANSFORMER = "a Krea 2 transformer"
# Of any block and of the fusion of the text's layers, in either layout: a gate beside the heads of attention, and a
# gated MLP.
KREA_2_MARKS = re.compile(
    r"^(txtfusion|text_fusion)\.|^(blocks|transformer_blocks)\.\d+\.(attn\.(gate|to_gate)|(mlp|ff)\.(gate|up|down))\."
)
REPOSITORY = "Comfy-Org/Krea-2"


def recognise_krea_2(shapes: Shapes) -> str:
    """Describe a Krea 2 checkpoint, of which any block is enough; Raw and Turbo have the same names."""
    return KREA_2_TRANSFORMER if any(map(KREA_2_MARKS.search, shapes)) else ""


def krea_2_hub_model(title: str, version: str) -> HubModel:
    """Return a transformer of ComfyUI's repository, with the parts that both need."""
    files = hub_files(
        REPOSITORY,
        pretrained_model_name_or_path=(f"diffusion_models/krea2_{version}_bf16", 26_300_000_000),
        text_encoder=("text_encoders/qwen3vl_4b_bf16", 8_880_000_000),
        vae=("vae/qwen_image_vae", 253_806_246),
    )
    return HubModel(title, files, {"model_version": version})


def is_vae(shapes: Shapes) -> bool:
    """Return whether these are the shapes of Qwen-Image's VAE, in either layout."""
    marks = ("decoder.conv_in.weight", "decoder.conv1.weight")
    return any(name.endswith(marks) and tuple(shape[1:]) == (16, 3, 3, 3) for name, shape in shapes.items())


FACTS = FamilyFacts(
    name="krea_2",
    title="Krea 2",
    base_model=KREA_2_TRANSFORMER,
    scripts={
        "krea_2_train_network": "library.families.krea_2.options:Krea2Lora",
        "krea_2_train": "library.families.krea_2.options:Krea2Train",
    },
    family="library.families.krea_2.family:Krea2Family",
    pipelines=("Krea2Pipeline",),
    recognise=recognise_krea_2,
    base_models=(KREA_2_TRANSFORMER,),
    base_model_version="krea2",
    architecture="Krea-2",
    implementation="https://github.com/krea-ai/krea-2",
    adapter_modules={"networks.lora_krea2": AdapterModule("library.families.krea_2.options:Krea2Args")},
    blocks=(BlockGroup("Blocks", 28, r"^lora_unet_blocks_(\d+)_"),),
    exceeds_fp16=True,  # not known of its published models, which are trained in bf16
    most_blocks_swapped=27,
    imported=ImportedModel(28, 27, size_shift="krea2_shift", model_version="raw"),
    text_tokens=128,
    graphs={"Krea2LayerwiseBlock": 1, "Krea2RefinerBlock": 1, "SingleDiTBlock": 1},
    compile_seconds=15,  # as of other families of three graphs; not measured
    decoder_memory=3.4,
    has_sd_scripts_defaults=False,
    few_step_loras=(
        FewStepLora(
            "Krea-2-Turbo-8steps",
            f"{REPOSITORY}/loras/krea2_turbo_lora_rank_64_bf16.safetensors",
            prompt={"sample_steps": 8, "scale": 1.0, "flow_shift": 3.16},
        ),
    ),
    assistant_loras=(
        HubLora(
            "Krea-2-Turbo-adapter-v1", "ostris/krea2_turbo_training_adapter/krea2_turbo_training_adapter_v1.safetensors"
        ),
    ),
    named_options={
        "turbo": {"model_version": "turbo"},
        r"(^|[-_])raw([-_.]|$)": {"model_version": "raw"},
    },
    hub_models=(krea_2_hub_model("Krea 2 Raw", "raw"), krea_2_hub_model("Krea 2 Turbo", "turbo")),
    part_options={"text_encoder": is_qwen3_vl(2560), "vae": is_vae},
)
