"""What families of Stable Diffusion, a U-Net with CLIP text encoders, have in common."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.config.schema import opt
from library.config.sections.adapters import Network
from library.config.sections.caching import Cache
from library.config.sections.compiling import Compile
from library.config.sections.length import Steps
from library.config.sections.transformers import network_module


@dataclass(frozen=True, kw_only=True, slots=True)
class UnetCompile(Compile):
    """How the blocks of the U-Net are compiled."""

    kinds: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"transformer": "BasicTransformerBlock", "resnet": "ResnetBlock2D"}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class UnetNetwork(Network):
    """The adapters that are trained."""

    network_module: Literal["networks.lora", "networks.lora_fa", "lycoris.kohya"] | str | None = network_module()


@dataclass(frozen=True, kw_only=True, slots=True)
class UnetAdapterCache(Cache):
    """What is encoded once when adapters are trained."""

    def check(self, run: Any) -> Iterator[Problem]:
        """Reject caching the outputs of trained text encoders."""
        yield from Cache.check(self, run)
        if self.text and not run.network.network_train_unet_only:
            yield Problem(
                "cache_text_encoder_outputs",
                "needs network_train_unet_only: trained text encoders run in each step",
                also="cache_text_encoder_outputs_to_disk network_train_unet_only",
                fix={"network_train_unet_only": True},
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class UnetFullCache(Cache):
    """What is encoded once when the model is trained."""

    def check(self, run: Any) -> Iterator[Problem]:
        """Reject caching the outputs of trained text encoders, which change in every step."""
        yield from Cache.check(self, run)
        if self.text and run.steps.train_text_encoder:
            yield Problem(
                "cache_text_encoder_outputs",
                "cannot be used with train_text_encoder: switch one of them off",
                also="cache_text_encoder_outputs_to_disk train_text_encoder",
                fix={"train_text_encoder": False},
            )
        if self.text and run.model.weighted_captions:
            yield Problem(
                "cache_text_encoder_outputs",
                "cannot be used with weighted_captions: switch one of them off",
                also="cache_text_encoder_outputs_to_disk weighted_captions",
                fix={"weighted_captions": False},
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class UnetEmbeddingCache(Cache):
    """What is encoded once when words are trained."""

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Reject caching text encoder outputs, which change with the trained words."""
        yield from Cache.check(self, run)
        if self.text:
            yield Problem(
                "cache_text_encoder_outputs",
                "cannot be used here, as the trained word is encoded in each step: leave it out",
                also="cache_text_encoder_outputs_to_disk",
                fix={"cache_text_encoder_outputs": False, "cache_text_encoder_outputs_to_disk": False},
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class UnetFullSteps(Steps):
    """Length of the training, and which parts are trained."""

    train_text_encoder: bool = opt(False, "Train the text encoders too.", label="Train text encoders")
