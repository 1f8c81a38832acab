"""What can be set when FLUX.2 is trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from library import families
from library.config import sections
from library.config.run_config import ControlUse, Rule
from library.config.schema import define_section, opt

MAX_REFERENCES = 8  # reference images of an item; more would be longer than any training has been

# Parsed for every family, without a meaning for this one.
INEFFECTIVE = {"max_token_length": "captions of FLUX.2 are as long as 512 tokens"}

INEFFECTIVE_RULES: tuple[Rule, ...] = (
    ("guidance_scale", lambda c: c.model.model_version in (None, "dev"), "there is no guidance in klein"),
)

# Flags of musubi-tuner that nothing here needs.
MUSUBI_FLAGS = {"fp8_text_encoder": "fp8_base keeps the text encoder in 8 bits as well"}

# When sigmoid_scale does nothing.
NEITHER_SIGMOID_NOR_SHIFT = "timestep_sampling is not sigmoid, shift or flux2_shift"
OTHER_FLUX_2_FILES = {
    "text_encoder": "the Qwen3-4B (klein 4B) or Qwen3-8B (klein 9B) text encoder",
    "vae": "the FLUX.2 VAE (flux2-vae.safetensors)",
}
DEV_ENCODER = "the Mistral text encoder of FLUX.2 dev (mistral_3_small_flux2_bf16.safetensors)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux2Model(sections.Model):
    """The FLUX.2 transformer and the networks around it."""

    vae: str | None = opt(None, "The FLUX.2 VAE (flux2-vae.safetensors).", kind="file", label="VAE")
    text_encoder: str | None = opt(
        None,
        "Qwen3 4B for klein 4B, Qwen3 8B for klein 9B, Mistral Small for dev (bf16 or fp8).",
        kind="file",
        label="Text encoder",
    )
    model_version: Literal["klein-base-4b", "klein-base-9b", "klein-4b", "klein-9b", "dev"] | None = opt(
        None, "Kleins without base are distilled. Empty: read from the file, a klein as its base model."
    )
    vae_dtype: Literal["float32", "bfloat16"] = opt(
        "float32", "The number format of the VAE.", label="Number format of the VAE", advanced=True
    )
    guidance_scale: float = opt(1.0, "The guidance that dev is trained with. Kleins have none.", min=0.0, advanced=True)

    @property
    def needed(self) -> Mapping[str, str]:
        """The VAE, and the text encoder; captions of dev may be cached already."""
        return {name: what for name, what in OTHER_FLUX_2_FILES.items() if name == "vae" or self.model_version != "dev"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux2Flow(sections.TransformerFlow):
    """Noise, timesteps and the type of the prediction."""

    timestep_sampling: Literal["sigma", "uniform", "sigmoid", "shift", "flux2_shift"] = opt(
        "flux2_shift", "How timesteps are sampled. flux2_shift and shift are usual."
    )
    discrete_flow_shift: float = sections.flow_shift(3.0)
    size_shift: ClassVar[str] = "flux2_shift"


# klein 4B has 5 double and 20 single blocks, klein 9B 8 and 24, dev 8 and 48; a double block is as large as two single.
MEMORY = sections.memory_of(31)
COMPILE = sections.compile_of(double="DoubleStreamBlock", single="SingleStreamBlock")
NETWORK = sections.network_of(sections.TransformerNetwork, "networks.lora_flux_2")


@dataclass(frozen=True, kw_only=True)
class Flux2Run:
    """What all trainings of FLUX.2 share."""

    family: ClassVar[str] = "flux_2"
    script_with = staticmethod(families.script_with)
    ineffective: ClassVar[Mapping[str, str]] = INEFFECTIVE
    ineffective_rules: ClassVar[tuple[Rule, ...]] = (
        *INEFFECTIVE_RULES,
        *sections.flow_rules(NEITHER_SIGMOID_NOR_SHIFT),
    )
    foreign: ClassVar[Mapping[str, str]] = MUSUBI_FLAGS

    @property
    def control_images(self) -> ControlUse:
        """Reference images, as many as there are."""
        return ControlUse(most=MAX_REFERENCES)

    model: Flux2Model = define_section(Flux2Model)
    noise: Flux2Flow = define_section(Flux2Flow)
    memory: sections.Memory = define_section(MEMORY)
    compile: sections.Compile = define_section(COMPILE)


@dataclass(frozen=True, kw_only=True)
class Flux2Lora(Flux2Run, sections.TransformerLora):
    """LoRA and other adapters for FLUX.2."""

    script: ClassVar[str] = "flux_2_train_network"
    title: ClassVar[str] = "FLUX.2 LoRA"

    data: sections.AdapterData = define_section(sections.data_with_references(sections.AdapterData, {}))
    network: sections.TransformerNetwork = define_section(NETWORK)


@dataclass(frozen=True, kw_only=True)
class Flux2Train(Flux2Run, sections.TransformerTrain):
    """Full fine-tuning and DreamBooth for FLUX.2."""

    script: ClassVar[str] = "flux_2_train"
    title: ClassVar[str] = "FLUX.2 fine-tune"

    data: sections.Data = define_section(sections.data_with_references(sections.Data, {}))
