"""Reference images of Qwen-Image-Edit: additional tokens of the transformer, and image tokens in Qwen2.5-VL's prompt.

The text encoder's positions count images in rows and columns. transformers 5 does so only if it receives the type of
each token, which diffusers does not pass; here they are counted as in the models' training, and as in musubi-tuner.
"""

import importlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from library.families.shared import language_model, random_networks
from library.families.shared.chat_images import FRAMES, MERGED, ImagePatches, SeeingModel, Size, cut_pixels, scaled_size
from library.families.shared.language_model import DEFAULT_THETA
from library.families.shared.tensor_names import count_list_blocks
from library.families.shared.weights import assign

PATCH = 14  # pixels of a patch's side
TOKEN = PATCH * MERGED  # pixels of a token's side
MIN_PIXELS, MAX_PIXELS = 56 * 56, 12845056  # minimum and maximum pixels of an image in the text encoder
MEAN, DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
ROPE_SECTIONS = [16, 24, 24]  # channel pairs of a head rotated by frame, row and column
VISION = "visual."  # prefix of the vision encoder's tensors
VISION_MARK = f"{VISION}patch_embed.proj.weight"
VISION_HEAD = 80  # width of a head in the vision encoder


def seen_size(size: Size, area: int) -> Size:
    """Return an image's width and height in the text encoder, after scaling to about `area` pixels."""
    width, height = scaled_size(size, area)
    sides = [round(side / TOKEN) * TOKEN for side in (width, height)]
    if math.prod(sides) > MAX_PIXELS:
        factor = math.sqrt(width * height / MAX_PIXELS)
        sides = [max(TOKEN, math.floor(side / factor / TOKEN) * TOKEN) for side in (width, height)]
    elif math.prod(sides) < MIN_PIXELS:
        factor = math.sqrt(MIN_PIXELS / (width * height))
        sides = [math.ceil(side * factor / TOKEN) * TOKEN for side in (width, height)]
    return sides[0], sides[1]


def cut_into_patches(image: Image.Image, area: int) -> ImagePatches:
    """Scale an image to about `area` pixels and cut it into patches."""
    # Scaled twice, as in the models' pipelines: by the pipeline, and by the image processor of the text encoder.
    first = image.convert("RGB").resize(scaled_size(image.size, area), Image.Resampling.LANCZOS)
    scaled = np.asarray(first.resize(seen_size(image.size, area), Image.Resampling.BICUBIC)).astype("float32") / 255
    colours = torch.from_numpy((scaled - np.array(MEAN, "float32")) / np.array(DEVIATION, "float32"))
    return cut_pixels(colours, PATCH)


def build_vision_model(tensors: Mapping[str, Tensor]) -> SeeingModel:
    """Return the model with the sizes of its tensors by plain name, which are not copied. Raises KeyError naming the
    first missing one.
    """
    model = empty_vision_model(*sizes_from_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}))
    assign(model.language, tensors)
    assign(model.visual, {name.removeprefix(VISION): tensors[name] for name in tensors if name.startswith(VISION)})
    return model


def sizes_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the settings of the language model and of the vision encoder, from shapes by plain name. Raises KeyError
    naming a missing one.
    """
    return language_model.settings_of(shapes), {
        "depth": count_list_blocks(shapes, f"{VISION}blocks"),
        "hidden_size": shapes[VISION_MARK][0],
        "intermediate_size": shapes[f"{VISION}blocks.0.mlp.gate_proj.weight"][0],
    }


def empty_vision_model(language: Mapping[str, int], vision: Mapping[str, int]) -> SeeingModel:
    """Build a model on the meta device. Every eighth layer of the vision encoder has full attention."""
    modeling: Any = importlib.import_module("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    rope = {"rope_type": "default", "rope_theta": DEFAULT_THETA, "mrope_section": ROPE_SECTIONS}
    text = modeling.Qwen2_5_VLTextConfig(
        **language,
        max_position_embeddings=128000,
        rms_norm_eps=1e-6,
        rope_parameters=rope,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    eyes = modeling.Qwen2_5_VLVisionConfig(
        **vision,
        out_hidden_size=language["hidden_size"],
        num_heads=max(vision["hidden_size"] // VISION_HEAD, 1),
        fullatt_block_indexes=list(range(7, vision["depth"], 8)),
        patch_size=PATCH,
        spatial_merge_size=MERGED,
        temporal_patch_size=FRAMES,
    )

    def make() -> nn.Module:
        return SeeingModel(modeling.Qwen2_5_VLTextModel(text), modeling.Qwen2_5_VisionTransformerPretrainedModel(eyes))

    module = random_networks.build_on_meta(make)
    assert isinstance(module, SeeingModel)
    return module
