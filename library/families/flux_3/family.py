"""FLUX 3 as a family: loading, encoding of images and captions, and the prediction of a training step."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from library.config.problems import ConfigError, Problem
from library.families import recognition
from library.families.base import BlockChain, BlockCost, BlockInputs, Family, LatentCache, ModelComponents, TextCache
from library.families.flux_3.checkpoint import FLUX_3_CHECKPOINT
from library.families.flux_3.facts import DISTILLED, FACTS
from library.families.flux_3.model import CONTAINERS, JOINT, OF_IMAGE, OF_REFERENCES, OF_TEXT, REFERENCES
from library.families.flux_3.options import Flux3Lora, Flux3Train
from library.families.flux_3.sampler import Flux3Sampler
from library.families.shared import packing, part_files, statistics_vae, weights
from library.families.shared.assistants import idle_assistant, lacks_assistant, takes_assistant
from library.families.shared.one_encoder import OneEncoderFamily
from library.objectives.base import NoisedBatch

ASSISTANT = "SimpleTuner/flux-3-klein-image-LoRA-experiments"  # the repository of a training adapter
SAMPLE_DEFAULTS = {"negative_prompt": "", "width": 1024, "height": 1024, "sample_steps": 50, "scale": 4.0}


class Flux3Family(OneEncoderFamily):
    """FLUX 3 Image Klein: a transformer that reads eight layers of Qwen3-VL-4B, and FLUX.2's autoencoder."""

    config: Flux3Lora | Flux3Train
    name = "flux_3"
    sampler_class = Flux3Sampler
    checkpoint = FLUX_3_CHECKPOINT
    swapped_class = JOINT
    block_classes: tuple[str, ...] = tuple(CONTAINERS)
    block_chain = BlockChain((CONTAINERS[JOINT],))
    adapter_targets = tuple(CONTAINERS)
    # In caches, 2 by 2 latents are one square with their channels, as the denoiser reads them.
    latent_cache = LatentCache("_f3.safetensors", keyed_by_size=True, architecture="flux_3", square=2)
    text_cache = TextCache(
        "_f3_te.safetensors",
        keys=("ctx_vec", "ctx_mask"),
        mask="ctx_mask",
        architecture="flux_3",
        names={"ctx_vec": "varlen_ctx_vec"},
    )
    # Dimensions with varying numbers of tokens: of the stream and pe, and of masks and modulations of all tokens.
    block_inputs = {
        OF_IMAGE: BlockInputs(streams=(0,), dynamic=((0, 1), (2, 1))),
        OF_REFERENCES: BlockInputs(streams=(0,), dynamic=((0, 1), (2, 1))),
        OF_TEXT: BlockInputs(streams=(0,), dynamic=((0, 1), (2, 1), (3, 1))),
        JOINT: BlockInputs(streams=(0,), dynamic=((0, 1), (1, 1), (2, 1), (3, 1))),
    }
    # Text is a small part of the tokens, and most trainings have no references.
    block_costs = {
        OF_IMAGE: BlockCost(CONTAINERS[OF_IMAGE], activations=28, used=0.95),
        OF_REFERENCES: BlockCost(CONTAINERS[OF_REFERENCES], activations=0, used=0.0),
        OF_TEXT: BlockCost(CONTAINERS[OF_TEXT], activations=2, used=0.05),
        JOINT: BlockCost(CONTAINERS[JOINT], activations=28, used=1.0),
    }

    def __init__(self, config: Flux3Lora | Flux3Train):
        super().__init__(config)
        if not self.has_references:  # their blocks run in samples alone
            self.block_classes = tuple(kind for kind in CONTAINERS if kind != OF_REFERENCES)

    # ---- which model it is

    @cached_property
    def is_distilled(self) -> bool:
        """Whether the transformer is distilled, from its header; false if its file is not on this machine."""
        try:
            path = self.checkpoint.files.present(self.config, "denoiser")
            entries = part_files.read_entries(path) if path else {}
        except ConfigError:
            return False
        return recognition.describe_checkpoint(weights.shapes_of(entries)) == DISTILLED

    @property
    def architecture(self) -> str:
        return FACTS.relatives[DISTILLED][1] if self.is_distilled else FACTS.architecture

    @property
    def base_model_version(self) -> str:
        return FACTS.relatives[DISTILLED][0] if self.is_distilled else FACTS.base_model_version

    @property
    def sample_defaults(self) -> Mapping[str, Any]:
        return SAMPLE_DEFAULTS | ({"sample_steps": 16, "scale": 1.0} if self.is_distilled else {})

    def notes(self) -> Iterator[Problem]:
        """Warn of training the distilled model."""
        if self.is_distilled and lacks_assistant(self.config):
            yield Problem(
                "pretrained_model_name_or_path",
                "is the distilled model, which forgets how to generate in few steps if it is trained directly; train "
                "on FLUX 3 Image Klein Base, or set assistant_lora of a LoRA to a training adapter, such as those in "
                "{adapter}"
                if takes_assistant(self.config)
                else "is the distilled model, which forgets how to generate in few steps if it is trained directly; "
                "train on FLUX 3 Image Klein Base",
                adapter=ASSISTANT,
                also="assistant_lora base_weights",
            )
        if not self.is_distilled and self.checkpoint.files.present(self.config, "denoiser"):
            yield from idle_assistant(self.config, "FLUX 3 Image Klein Base")

    # ---- files

    def frozen_type(self, part: str, dtype: torch.dtype) -> torch.dtype:
        return getattr(torch, self.config.model.vae_dtype) if part == "vae" else dtype

    @property
    def has_references(self) -> bool:
        """Whether images may have reference images; data sets of a file are not read for it."""
        data = self.config.data
        return bool(data.control_directory or data.dataset_config)

    def is_frozen(self, path: str) -> bool:
        return f".{REFERENCES}." in path and not self.has_references

    # ---- a training step

    def latents(self, components: ModelComponents, pixels: Tensor, generator: Any = None) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> normalised modes, float32 [B, 32, H / 8, W / 8]; not sampled."""
        return statistics_vae.normalised_latents(components.vae, pixels)

    def control_latents(self, components: ModelComponents, pixels: Tensor) -> Tensor:
        return self.latents(components, pixels)

    def velocity(
        self, denoiser: nn.Module, noised: NoisedBatch, text: dict[str, Tensor], controls: Sequence[Tensor]
    ) -> Tensor:
        """Return the predicted velocity, noise minus image, float32 [B, C, h, w]. A distilled model predicts that of a
        whole step; a step of length 0 gives the velocity at its time.
        """
        tokens, sizes = packing.pack_with_references(noised.latents, controls)
        output = denoiser(tokens, sizes, text["ctx_vec"], text["ctx_mask"], noised.timesteps)
        return packing.unpack(output.float(), *sizes[0])


_complete: type[Family] = Flux3Family  # the type checker reports missing members
