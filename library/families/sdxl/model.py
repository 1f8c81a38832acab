"""SDXL's checkpoints: the files, and the networks in them."""

from library.families.sdxl import keys
from library.families.sdxl.facts import FACTS, SDXL_CHECKPOINT, UNET_ALONE
from library.families.shared import clip, expected_tensors
from library.families.shared.unet_checkpoint import TextEncoderFiles, UnetCheckpoints
from library.families.shared.unet_tensors import projected_clip

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
            lambda t: clip.encoder(t, "quick_gelu"),
            expected_tensors.clip,
        ),
        "clip_g": TextEncoderFiles(
            "text_encoder_2",
            "second text encoder",
            lambda t: clip.encoder(t, "gelu", projected=True),
            projected_clip,
        ),
    },
    scale=0.13025,
    added=True,
)
