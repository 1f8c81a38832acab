"""What can be set when FLUX.2 is trained."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from library import families
from library.config import sections
from library.config.problems import Problem
from library.config.run_config import ControlUse, Rule, RunConfig
from library.config.schema import opt, section

REFERENCES = 8  # reference images of an item; more would be longer than any training has been

# Parsed for every family, without a meaning for this one.
IDLE = {
    **sections.FLOW_IDLE,
    "max_token_length": "captions of FLUX.2 are as long as 512 tokens",
}

IDLE_RULES: tuple[Rule, ...] = (
    ("guidance_scale", lambda c: c.model.model_version in (None, "dev"), "there is no guidance in klein"),
    ("text_encoder", lambda c: c.model.model_version != "dev", "the text encoder of dev is not read here"),
    *sections.FLOW_RULES,
    ("sigmoid_scale", lambda c: c.noise.timestep_sampling not in ("sigma", "uniform"),
     "timestep_sampling is not sigmoid, shift or flux2_shift"),
)  # fmt: skip

# Flags of musubi-tuner that nothing here needs.
MUSUBI = {"fp8_text_encoder": "fp8_base keeps the text encoder in 8 bits as well"}

OTHERS = {
    "text_encoder": "the Qwen3-4B (klein 4B) or Qwen3-8B (klein 9B) text encoder",
    "vae": "the FLUX.2 VAE (flux2-vae.safetensors)",
}


def _foreign(known: Mapping[str, str]) -> dict[str, str]:
    return {name: why for name, why in known.items() if name != "vae_dtype"} | MUSUBI


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux2Model(sections.Model):
    """The FLUX.2 transformer and the networks around it."""

    vae: str | None = opt(None, "The FLUX.2 VAE (flux2-vae.safetensors).", kind="file", label="VAE")
    text_encoder: str | None = opt(
        None, "The Qwen3 text encoder: 4B for klein 4B, 8B for klein 9B (bf16 or fp8).", kind="file",
        label="Text encoder",
    )  # fmt: skip
    model_version: Literal["klein-base-4b", "klein-base-9b", "klein-4b", "klein-9b", "dev"] | None = opt(
        None, "Kleins without base are distilled. Empty: read from the file, a klein as its base model."
    )
    vae_dtype: Literal["float32", "bfloat16"] = opt(
        "float32", "The number format of the VAE.", label="Number format of the VAE", advanced=True
    )
    guidance_scale: float = opt(1.0, "The guidance that dev is trained with. Kleins have none.", min=0.0, advanced=True)

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """The text encoder of dev, Mistral, is not read, so that nothing can be asked of it."""
        yield from sections.Model.check(self, run)
        if self.model_version != "dev":
            return
        if not run.cache.cache_text_encoder_outputs_to_disk:
            yield Problem("cache_text_encoder_outputs_to_disk",
                "must be on with model_version = dev: its text encoder is not read here, and captions come from the "
                "caches that musubi-tuner writes beside the images", also="model_version",
                fix={"cache_text_encoder_outputs_to_disk": True})  # fmt: skip
        if run.sample.sample_prompts:
            yield Problem("sample_prompts",
                "cannot be drawn with model_version = dev, whose text encoder is not read here: leave it empty",
                also="model_version", fix={"sample_prompts": None})  # fmt: skip

    def missing(self, run: RunConfig) -> Iterator[Problem]:
        """A single file is the transformer alone."""
        yield from sections.Model.missing(self, run)
        read = {name: what for name, what in OTHERS.items() if name == "vae" or self.model_version != "dev"}
        yield from self.missing_parts(read)


REFERENCE_FOLDER = sections.reference_folder({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux2Data(sections.Data):
    """The images, and those that the model is shown beside them."""

    control_directory: str | None = REFERENCE_FOLDER


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux2AdapterData(sections.AdapterData):
    """The same, when adapters learn."""

    control_directory: str | None = REFERENCE_FOLDER


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux2Flow(sections.TransformerFlow):
    """How much noise a step has, and what the model answers."""

    timestep_sampling: Literal["sigma", "uniform", "sigmoid", "shift", "flux2_shift"] = opt(
        "flux2_shift", "How timesteps are sampled. flux2_shift and shift are usual."
    )
    discrete_flow_shift: float = sections.flow_shift(3.0)

    @property
    def shift_by_size(self) -> bool:
        """Whether the number of tokens of an image decides how far its timesteps are shifted."""
        return self.timestep_sampling == "flux2_shift"


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux2Network(sections.TransformerNetwork):
    """The adapters that learn."""

    network_module: Literal["networks.lora_flux_2", "lycoris.kohya"] | str | None = opt(
        None, "The network module, that is the adapter type. Empty: LoRA.", label="Network module"
    )
    usual: ClassVar[str] = "networks.lora_flux_2"


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux2Memory(sections.Memory):
    """What makes a training fit; klein 4B has 5 double and 20 single blocks, klein 9B 8 and 24, dev 8 and 48. A double
    block is as large as two single ones."""

    blocks_to_swap: int | None = sections.blocks_to_swap(31)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux2Compile(sections.Compile):
    """torch.compile, for the blocks that the model repeats."""

    kinds: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"double": "DoubleStreamBlock", "single": "SingleStreamBlock"}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux2Lora(sections.TransformerLora):
    """LoRA and other adapters for FLUX.2."""

    family: ClassVar[str] = "flux_2"
    script: ClassVar[str] = "flux_2_train_network"
    title: ClassVar[str] = "FLUX.2 LoRA"
    script_with = staticmethod(families.script_with)
    idle: ClassVar[Mapping[str, str]] = IDLE
    idle_rules: ClassVar[tuple[Rule, ...]] = IDLE_RULES
    foreign: ClassVar[Mapping[str, str]] = _foreign(sections.TransformerLora.foreign)

    @property
    def control_images(self) -> ControlUse:
        """Reference images, as many as there are."""
        return ControlUse(most=REFERENCES)

    model: Flux2Model = section(Flux2Model)
    data: Flux2AdapterData = section(Flux2AdapterData)
    network: Flux2Network = section(Flux2Network)
    noise: Flux2Flow = section(Flux2Flow)
    memory: Flux2Memory = section(Flux2Memory)
    compile: Flux2Compile = section(Flux2Compile)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux2Train(sections.TransformerTrain):
    """Full fine-tuning and DreamBooth for FLUX.2."""

    family: ClassVar[str] = "flux_2"
    script: ClassVar[str] = "flux_2_train"
    title: ClassVar[str] = "FLUX.2 fine-tune"
    script_with = staticmethod(families.script_with)
    idle: ClassVar[Mapping[str, str]] = IDLE
    idle_rules: ClassVar[tuple[Rule, ...]] = IDLE_RULES
    foreign: ClassVar[Mapping[str, str]] = _foreign(sections.TransformerTrain.foreign)

    @property
    def control_images(self) -> ControlUse:
        """Reference images, as many as there are."""
        return ControlUse(most=REFERENCES)

    model: Flux2Model = section(Flux2Model)
    data: Flux2Data = section(Flux2Data)
    noise: Flux2Flow = section(Flux2Flow)
    memory: Flux2Memory = section(Flux2Memory)
    compile: Flux2Compile = section(Flux2Compile)
