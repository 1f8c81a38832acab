"""Checkpoints of SD 1.5: the files, and the networks in them."""

from typing import Any

from library.families.sd15 import keys
from library.families.sd15.facts import FACTS, SD15_CHECKPOINT, UNET_ALONE
from library.families.shared import clip, expected_tensors
from library.families.shared.unet_checkpoint import TextEncoderFiles, UnetCheckpoints
from library.families.shared.unet_folder import PipelineFolder
from library.objectives import diffusion

HEADS = 8  # of the U-Net's attention, at every level

CHECKPOINTS = UnetCheckpoints(
    facts=FACTS,
    single=keys.SD15_FILE,
    whole=SD15_CHECKPOINT,
    alone=UNET_ALONE,
    gigabytes="2.1",
    encoders={
        "clip_l": TextEncoderFiles(
            "text_encoder",
            "text encoder (CLIP-L)",
            lambda tensors: clip.build_encoder(tensors, "quick_gelu"),
            expected_tensors.clip,
        )
    },
    scale=0.18215,
    heads=HEADS,
)


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
