"""Qwen-Image as a family: how its files become networks, captions become conditions, latents become a training step."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from library.families.base import BlockCost, BlockInputs, LatentCache, ModelComponents, TextCache
from library.families.qwen_image import text_encoder
from library.families.qwen_image.checkpoint import CHECKPOINT
from library.families.qwen_image.facts import FACTS
from library.families.qwen_image.options import QwenLora, QwenTrain
from library.families.qwen_image.sampler import QwenSampler
from library.families.shared import packing, qwen_vae
from library.families.shared.one_encoder import OneEncoderFamily
from library.objectives import flow
from library.objectives.base import NoisedBatch

if TYPE_CHECKING:
    from library.families.base import Family
    from library.families.shared.sampler import Sampler

BLOCK = "QwenImageTransformerBlock"


class QwenFamily(OneEncoderFamily):
    """Qwen-Image: a transformer, the language model of Qwen2.5-VL and a VAE."""

    config: QwenLora | QwenTrain
    name = "qwen_image"
    checkpoint = CHECKPOINT
    swapped_class = BLOCK
    block_classes = (BLOCK,)
    adapter_targets = (BLOCK,)
    latent_cache = LatentCache(suffix="_qi.safetensors", keyed_by_size=True, architecture="qwen_image", frames=True)
    text_cache = TextCache(
        suffix="_qi_te.safetensors",
        keys=("vl_embed", "vl_mask"),
        mask="vl_mask",
        architecture="qwen_image",
        names={"vl_embed": "varlen_vl_embed"},
    )
    # The number of tokens varies: of img, txt, pe and mask.
    block_inputs = {BLOCK: BlockInputs(streams=(0, 1), dynamic=((0, 1), (1, 1), (3, 1), (4, 1)))}
    # A third of a block is modulation, which is asked once for an image; of the rest one half is for the words.
    block_costs = {BLOCK: BlockCost("transformer_blocks", activations=30, used=0.333)}
    utilization = {False: 0.3, True: 0.42}
    patch_size = 2
    sample_defaults = {"negative_prompt": " ", "width": 1024, "height": 1024, "sample_steps": 25, "scale": 4.0}
    sample_multiple = 16
    validation_timesteps = (0.2, 0.4, 0.6, 0.8)
    architecture = FACTS.architecture
    base_model_version = FACTS.base_model_version
    text_lengths: Mapping[str, int] = MappingProxyType(
        {"vl_embed": text_encoder.LONGEST, "vl_mask": text_encoder.LONGEST}
    )

    # ---- a training step

    def latents(self, parts: ModelComponents, pixels: Tensor, generator: Any = None) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> normalised means, float32 [B, 16, H / 8, W / 8]. Nothing is drawn."""
        return qwen_vae.latents(parts.vae, pixels)

    def noised(self, latents: Tensor, generator: torch.Generator, timesteps: Tensor | None = None) -> NoisedBatch:
        """Cached latents -> one training step, see flow.noised. `timesteps` in 0..1 replace drawn ones."""
        return flow.noised(latents, self.config.noise, self.config.loss, generator, timesteps)

    def predict(
        self,
        denoiser: nn.Module,
        noised: NoisedBatch,
        text: dict[str, Tensor],
        sizes: Tensor,
        controls: Sequence[Tensor] = (),
    ) -> Tensor:
        """The denoiser's answer in the terms of the target, float32 [B, 16, h, w]. `sizes` say nothing to it."""
        latents = noised.latents
        size = latents.shape[-2] // 2, latents.shape[-1] // 2
        answer = denoiser(packing.pack(latents), size, text["vl_embed"], text["vl_mask"], noised.timesteps)
        velocity = packing.unpack(answer.float(), *size)
        return flow.prediction(velocity, latents, noised.sigmas, self.config.noise.model_prediction_type)

    def sampler(self, parts: ModelComponents) -> "Sampler":
        """What draws sample images with these networks."""
        return QwenSampler(self, parts)


if TYPE_CHECKING:
    _complete: type[Family] = QwenFamily  # the type checker names what is missing
