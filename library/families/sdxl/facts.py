"""The static facts of SDXL."""

import re

from library.families.facts import (
    AdapterModule,
    BlockGroup,
    FamilyFacts,
    FewStepLora,
    HubFile,
    HubModel,
    Shapes,
    has_tensor,
)

# The second transformer layer of an attention block: older versions have one.
DEEP = re.compile(r"^model\.diffusion_model\.(middle_block|output_blocks\.\d+)\.1\.transformer_blocks\.1\.")
SDXL_CHECKPOINT, UNET_ALONE = "an SDXL checkpoint", "an SDXL U-Net without text encoders"


def recognise_sdxl(shapes: Shapes) -> str:
    """Describe an SDXL checkpoint; other versions of Stable Diffusion have other text encoders."""

    def some(*starts: str) -> bool:
        return any(name.startswith(starts) for name in shapes)

    if some("down_blocks.") and not some("model.diffusion_model."):
        return "an SDXL U-Net in the diffusers layout" if "add_embedding.linear_1.weight" in shapes else ""
    if not some("model.diffusion_model."):
        if some("input_blocks.") and "label_emb.0.0.weight" in shapes:
            return UNET_ALONE
        return SDXL_CHECKPOINT if some("conditioner.embedders.1.model.") else ""
    if some("conditioner.embedders.1."):
        return SDXL_CHECKPOINT
    if not some("model.diffusion_model.input_blocks."):  # a part; older versions have one layer per attention
        return UNET_ALONE if any(map(DEEP.search, shapes)) else ""
    if some("conditioner.embedders.0.model."):
        return "an SDXL refiner checkpoint"
    alone = not some("cond_stage_model.") and "model.diffusion_model.label_emb.0.0.weight" in shapes
    return UNET_ALONE if alone else ""


def sdxl_hub_model(title: str, repository: str, file: str, size: int) -> HubModel:
    return HubModel(title, (HubFile("pretrained_model_name_or_path", repository, file, size),))


# The noise at every 250th and every 125th of the 1000 training timesteps, from the last one on.
SIGMAS_OF_4_STEPS = (14.6146, 4.0817, 1.6129, 0.6932)
SIGMAS_OF_8_STEPS = (14.6146, 7.2974, 4.0817, 2.4925, 1.6129, 1.069, 0.6932, 0.3977)

FACTS = FamilyFacts(
    name="sdxl",
    title="SDXL",
    base_model="an SDXL single file",
    scripts={
        "sdxl_train_network": "library.families.sdxl.options:SdxlLora",
        "sdxl_train": "library.families.sdxl.options:SdxlTrain",
        "sdxl_train_textual_inversion": "library.families.sdxl.options:SdxlTextualInversion",
        "sdxl_train_control_net_lllite": "library.families.sdxl.options:SdxlControlLLLite",
    },
    family="library.families.sdxl.family:SdxlFamily",
    pipelines=("StableDiffusionXLPipeline",),
    recognise=recognise_sdxl,
    base_models=(SDXL_CHECKPOINT,),
    base_model_version="sdxl_base_v1-0",
    architecture="stable-diffusion-xl-v1-base",
    implementation="https://github.com/Stability-AI/generative-models",
    has_prediction_type=True,
    adapter_modules={
        "networks.lora": AdapterModule("library.families.sdxl.network_args:SdxlArgs"),
        "networks.lora_fa": AdapterModule("library.families.sdxl.network_args:SdxlArgs", frozen_down=True),
    },
    blocks=(
        BlockGroup("Input blocks", 9, r"_input_blocks_(\d+)_"),
        BlockGroup("Middle blocks", 3, r"_middle_block_(\d+)_"),
        BlockGroup("Output blocks", 9, r"_output_blocks_(\d+)_"),
    ),
    trained_in_compute_dtype=False,
    saves_all_parts=True,
    most_blocks_swapped=60,
    text_tokens=0,
    graphs={"BasicTransformerBlock": 2, "ResnetBlock2D": 12, "GroupNorm": 2},
    compile_seconds=77,  # 75 measured without the norms, whose graphs are small
    few_step_loras=(
        FewStepLora(
            "SDXL-Lightning-4steps",
            "ByteDance/SDXL-Lightning/sdxl_lightning_4step_lora.safetensors",
            prompt={"sample_sigmas": SIGMAS_OF_4_STEPS, "scale": 1.0, "sample_sampler": "euler"},
        ),
        FewStepLora(
            "SDXL-Lightning-8steps",
            "ByteDance/SDXL-Lightning/sdxl_lightning_8step_lora.safetensors",
            prompt={"sample_sigmas": SIGMAS_OF_8_STEPS, "scale": 1.0, "sample_sampler": "euler"},
        ),
        FewStepLora(
            "DMD2-4steps",
            "tianweiy/DMD2/dmd2_sdxl_4step_lora_fp16.safetensors",
            prompt={"sample_sigmas": SIGMAS_OF_4_STEPS, "scale": 1.0, "sample_sampler": "lcm"},
        ),
    ),
    hub_models=(
        sdxl_hub_model(
            "SDXL base 1.0", "stabilityai/stable-diffusion-xl-base-1.0", "sd_xl_base_1.0.safetensors", 6_938_078_334
        ),
        sdxl_hub_model(
            "Illustrious XL 0.1",
            "OnomaAIResearch/Illustrious-xl-early-release-v0",
            "Illustrious-XL-v0.1.safetensors",
            6_938_292_816,
        ),
        sdxl_hub_model("NoobAI XL 1.1", "Laxhar/noobai-XL-1.1", "NoobAI-XL-v1.1.safetensors", 7_105_349_958),
    ),
    part_options={"vae": has_tensor("decoder.conv_in.weight", 512, 4, 3, 3)},
    denoiser_prefix="model.diffusion_model.",
    named_options={r"v[-_ ]?(pred|param)": {"v_parameterization": True}},
)
