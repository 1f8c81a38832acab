"""Checkpoints of SD 1.5: the files, and the networks in them."""

from library.families.sd15 import keys
from library.families.sd15.facts import FACTS, SD15_CHECKPOINT, UNET_ALONE
from library.families.shared import clip, expected_tensors
from library.families.shared.unet_checkpoint import TextEncoderFiles, UnetCheckpoints

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
            lambda tensors: clip.encoder(tensors, "quick_gelu"),
            expected_tensors.clip,
        )
    },
    scale=0.18215,
    heads=HEADS,
)
