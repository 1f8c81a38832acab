"""A diffusers folder of SDXL."""

from typing import Any

from library.families.shared.unet_folder import PipelineFolder
from library.objectives import diffusion


def usual_scheduler() -> Any:
    """Return the scheduler of the published SDXL models."""
    from diffusers import EulerDiscreteScheduler

    options = {"beta_start": diffusion.BETA_START, "beta_end": diffusion.BETA_END, "beta_schedule": "scaled_linear"}
    return EulerDiscreteScheduler(**options, steps_offset=1, timestep_spacing="leading")


SDXL_FOLDER = PipelineFolder(
    "StableDiffusionXLPipeline",
    {
        "clip_l": ("text_encoder", "CLIPTextModel", "tokenizer"),
        "clip_g": ("text_encoder_2", "CLIPTextModelWithProjection", "tokenizer_2"),
    },
    usual_scheduler,
    {
        "force_zeros_for_empty_prompt": True,
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
    },
)
