"""The options of Qwen-Image-2.1."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from library import families
from library.config import sections
from library.config.names import RETIRED_BESIDE_REFERENCES
from library.config.problems import Problem
from library.config.run_config import ControlUse, Rule, RunConfig
from library.config.schema import define_section, opt
from library.families.shared.network_args import BlockArgs, LayerPreset, usual_layers

SHIFT_LINE = ((256, 0.5), (8192, 0.9))  # image tokens and mu: the shift of a size is e^mu, linear between and beyond
MAX_REFERENCES = 10  # of an image, as the model was trained

# Options parsed for every family that mean nothing here.
INEFFECTIVE = {
    **sections.NO_GUIDANCE,
    "max_token_length": "captions of Qwen-Image-2.1 may have any length up to 1016 tokens",
}

OTHER_QWEN_21_FILES = {
    "text_encoder": "the Qwen3-VL-8B text encoder (qwen3vl_8b_bf16.safetensors)",
    "vae": "the Qwen-Image-2.1 VAE (qwen_image_2.1_vae_bf16.safetensors)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen21Model(sections.Model):
    """The Qwen-Image-2.1 transformer and the networks around it."""

    vae: str | None = opt(
        None, "The Qwen-Image-2.1 VAE (qwen_image_2.1_vae_bf16.safetensors).", kind="file", label="VAE"
    )
    text_encoder: str | None = sections.text_encoder_file("Qwen3-VL-8B", "qwen3vl_8b_bf16.safetensors")
    model_version: Literal["base", "turbo"] | None = opt(
        None,
        "Their files look the same; base takes 40 steps. Not set: base, unless a name says Turbo.",
        words={"base": "Qwen-Image-2.1 base", "turbo": "Qwen-Image-2.1 Turbo"},
    )

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Reject reference images without cached text, as the text encoder also sees them."""
        yield from sections.Model.check(self, run)
        if getattr(run.data, "control_directory", None) and not run.cache.text:
            yield Problem(
                "cache_text_encoder_outputs",
                "must be on with control_directory, as the text encoder also sees the reference images",
                also="control_directory",
                fix={"cache_text_encoder_outputs": True},
            )

    others: ClassVar[Mapping[str, str]] = OTHER_QWEN_21_FILES


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen21Flow(sections.TransformerFlow):
    """Noise, timesteps and the type of the prediction."""

    timestep_sampling: Literal["sigma", "uniform", "sigmoid", "shift", "qwen_shift"] = opt(
        "qwen_shift",
        "How noise levels (timesteps) are drawn. qwen_shift and shift are usual.",
        words={"qwen_shift": "Qwen shift"},
    )
    discrete_flow_shift: float = sections.flow_shift(2.0)

    shift_line: ClassVar[tuple[tuple[int, float], tuple[int, float]]] = SHIFT_LINE
    size_shift: ClassVar[str] = "qwen_shift"


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen21Memory(sections.Memory):
    """Memory and speed of a training of Qwen-Image-2.1."""

    blocks_to_swap: int | None = sections.blocks_to_swap(31)


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen21Compile(sections.Compile):
    """How the blocks of Qwen-Image-2.1 are compiled."""

    kinds: ClassVar[Mapping[str, str]] = {"block": "JointTransformerBlock"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen21Network(sections.TransformerNetwork):
    """The adapters that are trained for Qwen-Image-2.1."""

    network_module: Literal["networks.lora_qwen_image_21", "lycoris.kohya"] | str | None = sections.network_module()


@dataclass(frozen=True, kw_only=True)
class Qwen21Run:
    """The common base of all Qwen-Image-2.1 trainings."""

    family: ClassVar[str] = "qwen_image_21"
    script_with = staticmethod(families.script_with)
    retired: ClassVar[Mapping[str, str]] = RETIRED_BESIDE_REFERENCES
    ineffective: ClassVar[Mapping[str, str]] = INEFFECTIVE
    ineffective_rules: ClassVar[tuple[Rule, ...]] = sections.flow_rules(Qwen21Flow.size_shift)

    @property
    def control_images(self) -> ControlUse:
        return ControlUse(most=MAX_REFERENCES, captioned=True)

    model: Qwen21Model = define_section(Qwen21Model)
    noise: Qwen21Flow = define_section(Qwen21Flow)
    memory: Qwen21Memory = define_section(Qwen21Memory)
    compile: Qwen21Compile = define_section(Qwen21Compile)


@dataclass(frozen=True, kw_only=True)
class Qwen21Lora(Qwen21Run, sections.TransformerLora):
    """LoRA and other adapters for Qwen-Image-2.1."""

    unfit: ClassVar[frozenset[str]] = sections.NO_ENCODER
    script: ClassVar[str] = "qwen_image_21_train_network"
    title: ClassVar[str] = "Qwen-Image-2.1 LoRA"

    data: sections.ReferenceAdapterData = define_section(sections.ReferenceAdapterData)
    network: Qwen21Network = define_section(Qwen21Network)


@dataclass(frozen=True, kw_only=True)
class Qwen21Train(Qwen21Run, sections.TransformerTrain):
    """Full fine-tuning and DreamBooth for Qwen-Image-2.1."""

    script: ClassVar[str] = "qwen_image_21_train"
    title: ClassVar[str] = "Qwen-Image-2.1 fine-tune"

    data: sections.ReferenceData = define_section(sections.ReferenceData)


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen21Args(BlockArgs):
    """`networks.lora_qwen_image_21`."""

    presets: ClassVar[tuple[LayerPreset, ...]] = usual_layers("_mlp_=0")
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks",)
