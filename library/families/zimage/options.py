"""What can be set when Z-Image is trained."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from library import families
from library.config import sections
from library.config.names import ALIASES, FOREIGN
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

# Flags of musubi-tuner that are options here under another name, and those that nothing here needs.
NAMES = ALIASES | {
    "dit": "pretrained_model_name_or_path",
    "gradient_checkpointing_cpu_offload": "cpu_offload_checkpointing",
}
_SDPA = "attention is PyTorch's SDPA"
MUSUBI = {
    "fp8_llm": "fp8_base keeps the text encoder in 8 bits as well",
    "fp8_scaled": "fp8_base keeps the model in 8 bits; there is no finer setting",
    "split_attn": _SDPA,
    "flash_attn": _SDPA,
    "sage_attn": _SDPA,
    "use_32bit_attention": _SDPA,
    "dit_dtype": "the number format is mixed_precision",
    "vae_dtype": "the number format is mixed_precision",
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
class ZImageFlow(sections.Flow):
    """How much noise a step has, and what the model answers."""

    timestep_sampling: Literal["sigma", "uniform", "sigmoid", "shift", "flux_shift"] = opt(
        "shift", "How timesteps are sampled. shift and sigmoid are usual."
    )
    discrete_flow_shift: float = opt(
        2.0,
        "Above 1 trains noisy timesteps more often: composition more than detail.",
        label="Flow shift",
        min=0.0,
    )
    sigmoid_scale: float = opt(1.0, "Above 1 trains very low and very high timesteps more often. 1 is usual.", min=0.0)
    model_prediction_type: Literal["raw", "additive", "sigma_scaled"] = opt(
        "raw",
        "How the prediction of the model is interpreted. raw is usual.",
        label="Prediction type",
    )
    weighting_scheme: Literal["sigma_sqrt", "logit_normal", "mode", "cosmap", "none", "uniform"] = opt(
        "none", "How timesteps are weighted, with sigma sampling or sigma_scaled prediction."
    )

    @property
    def shift_by_size(self) -> bool:
        """Whether the number of tokens of an image decides how far its timesteps are shifted."""
        return self.timestep_sampling == "flux_shift"


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageNetwork(sections.Network):
    """The adapters that learn."""

    network_module: Literal["networks.lora_zimage", "lycoris.kohya"] | str | None = opt(
        None, "The network module, that is the adapter type. Empty: LoRA.", label="Network module"
    )
    network_train_unet_only: bool = opt(
        True, "Train the image model only, not the text encoder, which is never trained here.", label="Image model only"
    )
    usual: ClassVar[str] = "networks.lora_zimage"

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Adapters learn in the transformer."""
        yield from sections.Network.check(self, run)
        if self.network_train_text_encoder_only and not self.network_train_unet_only:
            yield Problem("network_train_text_encoder_only",
                "leaves nothing to train: the text encoder of Z-Image is not trained, switch it off",
                fix={"network_train_text_encoder_only": False})  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageMemory(sections.Memory):
    """What makes a training fit; Z-Image has 30 blocks, and 4 refiners that are not swapped."""

    blocks_to_swap: int | None = opt(
        None, "Blocks in CPU memory, at most 29. Raise it only until the model fits: costs speed.", min=0, max=29
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageCompile(sections.Compile):
    """torch.compile, for the blocks that the model repeats."""

    kinds: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"noise": "ZImageNoiseRefiner", "context": "ZImageContextRefiner", "block": "ZImageTransformerBlock"}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageLora(sections.AdapterRun):
    """LoRA and other adapters for Z-Image."""

    family: ClassVar[str] = "zimage"
    script: ClassVar[str] = "zimage_train_network"
    title: ClassVar[str] = "Z-Image LoRA"
    script_with = staticmethod(families.script_with)
    grid: ClassVar[int] = 16
    idle: ClassVar[Mapping[str, str]] = IDLE
    idle_rules: ClassVar[tuple[Rule, ...]] = IDLE_RULES
    aliases: ClassVar[Mapping[str, str]] = NAMES
    foreign: ClassVar[Mapping[str, str]] = FOREIGN | MUSUBI | {"mem_eff_save": "adapter files are small"}

    model: ZImageModel = section(ZImageModel)
    cache: sections.TextBatchCache = section(sections.TextBatchCache)
    network: ZImageNetwork = section(ZImageNetwork)
    noise: ZImageFlow = section(ZImageFlow)
    loss: sections.FlowLoss = section(sections.FlowLoss)
    memory: ZImageMemory = section(ZImageMemory)
    compile: ZImageCompile = section(ZImageCompile)


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageTrain(sections.FullRun):
    """Full fine-tuning and DreamBooth for Z-Image."""

    family: ClassVar[str] = "zimage"
    script: ClassVar[str] = "zimage_train"
    title: ClassVar[str] = "Z-Image fine-tune"
    script_with = staticmethod(families.script_with)
    grid: ClassVar[int] = 16
    idle: ClassVar[Mapping[str, str]] = IDLE
    idle_rules: ClassVar[tuple[Rule, ...]] = IDLE_RULES
    aliases: ClassVar[Mapping[str, str]] = NAMES
    foreign: ClassVar[Mapping[str, str]] = (
        FOREIGN
        | MUSUBI
        | {
            "prior_loss_weight": "a fine-tune counts regularisation images like all others",
            "train_text_encoder": "the text encoder of Z-Image is not trained",
            "block_lr": "it is for the blocks of another model",
            "block_swap_optimizer_patch_params": "swapped blocks learn without it",
        }
    )

    model: ZImageModel = section(ZImageModel)
    cache: sections.TextBatchCache = section(sections.TextBatchCache)
    save: sections.SafetensorsSave = section(sections.SafetensorsSave)
    noise: ZImageFlow = section(ZImageFlow)
    loss: sections.FlowLoss = section(sections.FlowLoss)
    memory: ZImageMemory = section(ZImageMemory)
    compile: ZImageCompile = section(ZImageCompile)
