"""The static facts of Stable Diffusion 1.5."""

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

SD15_CHECKPOINT, UNET_ALONE = "an SD 1.5 checkpoint", "an SD 1.5 U-Net without text encoders"
# Around attention it has convolutions, where later versions have matrices.
PROJECTION = re.compile(r"\.(attentions\.\d+|1)\.proj_in\.weight$")

IN_LEVEL = r"(\d+)_(resnets|attentions|downsamplers|upsamplers)_(\d+)"  # the rest of an adapter's name


def _number_in_side(match: re.Match[str]) -> int:
    """Return the number of a block among three for each level, of which the last has the change of size, too."""
    return 3 * int(match[1]) + (2 if match[2].endswith("samplers") else int(match[3]))


def recognise_sd15(shapes: Shapes) -> str:
    """Describe a checkpoint of Stable Diffusion 1.x: later versions have other text encoders, or other layers."""

    def some(*starts: str) -> bool:
        return any(name.startswith(starts) for name in shapes)

    if some("cond_stage_model.transformer.") and some("model.diffusion_model.input_blocks."):
        return SD15_CHECKPOINT
    has_convolutions = any(len(shape) == 4 for name, shape in shapes.items() if PROJECTION.search(name))
    if not has_convolutions or some("cond_stage_model.", "conditioner.", "add_embedding."):
        return ""
    if some("model.diffusion_model.input_blocks.", "input_blocks."):
        return UNET_ALONE
    return "an SD 1.5 U-Net in the diffusers layout" if some("down_blocks.") else ""


FACTS = FamilyFacts(
    name="sd15",
    title="SD 1.5",
    base_model="an SD 1.5 single file",
    scripts={
        "train_network": "library.families.sd15.options:Sd15Lora",
        "fine_tune": "library.families.sd15.options:Sd15Finetune",
        "train_db": "library.families.sd15.options:Sd15DreamBooth",
        "train_textual_inversion": "library.families.sd15.options:Sd15TextualInversion",
    },
    family="library.families.sd15.family:Sd15Family",
    pipelines=("StableDiffusionPipeline",),
    recognise=recognise_sd15,
    base_models=(SD15_CHECKPOINT,),
    base_model_version="sd_v1",
    architecture="stable-diffusion-v1",
    implementation="https://github.com/CompVis/stable-diffusion",
    has_prediction_type=True,
    adapter_modules={
        "networks.lora": AdapterModule("library.families.sd15.network_args:Sd15Args"),
        "networks.lora_fa": AdapterModule("library.families.sd15.network_args:Sd15Args", frozen_down=True),
    },
    blocks=(
        # As sd-scripts counts them: the first input block is the first convolution, which carries no adapter.
        BlockGroup("Input blocks", 12, f"_down_blocks_{IN_LEVEL}", lambda match: 1 + _number_in_side(match)),
        BlockGroup("Middle blocks", 1, "_mid_block_", lambda match: 0),
        BlockGroup("Output blocks", 12, f"_up_blocks_{IN_LEVEL}", lambda match: _number_in_side(match)),
    ),
    trained_in_compute_dtype=False,
    saves_all_parts=True,
    most_blocks_swapped=12,
    text_tokens=0,
    graphs={"BasicTransformerBlock": 3, "ResnetBlock2D": 12, "GroupNorm": 3},
    compile_seconds=83,  # not measured: by the number of graphs, from those of the same blocks in SDXL
    few_step_loras=(
        FewStepLora(
            "LCM",
            "latent-consistency/lcm-lora-sdv1-5/pytorch_lora_weights.safetensors",
            prompt={"sample_steps": 4, "scale": 1.0, "sample_sampler": "lcm"},
        ),
    ),
    hub_models=(
        HubModel(
            "SD 1.5",
            (
                HubFile(
                    "pretrained_model_name_or_path",
                    "stable-diffusion-v1-5/stable-diffusion-v1-5",
                    "v1-5-pruned-emaonly.safetensors",
                    4_265_146_304,
                ),
            ),
        ),
    ),
    part_options={"vae": has_tensor("decoder.conv_in.weight", 512, 4, 3, 3)},
    denoiser_prefix="model.diffusion_model.",
    named_options={r"v[-_ ]?(pred|param)": {"v_parameterization": True}},
    embedding_keys={"clip_l": "emb_params"},
)
