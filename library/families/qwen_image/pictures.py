"""Reference images of Qwen-Image-Edit: additional tokens of the transformer, and image tokens in Qwen2.5-VL's prompt.

The text encoder's positions count images in rows and columns. transformers 5 does so only if it receives the type of
each token, which diffusers does not pass; here they are counted as in the models' training, and as in musubi-tuner.
"""

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from library.families.shared import random_networks
from library.families.shared.chat_images import FRAMES, MERGED, ImagePatches, Size, cut_pixels, scaled_size
from library.families.shared.language_model import DEFAULT_THETA, HEAD_WIDTH
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


class VisionLanguageModel(nn.Module):
    """Qwen2.5-VL without its last layer: the vision encoder and the language model."""

    def __init__(self, language: Any, visual: Any):
        super().__init__()
        self.language, self.visual = language, visual

    def forward(self, ids: Tensor, places: Tensor, picture: int, images: Sequence[ImagePatches]) -> Tensor:
        """Token ids [B, L], positions [3, B, L], the images of all rows in turn -> last hidden states [B, L, C]."""
        states = self.language.embed_tokens(ids)
        if images:
            device = ids.device
            grid = torch.tensor([(1, image.rows, image.columns) for image in images], device=device)
            patches = torch.cat([image.patches for image in images]).to(device, states.dtype)
            image_states = self.visual(patches, grid_thw=grid).pooler_output
            states = states.masked_scatter((ids == picture)[..., None], image_states.to(states.dtype))
        return self.language(inputs_embeds=states, position_ids=places).last_hidden_state


def build_vision_model(tensors: Mapping[str, Tensor]) -> VisionLanguageModel:
    """Return the model with the sizes of its tensors by plain name, which are not copied. Raises KeyError naming the
    first missing one.
    """
    model = empty_vision_model(**sizes_from_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}))
    language = {name: tensor for name, tensor in tensors.items() if not name.startswith(VISION)}
    visual = {name.removeprefix(VISION): tensor for name, tensor in tensors.items() if name.startswith(VISION)}
    assign(model.language, language)
    assign(model.visual, visual)
    return model


def language_sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the sizes of the language model from shapes by plain name. Raises KeyError naming a missing one."""
    words, hidden = shapes["embed_tokens.weight"]
    return {
        "words": words,
        "hidden": hidden,
        "mlp": shapes["layers.0.mlp.gate_proj.weight"][0],
        "layers": count_list_blocks(shapes, "layers"),
        "groups": shapes["layers.0.self_attn.k_proj.weight"][0] // HEAD_WIDTH,
    }


def sizes_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the arguments of `empty_vision_model` from shapes by plain name. Raises KeyError naming a missing one."""
    return {
        **language_sizes(shapes),
        "vision": shapes[VISION_MARK][0],
        "vision_mlp": shapes[f"{VISION}blocks.0.mlp.gate_proj.weight"][0],
        "vision_layers": count_list_blocks(shapes, f"{VISION}blocks"),
    }


def empty_vision_model(  # noqa: PLR0913 - all sizes that a file determines
    words: int, hidden: int, mlp: int, layers: int, groups: int, vision: int, vision_mlp: int, vision_layers: int
) -> VisionLanguageModel:
    """Build a model on the meta device. Every eighth layer of the vision encoder has full attention."""
    modeling: Any = importlib.import_module("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    rope = {"rope_type": "default", "rope_theta": DEFAULT_THETA, "mrope_section": ROPE_SECTIONS}
    text = modeling.Qwen2_5_VLTextConfig(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_WIDTH,
        num_key_value_heads=groups,
        max_position_embeddings=128000,
        rms_norm_eps=1e-6,
        rope_parameters=rope,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    eyes = modeling.Qwen2_5_VLVisionConfig(
        depth=vision_layers,
        hidden_size=vision,
        intermediate_size=vision_mlp,
        out_hidden_size=hidden,
        num_heads=max(vision // VISION_HEAD, 1),
        fullatt_block_indexes=list(range(7, vision_layers, 8)),
        patch_size=PATCH,
        spatial_merge_size=MERGED,
        temporal_patch_size=FRAMES,
    )

    def make() -> nn.Module:
        return VisionLanguageModel(
            modeling.Qwen2_5_VLTextModel(text), modeling.Qwen2_5_VisionTransformerPretrainedModel(eyes)
        )

    module = random_networks.build_on_meta(make)
    assert isinstance(module, VisionLanguageModel)
    return module
