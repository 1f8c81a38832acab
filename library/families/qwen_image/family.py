"""Qwen-Image as a family: loading, encoding of images and captions, and the prediction of a training step."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from library.families.base import BlockChain, BlockCost, BlockInputs, Family, LatentCache, ModelComponents, TextCache
from library.families.capabilities import BlockModulation
from library.families.qwen_image import text_encoder
from library.families.qwen_image.checkpoint import qwen_checkpoint
from library.families.qwen_image.facts import INDEX
from library.families.qwen_image.options import QwenLora, QwenTrain
from library.families.qwen_image.pictures import TOKEN, cut_into_patches, seen_size
from library.families.qwen_image.sampler import QwenSampler
from library.families.shared import packing, qwen_vae
from library.families.shared.one_encoder import ENCODER, OneEncoderFamily
from library.objectives.base import NoisedBatch

if TYPE_CHECKING:
    from PIL import Image


BLOCK_CLASS = "QwenImageTransformerBlock"
TEXT_CACHE = TextCache(
    suffix="_qi_te.safetensors",
    keys=("vl_embed", "vl_mask"),
    mask="vl_mask",
    architecture="qwen_image",
    names={"vl_embed": "varlen_vl_embed"},
)


class QwenFamily(OneEncoderFamily):
    """Qwen-Image and its relatives: a transformer, Qwen2.5-VL and a VAE."""

    config: QwenLora | QwenTrain
    name = "qwen_image"
    sampler_class = QwenSampler
    swapped_class = BLOCK_CLASS
    block_classes = (BLOCK_CLASS,)
    block_chain = BlockChain(("transformer_blocks",))
    adapter_targets = (BLOCK_CLASS,)
    # A third of a block is modulation, computed once per image; half of the rest is for text.
    block_costs = {BLOCK_CLASS: BlockCost("transformer_blocks", activations=30, used=0.333)}
    modulation = {BLOCK_CLASS: BlockModulation(("img_mod.1", "txt_mod.1"), argument=2)}
    sample_defaults = {"negative_prompt": " ", "width": 1024, "height": 1024, "sample_steps": 25, "scale": 4.0}

    def __init__(self, config: QwenLora | QwenTrain):
        super().__init__(config)
        self.variant = variant = config.model.variant
        self.checkpoint = qwen_checkpoint(variant)
        self.architecture, self.base_model_version = variant.architecture, variant.base_model_version
        self.latent_cache = LatentCache(
            f"_{variant.short}.safetensors", keyed_by_size=True, architecture="qwen_image", frames=True
        )
        self.text_cache = replace(TEXT_CACHE, suffix=f"_{variant.short}_te.safetensors")
        # Dimensions with varying numbers of tokens: img, txt, pe, mask, and the marks of reference tokens.
        sizes = ((0, 1), (1, 1), (3, 1), (4, 1), *([(5, 0)] if variant.still_references else []))
        self.block_inputs = {BLOCK_CLASS: BlockInputs(streams=(0, 1), dynamic=sizes)}

    @property
    def picture_template(self) -> str:
        return self.variant.template

    def text(
        self, components: ModelComponents, captions: Sequence[str], encoders: tuple[str, ...] | None = None
    ) -> dict[str, Tensor]:
        """Encode captions without reference images, by the cache's keys; see OneEncoderFamily."""
        if not self.variant.template:
            return super().text(components, captions, encoders)
        if ENCODER not in (tuple(components.encoders) if encoders is None else encoders):
            return {}
        return self.text_with_pictures(components, captions, [()] * len(captions))

    def text_with_pictures(
        self, components: ModelComponents, captions: Sequence[str], pictures: "Sequence[Sequence[Image.Image]]"
    ) -> dict[str, Tensor]:
        """Captions with the reference images of each -> states [B, L, C] and a mask [B, L], by the cache's keys."""
        patches = [[cut_into_patches(image, self.variant.condition_area) for image in images] for images in pictures]
        arrays = text_encoder.encode_with_pictures(
            components.encoders[ENCODER], components.tokenizers[ENCODER], captions, patches, self.variant.numbered
        )
        return dict(zip(self.text_cache.keys, arrays, strict=True))

    def picture_tokens(self, components: ModelComponents, sizes: Sequence[tuple[int, int]]) -> int:
        """Return the number of tokens that images of these sizes add to a caption in a step."""
        seen_sizes = (seen_size(size, self.variant.condition_area) for size in sizes)
        counts = [width * height // TOKEN**2 for width, height in seen_sizes]
        return text_encoder.picture_tokens(components.tokenizers[ENCODER], counts, self.variant.numbered)

    def export(self, components: ModelComponents) -> dict[str, Tensor]:
        return super().export(components) | ({INDEX: torch.zeros(0)} if self.variant.still_references else {})

    # ---- a training step

    def control_latents(self, components: ModelComponents, pixels: Tensor) -> Tensor:
        return self.latents(components, pixels)

    def latents(self, components: ModelComponents, pixels: Tensor, generator: Any = None) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> normalised means, float32 [B, 16, H / 8, W / 8]; not sampled."""
        return qwen_vae.latents(components.vae, pixels)

    def velocity(
        self, denoiser: nn.Module, noised: NoisedBatch, text: dict[str, Tensor], controls: Sequence[Tensor]
    ) -> Tensor:
        """Return the predicted velocity, noise minus image, float32 [B, C, h, w]."""
        tokens, sizes = packing.pack_with_references(noised.latents, controls)
        output = denoiser(tokens, sizes, text["vl_embed"], text["vl_mask"], noised.timesteps)
        return packing.unpack(output.float(), *sizes[0])


_complete: type[Family] = QwenFamily  # the type checker reports missing members
