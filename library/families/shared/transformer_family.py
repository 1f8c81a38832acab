"""Families whose denoiser is a transformer over patches of 2 by 2 latents, trained by flow matching."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from library.families.base import ModelComponents
from library.families.shared.sampler import FlowSampler
from library.objectives import flow
from library.objectives.base import NoisedBatch


class TransformerFamily(ABC):
    """Holds the run's config. All blocks have the same tokens and run in the order of the module tree."""

    sampler_class: ClassVar[type[FlowSampler]]
    utilization = {False: 0.3, True: 0.42}
    patch_size = 2
    text_adapter_targets: tuple[str, ...] = ()
    sample_multiple = 16

    def __init__(self, config: Any):
        self.config = config
        self.grid: int = type(config).grid

    def sampler(self, components: ModelComponents) -> FlowSampler:
        return self.sampler_class(self, components)

    @property
    def validation_timesteps(self) -> list[float]:
        low, high = self.config.noise.timestep_range
        return [low + (high - low) * share for share in (0.2, 0.4, 0.6, 0.8)]

    def export(self, components: ModelComponents) -> dict[str, Tensor]:
        return {name.replace("_orig_mod.", ""): tensor for name, tensor in components.denoiser.state_dict().items()}

    def resolution_level(self, path: str) -> int:
        return 0  # all blocks have the same tokens

    def execution_key(self, path: str) -> tuple[int, ...]:
        return ()  # modules run in the order of the module tree

    def noised(self, latents: Tensor, generator: torch.Generator, timesteps: Tensor | None = None) -> NoisedBatch:
        return flow.noised(latents, self.config.noise, self.config.loss, generator, timesteps)

    def predict(
        self,
        denoiser: nn.Module,
        noised: NoisedBatch,
        text: dict[str, Tensor],
        sizes: Tensor,
        controls: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return the prediction in the parametrization of the target, float32 [B, C, h, w]. `sizes` are not used."""
        velocity = self.velocity(denoiser, noised, text, controls)
        return flow.prediction(velocity, noised.latents, noised.sigmas, self.config.noise.model_prediction_type)

    @abstractmethod
    def velocity(
        self, denoiser: nn.Module, noised: NoisedBatch, text: dict[str, Tensor], controls: Sequence[Tensor]
    ) -> Tensor:
        """Return the predicted velocity, noise minus image, float32 [B, C, h, w]."""
