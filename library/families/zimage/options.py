"""The options of Z-Image."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from library import families
from library.config import sections
from library.config.run_config import Rule
from library.config.schema import define_section, opt
from library.families.shared.network_args import BlockArgs, LayerPreset, usual_layers

# Options parsed for every family that mean nothing here.
INEFFECTIVE = {
    **sections.NO_GUIDANCE,
    "max_token_length": "captions of Z-Image may have any length up to 512 tokens",
}

# Flags of musubi-tuner that are not needed here.
MUSUBI_FLAGS = {
    "fp8_llm": "fp8_base keeps the text encoder in 8 bits as well",
    "use_32bit_attention": "attention is PyTorch's SDPA",
}

OTHER_ZIMAGE_FILES = {
    "text_encoder": "the Qwen3-4B text encoder (qwen_3_4b.safetensors)",
    "vae": "the FLUX.1 autoencoder (ae.safetensors)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageModel(sections.Model):
    """The Z-Image transformer and the networks around it."""

    vae: str | None = opt(None, "The FLUX.1 autoencoder (ae.safetensors).", kind="file", label="VAE")
    text_encoder: str | None = sections.text_encoder_file("Qwen3-4B", "qwen_3_4b.safetensors")
    model_version: Literal["base", "turbo"] | None = opt(
        None,
        "Their files look the same; De-Turbo is base. Not set: base, unless a name says Turbo.",
    )

    others: ClassVar[Mapping[str, str]] = OTHER_ZIMAGE_FILES


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageFlow(sections.TransformerFlow):
    """Noise, timesteps and the type of the prediction."""

    timestep_sampling: Literal["sigma", "uniform", "sigmoid", "shift", "flux_shift"] = opt(
        "shift",
        "How noise levels (timesteps) are drawn. shift and sigmoid are usual.",
        words={"flux_shift": "FLUX shift"},
    )
    discrete_flow_shift: float = sections.flow_shift(2.0)
    size_shift: ClassVar[str] = "flux_shift"


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageMemory(sections.Memory):
    """Memory and speed of a training of Z-Image."""

    blocks_to_swap: int | None = sections.blocks_to_swap(29)  # the 4 refiners stay


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageCompile(sections.Compile):
    """How the blocks of Z-Image are compiled."""

    kinds: ClassVar[Mapping[str, str]] = {
        "noise": "ZImageNoiseRefiner",
        "context": "ZImageContextRefiner",
        "block": "ZImageTransformerBlock",
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageNetwork(sections.TransformerNetwork):
    """The adapters that are trained for Z-Image."""

    network_module: Literal["networks.lora_zimage", "lycoris.kohya"] | str | None = sections.network_module()


@dataclass(frozen=True, kw_only=True)
class ZImageRun:
    """The common base of all Z-Image trainings."""

    family: ClassVar[str] = "zimage"
    script_with = staticmethod(families.script_with)
    ineffective: ClassVar[Mapping[str, str]] = INEFFECTIVE
    ineffective_rules: ClassVar[tuple[Rule, ...]] = sections.flow_rules(ZImageFlow.size_shift)
    foreign: ClassVar[Mapping[str, str]] = MUSUBI_FLAGS

    model: ZImageModel = define_section(ZImageModel)
    noise: ZImageFlow = define_section(ZImageFlow)
    memory: ZImageMemory = define_section(ZImageMemory)
    compile: ZImageCompile = define_section(ZImageCompile)


@dataclass(frozen=True, kw_only=True)
class ZImageLora(ZImageRun, sections.TransformerLora):
    """LoRA and other adapters for Z-Image."""

    unfit: ClassVar[frozenset[str]] = sections.NO_ENCODER
    script: ClassVar[str] = "zimage_train_network"
    title: ClassVar[str] = "Z-Image LoRA"

    network: ZImageNetwork = define_section(ZImageNetwork)


@dataclass(frozen=True, kw_only=True)
class ZImageTrain(ZImageRun, sections.TransformerTrain):
    """Full fine-tuning and DreamBooth for Z-Image."""

    script: ClassVar[str] = "zimage_train"
    title: ClassVar[str] = "Z-Image fine-tune"
    foreign: ClassVar[Mapping[str, str]] = {"block_swap_optimizer_patch_params": "swapped blocks learn without it"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageArgs(BlockArgs):
    """`networks.lora_zimage`."""

    presets: ClassVar[tuple[LayerPreset, ...]] = usual_layers("_feed_=0")
    block_lists: ClassVar[tuple[str, ...]] = ("layers",)
    train_refiners: bool = opt(
        False,
        "adapters on the blocks that see the image or the text alone, before they meet",
        label="Train the refiners",
    )
    train_modulation: bool = opt(
        False,
        "adapters on the layers that modulate each block by the timestep",
        label="Timestep modulation learns as well",
    )

    def is_chosen(self, path: str) -> bool:
        """Modulation and the layers of the refiners learn only on request."""
        usual = self.train_modulation or "_modulation." not in path
        usual = usual and (self.train_refiners or "_refiner." not in path)
        return (usual or self.is_included(path)) and self.in_chosen_block(path)
