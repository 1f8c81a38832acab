"""SDXL's checkpoints: the files, and the networks in them."""

from typing import Any

from library.families.sdxl import keys
from library.families.sdxl.facts import FACTS, SDXL_CHECKPOINT, UNET_ALONE
from library.families.shared import clip, expected_tensors
from library.families.shared.unet_checkpoint import TextEncoderFiles, UnetCheckpoints
from library.families.shared.unet_folder import PipelineFolder
from library.families.shared.unet_tensors import projected_clip
from library.objectives import diffusion

CHECKPOINTS = UnetCheckpoints(
    facts=FACTS,
    single=keys.SDXL_FILE,
    whole=SDXL_CHECKPOINT,
    alone=UNET_ALONE,
    gigabytes="6.9",
    encoders={
        "clip_l": TextEncoderFiles(
            "text_encoder",
            "first text encoder (CLIP-L)",
            lambda t: clip.build_encoder(t, "quick_gelu"),
            expected_tensors.clip,
        ),
        "clip_g": TextEncoderFiles(
            "text_encoder_2",
            "second text encoder",
            lambda t: clip.build_encoder(t, "gelu", projected=True),
            projected_clip,
        ),
    },
    scale=0.13025,
    added=True,
)


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
