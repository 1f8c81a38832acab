"""Z-Image as a family: loading, encoding of images and captions, and the prediction of a training step."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from library.config.problems import Problem
from library.families.base import BlockChain, BlockCost, BlockInputs, Family, LatentCache, ModelComponents, TextCache
from library.families.shared import autoencoder, turbo
from library.families.shared.one_encoder import OneEncoderFamily
from library.families.shared.packing import pack_channels_last, token_grid, unpack_channels_last
from library.families.zimage import keys
from library.families.zimage.checkpoint import ZIMAGE_CHECKPOINT
from library.families.zimage.facts import FACTS
from library.families.zimage.model import CONTAINERS
from library.families.zimage.options import ZImageLora, ZImageTrain
from library.families.zimage.sampler import ZImageSampler
from library.objectives.base import NoisedBatch

NOISE, CONTEXT, BLOCK = CONTAINERS
# Dimensions with varying numbers of tokens: stream, pe and mask. Modulated blocks take the time after the stream.
MODULATED = BlockInputs(streams=(0,), dynamic=((0, 1), (2, 3), (3, 1)))


class ZImageFamily(OneEncoderFamily):
    """Z-Image: a transformer, Qwen3-4B and FLUX.1's autoencoder. Its time and velocity run from noise to image; both
    are inverted here.
    """

    config: ZImageLora | ZImageTrain
    name = "zimage"
    sampler_class = ZImageSampler
    checkpoint = ZIMAGE_CHECKPOINT
    swapped_class = BLOCK
    block_classes = tuple(CONTAINERS)
    block_chain = BlockChain(("layers",))
    adapter_targets = tuple(CONTAINERS)
    latent_cache = LatentCache(suffix="_zi.safetensors", keyed_by_size=True, architecture="z_image")
    text_cache = TextCache(
        suffix="_zi_te.safetensors",
        keys=("llm_embed", "llm_mask"),
        mask="llm_mask",
        architecture="z_image",
        names={"llm_embed": "varlen_llm_embed"},
    )
    block_inputs = {
        NOISE: MODULATED,
        CONTEXT: BlockInputs(streams=(0,), dynamic=((0, 1), (1, 3), (2, 1))),
        BLOCK: MODULATED,
    }
    # Text is a small part of the tokens, and each kind of refiner sees only text or image.
    block_costs = {
        NOISE: BlockCost("noise_refiner"),
        CONTEXT: BlockCost("context_refiner", activations=2, used=0.05),
        BLOCK: BlockCost("layers", activations=27, used=0.9),
    }
    architecture = FACTS.architecture
    base_model_version = FACTS.base_model_version

    @property
    def is_turbo(self) -> bool:
        return turbo.is_turbo(self.config)

    @property
    def sample_defaults(self) -> Mapping[str, Any]:
        usual = {"negative_prompt": "", "width": 1024, "height": 1024, "sample_steps": 25, "scale": 4.0}
        return usual | ({"sample_steps": 9, "scale": 0.0} if self.is_turbo else {})

    def notes(self) -> Iterator[Problem]:
        return turbo.version_notes(self.config, "base", ("base", "Z-Image"), FACTS.assistant_loras[0])

    def export(self, components: ModelComponents) -> dict[str, Tensor]:
        return keys.zimage_to_single(super().export(components))

    # ---- a training step

    def latents(self, components: ModelComponents, pixels: Tensor, generator: Any = None) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> unscaled modes, float32 [B, 16, H / 8, W / 8], as in musubi-tuner's caches;
        not sampled.
        """
        with torch.no_grad(), torch.autocast(pixels.device.type, enabled=False):
            return autoencoder.encode(components.vae, pixels).mode().float()

    def noised(self, latents: Tensor, generator: torch.Generator, timesteps: Tensor | None = None) -> NoisedBatch:
        """Scale the cached, unscaled latents, and return the batch of a training step."""
        scale, shift = autoencoder.FLUX
        scaled = (latents.float() - shift) * scale
        return super().noised(scaled, generator, timesteps)

    def velocity(
        self, denoiser: nn.Module, noised: NoisedBatch, text: dict[str, Tensor], controls: Sequence[Tensor]
    ) -> Tensor:
        """Return the predicted velocity, noise minus image, float32 [B, C, h, w]."""
        tokens, size = pack_channels_last(noised.latents), token_grid(noised.latents)
        output = denoiser(tokens, size, text["llm_embed"], text["llm_mask"], 1 - noised.timesteps)
        return -unpack_channels_last(output.float(), *size)


_complete: type[Family] = ZImageFamily  # the type checker reports missing members
