"""The options of FLUX.2."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from library import families
from library.config import sections
from library.config.names import RETIRED_BESIDE_REFERENCES
from library.config.run_config import ControlUse, Rule
from library.config.schema import define_section, opt
from library.families.shared.network_args import LayerPreset, TransformerArgs

MAX_REFERENCES = 8  # maximum reference images per item; more exceed any known training length

# Options parsed for every family that mean nothing here.
INEFFECTIVE = {"max_token_length": "captions of FLUX.2 are as long as 512 tokens"}

INEFFECTIVE_RULES: tuple[Rule, ...] = (
    ("guidance_scale", lambda c: c.model.model_version in (None, "dev"), "there is no guidance in klein"),
    ("sample_guidance_scale", lambda c: c.model.model_version == "dev", "there is no guidance in klein"),
)

# Flags of musubi-tuner that are not needed here.
MUSUBI_FLAGS = {"fp8_text_encoder": "fp8_base keeps the text encoder in 8 bits as well"}

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
        None,
        "Kleins not named base are distilled. Not set: read from the file; kleins count as base.",
        words={
            "klein-base-4b": "FLUX.2 klein base 4B",
            "klein-base-9b": "FLUX.2 klein base 9B",
            "klein-4b": "FLUX.2 klein 4B",
            "klein-9b": "FLUX.2 klein 9B",
            "dev": "FLUX.2 dev",
        },
    )
    vae_dtype: Literal["float32", "bfloat16"] = opt(
        "float32", "The number format of the VAE.", label="Number format of the VAE", advanced=True
    )
    guidance_scale: float = opt(1.0, "The guidance that dev is trained with. Kleins have none.", min=0.0, advanced=True)

    @property
    def needed(self) -> Mapping[str, str]:
        return {name: what for name, what in OTHER_FLUX_2_FILES.items() if name == "vae" or self.model_version != "dev"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux2Flow(sections.TransformerFlow):
    """Noise, timesteps and the type of the prediction."""

    timestep_sampling: Literal["sigma", "uniform", "sigmoid", "shift", "flux2_shift"] = opt(
        "flux2_shift",
        "How noise levels (timesteps) are drawn. flux2_shift and shift are usual.",
        words={"flux2_shift": "FLUX.2 shift"},
    )
    discrete_flow_shift: float = sections.flow_shift(3.0)
    size_shift: ClassVar[str] = "flux2_shift"


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux2Memory(sections.Memory):
    """Memory and speed of a training of FLUX.2."""

    # klein 4B has 5 double and 20 single blocks, klein 9B 8 and 24, dev 8 and 48; a double one is as large as two.
    blocks_to_swap: int | None = sections.blocks_to_swap(31)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux2Compile(sections.Compile):
    """How the blocks of FLUX.2 are compiled."""

    kinds: ClassVar[Mapping[str, str]] = {"double": "DoubleStreamBlock", "single": "SingleStreamBlock"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux2Network(sections.TransformerNetwork):
    """The adapters that are trained for FLUX.2."""

    network_module: Literal["networks.lora_flux_2", "lycoris.kohya"] | str | None = sections.network_module()


@dataclass(frozen=True, kw_only=True)
class Flux2Run:
    """The common base of all FLUX.2 trainings."""

    family: ClassVar[str] = "flux_2"
    script_with = staticmethod(families.script_with)
    retired: ClassVar[Mapping[str, str]] = RETIRED_BESIDE_REFERENCES
    ineffective: ClassVar[Mapping[str, str]] = INEFFECTIVE
    ineffective_rules: ClassVar[tuple[Rule, ...]] = (*INEFFECTIVE_RULES, *sections.flow_rules(Flux2Flow.size_shift))
    foreign: ClassVar[Mapping[str, str]] = MUSUBI_FLAGS

    @property
    def control_images(self) -> ControlUse:
        return ControlUse(most=MAX_REFERENCES)

    model: Flux2Model = define_section(Flux2Model)
    noise: Flux2Flow = define_section(Flux2Flow)
    memory: Flux2Memory = define_section(Flux2Memory)
    compile: Flux2Compile = define_section(Flux2Compile)


@dataclass(frozen=True, kw_only=True)
class Flux2Lora(Flux2Run, sections.TransformerLora):
    """LoRA and other adapters for FLUX.2."""

    unfit: ClassVar[frozenset[str]] = sections.NO_ENCODER
    script: ClassVar[str] = "flux_2_train_network"
    title: ClassVar[str] = "FLUX.2 LoRA"

    data: sections.ReferenceAdapterData = define_section(sections.ReferenceAdapterData)
    network: Flux2Network = define_section(Flux2Network)


@dataclass(frozen=True, kw_only=True)
class Flux2Train(Flux2Run, sections.TransformerTrain):
    """Full fine-tuning and DreamBooth for FLUX.2."""

    script: ClassVar[str] = "flux_2_train"
    title: ClassVar[str] = "FLUX.2 fine-tune"

    data: sections.ReferenceData = define_section(sections.ReferenceData)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux2Args(TransformerArgs):
    """`networks.lora_flux_2`."""

    presets: ClassVar[tuple[LayerPreset, ...]] = (
        LayerPreset("All layers", "Attention and MLP of every block learn; the usual choice.", {}),
        LayerPreset(
            "Attention only",
            "Attention of every block; in single blocks it shares its matrices with the MLP.",
            {"network_reg_dims": "_(img|txt)_mlp_=0"},
        ),
        LayerPreset(
            "Image stream only",
            "What double blocks do with the text stays as it is, so that prompts are understood as before.",
            {"network_reg_dims": "_txt_(attn|mlp)_=0"},
        ),
    )
    block_arguments: ClassVar[tuple[str, ...]] = ("train_double_block_indices", "train_single_block_indices")

    block_lists: ClassVar[tuple[str, ...]] = ("double_blocks", "single_blocks")
    train_double_block_indices: str = opt("all", 'double blocks that carry adapters: "all", "none" or "0-3,5"')
    train_single_block_indices: str = opt("all", 'single blocks that carry adapters: "all", "none" or "0-3,5"')
