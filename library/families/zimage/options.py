"""What can be set when Z-Image is trained."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from library import families
from library.config import sections
from library.config.problems import Problem
from library.config.run_config import Rule, RunConfig
from library.config.schema import opt, section

# Parsed for every family, without a meaning for this one.
IDLE = {
    **sections.FLOW_IDLE,
    "max_token_length": "captions of Z-Image may have any length up to 512 tokens",
}

IDLE_RULES: tuple[Rule, ...] = (
    *sections.FLOW_RULES,
    ("sigmoid_scale", lambda c: c.noise.timestep_sampling not in ("sigma", "uniform"),
     "timestep_sampling is not sigmoid, shift or flux_shift"),
)  # fmt: skip

# Flags of musubi-tuner that nothing here needs.
MUSUBI = {
    "fp8_llm": "fp8_base keeps the text encoder in 8 bits as well",
    "use_32bit_attention": "attention is PyTorch's SDPA",
}

OTHERS = {
    "text_encoder": "the Qwen3-4B text encoder (qwen_3_4b.safetensors)",
    "vae": "the FLUX.1 autoencoder (ae.safetensors)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageModel(sections.Model):
    """The Z-Image transformer and the networks around it."""

    vae: str | None = opt(None, "The FLUX.1 autoencoder (ae.safetensors).", kind="file", label="VAE")
    text_encoder: str | None = opt(
        None, "The Qwen3-4B text encoder (qwen_3_4b.safetensors, bf16 or fp8).", kind="file", label="Text encoder"
    )
    model_version: Literal["base", "turbo"] | None = opt(
        None,
        "Their files look alike; De-Turbo is base. Empty: base, if no name says Turbo.",
    )

    def missing(self, run: RunConfig) -> Iterator[Problem]:
        """A single file is the transformer alone."""
        yield from sections.Model.missing(self, run)
        yield from self.missing_parts(OTHERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageFlow(sections.TransformerFlow):
    """How much noise a step has, and what the model answers."""

    timestep_sampling: Literal["sigma", "uniform", "sigmoid", "shift", "flux_shift"] = opt(
        "shift", "How timesteps are sampled. shift and sigmoid are usual."
    )
    discrete_flow_shift: float = sections.flow_shift(2.0)

    @property
    def shift_by_size(self) -> bool:
        """Whether the number of tokens of an image decides how far its timesteps are shifted."""
        return self.timestep_sampling == "flux_shift"


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageNetwork(sections.TransformerNetwork):
    """The adapters that learn."""

    network_module: Literal["networks.lora_zimage", "lycoris.kohya"] | str | None = opt(
        None, "The network module, that is the adapter type. Empty: LoRA.", label="Network module"
    )
    usual: ClassVar[str] = "networks.lora_zimage"


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageMemory(sections.Memory):
    """What makes a training fit; Z-Image has 30 blocks, and 4 refiners that are not swapped."""

    blocks_to_swap: int | None = sections.blocks_to_swap(29)


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageCompile(sections.Compile):
    """torch.compile, for the blocks that the model repeats."""

    kinds: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"noise": "ZImageNoiseRefiner", "context": "ZImageContextRefiner", "block": "ZImageTransformerBlock"}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageLora(sections.TransformerLora):
    """LoRA and other adapters for Z-Image."""

    family: ClassVar[str] = "zimage"
    script: ClassVar[str] = "zimage_train_network"
    title: ClassVar[str] = "Z-Image LoRA"
    script_with = staticmethod(families.script_with)
    shifts_samples: ClassVar[bool] = True
    idle: ClassVar[Mapping[str, str]] = IDLE
    idle_rules: ClassVar[tuple[Rule, ...]] = IDLE_RULES
    foreign: ClassVar[Mapping[str, str]] = {**sections.TransformerLora.foreign, **MUSUBI}

    model: ZImageModel = section(ZImageModel)
    network: ZImageNetwork = section(ZImageNetwork)
    noise: ZImageFlow = section(ZImageFlow)
    memory: ZImageMemory = section(ZImageMemory)
    compile: ZImageCompile = section(ZImageCompile)


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageTrain(sections.TransformerTrain):
    """Full fine-tuning and DreamBooth for Z-Image."""

    family: ClassVar[str] = "zimage"
    script: ClassVar[str] = "zimage_train"
    title: ClassVar[str] = "Z-Image fine-tune"
    script_with = staticmethod(families.script_with)
    shifts_samples: ClassVar[bool] = True
    idle: ClassVar[Mapping[str, str]] = IDLE
    idle_rules: ClassVar[tuple[Rule, ...]] = IDLE_RULES
    foreign: ClassVar[Mapping[str, str]] = {
        **sections.TransformerTrain.foreign,
        **MUSUBI,
        "block_swap_optimizer_patch_params": "swapped blocks learn without it",
    }

    model: ZImageModel = section(ZImageModel)
    noise: ZImageFlow = section(ZImageFlow)
    memory: ZImageMemory = section(ZImageMemory)
    compile: ZImageCompile = section(ZImageCompile)
