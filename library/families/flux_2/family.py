"""FLUX.2 as a family: loading, encoding of images and captions, and the prediction of a training step."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from library.config.problems import Problem
from library.families.base import BlockChain, BlockCost, BlockInputs, Family, LatentCache, ModelComponents, TextCache
from library.families.flux_2.checkpoint import flux_2_checkpoint, transformer_sizes, without_encoder
from library.families.flux_2.model import DOUBLE, SINGLE, Flux2Positions, Flux2Shape, append_controls
from library.families.flux_2.options import Flux2Lora, Flux2Train
from library.families.flux_2.sampler import Flux2Sampler
from library.families.flux_2.versions import VERSIONS, Flux2Version, model_in_header
from library.families.shared import packing, statistics_vae
from library.families.shared.assistants import idle_assistant, lacks_assistant
from library.families.shared.one_encoder import ENCODER, OneEncoderFamily
from library.objectives.base import NoisedBatch


class Flux2Family(OneEncoderFamily):
    """FLUX.2: a transformer, Qwen3 or Mistral, and a new autoencoder."""

    config: Flux2Lora | Flux2Train
    name = "flux_2"
    sampler_class = Flux2Sampler
    swapped_class = SINGLE
    block_classes = (DOUBLE, SINGLE)
    block_chain = BlockChain(("double_blocks", "single_blocks"))
    adapter_targets = (DOUBLE, SINGLE)
    # Dimensions with varying numbers of image tokens: img and pe; joint and pe.
    block_inputs = {
        DOUBLE: BlockInputs(streams=(0, 1), dynamic=((0, 1), (3, 1))),
        SINGLE: BlockInputs(streams=(0,), dynamic=((0, 1), (2, 1))),
    }
    # A double block has one half for the image and one for the words.
    block_costs = {
        DOUBLE: BlockCost("double_blocks", activations=30, used=0.5),
        SINGLE: BlockCost("single_blocks", activations=25, used=1.0),
    }

    def __init__(self, config: Flux2Lora | Flux2Train):
        super().__init__(config)
        self.checkpoint = flux_2_checkpoint(config, self.sizes)
        self.positions = Flux2Positions()
        # In caches, 2 by 2 latents are one square with their channels, as the denoiser reads them.
        name, ending = self.version.base_model_version, f"_{self.version.short}"
        self.latent_cache = LatentCache(f"{ending}.safetensors", keyed_by_size=True, architecture=name, square=2)
        self.text_cache = TextCache(f"{ending}_te.safetensors", keys=("ctx_vec",), architecture=name)

    # ---- which model it is

    @cached_property
    def sizes(self) -> Flux2Shape | None:
        return transformer_sizes(self.config)

    @property
    def version(self) -> Flux2Version:
        named, sizes = self.config.model.model_version, self.sizes
        return VERSIONS[named or (model_in_header(sizes.hidden, sizes.guidance) if sizes else "klein-base-4b")]

    @property
    def architecture(self) -> str:
        return self.version.architecture

    @property
    def base_model_version(self) -> str:
        return self.version.base_model_version

    @property
    def sample_defaults(self) -> Mapping[str, Any]:
        return self.version.sample_defaults

    def notes(self) -> Iterator[Problem]:
        """Warn of a version that no file reveals, and of training a distilled model."""
        named, version = self.config.model.model_version, self.version
        if not named and not version.guided:
            yield Problem(
                "model_version",
                "is not set, so the file is trained as the base model; those of distilled kleins look the same",
                fix={"model_version": model_in_header(version.hidden, version.guided)},
            )
        elif not version.distilled and not version.guided:
            yield from idle_assistant(self.config, version.title)
        elif version.distilled and lacks_assistant(self.config):
            yield Problem(
                "model_version",
                "= {version}: a distilled model forgets how to generate in few steps if it is trained directly; "
                "train on its base model, and generate with either",
                version=named,
            )

    # ---- files

    def file_problems(self) -> Iterator[Problem]:
        """Yield problems of the files, and before them what needs a text encoder where none is named."""
        if ENCODER not in self.checkpoint.files.parts:
            yield from without_encoder(self.config)
        yield from super().file_problems()

    def load(self, dtype: torch.dtype, frozen: torch.dtype | None = None, deferring: bool = False) -> ModelComponents:
        """Load like OneEncoderFamily, but the VAE in vae_dtype; remember the transformer's sizes."""
        components = super().load(dtype, frozen, deferring)
        denoiser: Any = components.denoiser  # a Flux2
        self.sizes = denoiser.sizes
        return components

    def frozen_type(self, part: str, dtype: torch.dtype) -> torch.dtype:
        return getattr(torch, self.config.model.vae_dtype) if part == "vae" else dtype

    def swap_plan(self, number: int) -> dict[str, int]:
        """Swap half of the number as double blocks, and for each of the others two single blocks, which are half as
        large.
        """
        sizes = self.sizes
        depth = (sizes.double_blocks, sizes.single_blocks) if sizes else (8, 24)  # of klein 9B, before a download
        double = min(number // 2, depth[0])
        return {DOUBLE: double, SINGLE: min(2 * (number - double), depth[1])}

    # ---- a training step

    def latents(self, components: ModelComponents, pixels: Tensor, generator: Any = None) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> normalised modes, float32 [B, 32, H / 8, W / 8]; not sampled."""
        return statistics_vae.normalised_latents(components.vae, pixels)

    def control_latents(self, components: ModelComponents, pixels: Tensor) -> Tensor:
        return self.latents(components, pixels)

    def velocity(
        self, denoiser: nn.Module, noised: NoisedBatch, text: dict[str, Tensor], controls: Sequence[Tensor]
    ) -> Tensor:
        """Return the predicted velocity, noise minus image, float32 [B, C, h, w]."""
        latents = noised.latents
        size, count = packing.token_grid(latents), len(latents)
        guidance = torch.full((count,), self.config.model.guidance_scale, device=latents.device)
        conditions = self.conditions(text, size, latents.device, controls)
        tokens = append_controls(packing.pack(latents), controls)
        output = denoiser(img=tokens, timesteps=noised.timesteps, guidance=guidance, **conditions)
        return packing.unpack(output[:, : size[0] * size[1]].float(), *size)

    def conditions(
        self, text: dict[str, Tensor], size: tuple[int, int], device: torch.device, controls: Sequence[Tensor] = ()
    ) -> dict[str, Any]:
        """Return text and positions for the denoiser; `size` is the height and width in tokens."""
        references = [*map(packing.token_grid, controls)]
        states = text["ctx_vec"]
        return {
            "img_ids": self.positions.image(*size, device, references),
            "txt": states,
            "txt_ids": self.positions.text(states.shape[1], device),
        }


_complete: type[Family] = Flux2Family  # the type checker reports missing members
