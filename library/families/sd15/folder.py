"""A diffusers folder of SD 1.5."""

from typing import Any

from library.families.shared.unet_folder import PipelineFolder
from library.objectives import diffusion


def usual_scheduler() -> Any:
    """Return the scheduler of the published SD 1.5."""
    from diffusers import PNDMScheduler

    options = {"beta_start": diffusion.BETA_START, "beta_end": diffusion.BETA_END, "beta_schedule": "scaled_linear"}
    return PNDMScheduler(**options, skip_prk_steps=True, steps_offset=1)


SD15_FOLDER = PipelineFolder(
    "StableDiffusionPipeline",
    {"clip_l": ("text_encoder", "CLIPTextModel", "tokenizer")},
    usual_scheduler,
    {
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "safety_checker": [None, None],
        "requires_safety_checker": False,
    },
)
