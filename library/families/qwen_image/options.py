"""What can be set when Qwen-Image is trained."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from library import families
from library.config import sections
from library.config.problems import Problem
from library.config.run_config import Rule, RunConfig
from library.config.schema import opt, section

LINE = ((256, 0.5), (8192, 0.9))  # image tokens and mu: the shift of a size is e^mu, linear between and beyond

# Parsed for every family, without a meaning for this one.
IDLE = {
    **sections.FLOW_IDLE,
    "max_token_length": "captions of Qwen-Image may have any length up to 1024 tokens",
}

IDLE_RULES: tuple[Rule, ...] = (
    *sections.FLOW_RULES,
    ("sigmoid_scale", lambda c: c.noise.timestep_sampling not in ("sigma", "uniform"),
     "timestep_sampling is not sigmoid, shift or qwen_shift"),
)  # fmt: skip

# Flags of musubi-tuner that nothing here needs.
MUSUBI = {
    "fp8_vl": "fp8_base keeps the text encoder in 8 bits as well",
    "num_layers": "the number of blocks is read from the file",
}

OTHERS = {
    "text_encoder": "the Qwen2.5-VL text encoder (qwen_2.5_vl_7b.safetensors)",
    "vae": "the Qwen-Image VAE (qwen_image_vae.safetensors)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenModel(sections.Model):
    """The Qwen-Image transformer and the networks around it."""

    vae: str | None = opt(None, "The Qwen-Image VAE (qwen_image_vae.safetensors).", kind="file", label="VAE")
    text_encoder: str | None = opt(
        None,
        "The Qwen2.5-VL text encoder (qwen_2.5_vl_7b.safetensors, bf16 or fp8).",
        kind="file",
        label="Text encoder",
    )
    model_version: Literal["original", "edit", "edit-2509", "edit-2511", "layered"] | None = opt(
        None,
        "original is Qwen-Image and Qwen-Image-2512. Empty: read from the file.",
        advanced=True,
    )

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Models that see other pictures."""
        yield from sections.Model.check(self, run)
        if self.model_version not in (None, "original"):
            yield Problem("model_version",
                "= {version} is not trained here: use Qwen-Image or Qwen-Image-2512 with model_version = original",
                version=self.model_version, fix={"model_version": "original"})  # fmt: skip

    def missing(self, run: RunConfig) -> Iterator[Problem]:
        """A single file is the transformer alone; a diffusers folder or a repository has the other networks as well."""
        yield from sections.Model.missing(self, run)
        yield from self.missing_parts(OTHERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenFlow(sections.TransformerFlow):
    """How much noise a step has, and what the model answers."""

    timestep_sampling: Literal["sigma", "uniform", "sigmoid", "shift", "qwen_shift"] = opt(
        "qwen_shift", "How timesteps are sampled. qwen_shift and shift are usual."
    )
    discrete_flow_shift: float = sections.flow_shift(2.2)

    shift_line: ClassVar[tuple[tuple[int, float], tuple[int, float]]] = LINE

    @property
    def shift_by_size(self) -> bool:
        """Whether the number of tokens of an image decides how far its timesteps are shifted."""
        return self.timestep_sampling == "qwen_shift"


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenNetwork(sections.TransformerNetwork):
    """The adapters that learn."""

    network_module: Literal["networks.lora_qwen_image", "lycoris.kohya"] | str | None = opt(
        None, "The network module, that is the adapter type. Empty: LoRA.", label="Network module"
    )
    usual: ClassVar[str] = "networks.lora_qwen_image"


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenMemory(sections.Memory):
    """What makes a training fit; Qwen-Image has 60 blocks."""

    blocks_to_swap: int | None = sections.blocks_to_swap(59)


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenCompile(sections.Compile):
    """torch.compile, for the blocks that the model repeats."""

    kinds: ClassVar[Mapping[str, str]] = MappingProxyType({"block": "QwenImageTransformerBlock"})


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenLora(sections.TransformerLora):
    """LoRA and other adapters for Qwen-Image."""

    family: ClassVar[str] = "qwen_image"
    script: ClassVar[str] = "qwen_image_train_network"
    title: ClassVar[str] = "Qwen-Image LoRA"
    script_with = staticmethod(families.script_with)
    idle: ClassVar[Mapping[str, str]] = IDLE
    idle_rules: ClassVar[tuple[Rule, ...]] = IDLE_RULES
    foreign: ClassVar[Mapping[str, str]] = {**sections.TransformerLora.foreign, **MUSUBI}

    model: QwenModel = section(QwenModel)
    network: QwenNetwork = section(QwenNetwork)
    noise: QwenFlow = section(QwenFlow)
    memory: QwenMemory = section(QwenMemory)
    compile: QwenCompile = section(QwenCompile)


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenTrain(sections.TransformerTrain):
    """Full fine-tuning and DreamBooth for Qwen-Image."""

    family: ClassVar[str] = "qwen_image"
    script: ClassVar[str] = "qwen_image_train"
    title: ClassVar[str] = "Qwen-Image fine-tune"
    script_with = staticmethod(families.script_with)
    idle: ClassVar[Mapping[str, str]] = IDLE
    idle_rules: ClassVar[tuple[Rule, ...]] = IDLE_RULES
    foreign: ClassVar[Mapping[str, str]] = {**sections.TransformerTrain.foreign, **MUSUBI}

    model: QwenModel = section(QwenModel)
    noise: QwenFlow = section(QwenFlow)
    memory: QwenMemory = section(QwenMemory)
    compile: QwenCompile = section(QwenCompile)
