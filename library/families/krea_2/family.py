"""Krea 2 as a family: loading, encoding of images and captions, and the prediction of a training step."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from library.config.problems import Problem
from library.families.base import BlockChain, BlockCost, BlockInputs, Family, LatentCache, ModelComponents, TextCache
from library.families.krea_2.checkpoint import KREA_2_CHECKPOINT
from library.families.krea_2.facts import FACTS
from library.families.krea_2.model import BLOCK, CONTAINERS, LAYERWISE, REFINER
from library.families.krea_2.options import Krea2Lora, Krea2Train
from library.families.krea_2.sampler import Krea2Sampler
from library.families.shared import qwen_vae, turbo
from library.families.shared.one_encoder import OneEncoderFamily
from library.families.shared.packing import pack, token_grid, unpack
from library.objectives.base import NoisedBatch


class Krea2Family(OneEncoderFamily):
    """Krea 2: a transformer that reads twelve layers of Qwen3-VL-4B, and Qwen-Image's VAE."""

    config: Krea2Lora | Krea2Train
    name = "krea_2"
    sampler_class = Krea2Sampler
    checkpoint = KREA_2_CHECKPOINT
    swapped_class = BLOCK
    block_classes = tuple(CONTAINERS)
    block_chain = BlockChain(("blocks",))
    adapter_targets = tuple(CONTAINERS)
    latent_cache = LatentCache(suffix="_kr2.safetensors", keyed_by_size=True, architecture="krea2", frames=True)
    text_cache = TextCache(
        suffix="_kr2_te.safetensors",
        keys=("krea2_vl_embed", "krea2_vl_mask"),
        mask="krea2_vl_mask",
        architecture="krea2",
        names={"krea2_vl_embed": "varlen_krea2_vl_embed"},
    )
    # Dimensions with varying numbers of tokens: of the text; of the text and its mask; of the stream, pe and mask.
    block_inputs = {
        LAYERWISE: BlockInputs(streams=(0,), dynamic=((0, 1),)),
        REFINER: BlockInputs(streams=(0,), dynamic=((0, 1), (1, 1))),
        BLOCK: BlockInputs(streams=(0,), dynamic=((0, 1), (2, 1), (3, 1))),
    }
    # Text is a small part of the tokens, and has a row for each of twelve layers in the layerwise blocks.
    block_costs = {
        LAYERWISE: BlockCost(CONTAINERS[LAYERWISE], used=0.35),
        REFINER: BlockCost(CONTAINERS[REFINER], activations=2, used=0.03),
        BLOCK: BlockCost(CONTAINERS[BLOCK], activations=27, used=1.0),
    }
    architecture = FACTS.architecture
    base_model_version = FACTS.base_model_version

    @property
    def is_turbo(self) -> bool:
        return turbo.is_turbo(self.config)

    @property
    def sample_defaults(self) -> Mapping[str, Any]:
        usual = {"negative_prompt": "", "width": 1024, "height": 1024, "sample_steps": 28, "scale": 5.5}
        return usual | ({"sample_steps": 8, "scale": 1.0} if self.is_turbo else {})

    def notes(self) -> Iterator[Problem]:
        return turbo.version_notes(self.config, "raw", ("Raw", "Krea 2 Raw"), FACTS.assistant_loras[0])

    # ---- a training step

    def latents(self, components: ModelComponents, pixels: Tensor, generator: Any = None) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> normalised means, float32 [B, 16, H / 8, W / 8]; not sampled."""
        return qwen_vae.latents(components.vae, pixels)

    def velocity(
        self, denoiser: nn.Module, noised: NoisedBatch, text: dict[str, Tensor], controls: Sequence[Tensor]
    ) -> Tensor:
        """Return the predicted velocity, noise minus image, float32 [B, C, h, w]."""
        size = token_grid(noised.latents)
        output = denoiser(pack(noised.latents), size, text["krea2_vl_embed"], text["krea2_vl_mask"], noised.timesteps)
        return unpack(output.float(), *size)


_complete: type[Family] = Krea2Family  # the type checker reports missing members
