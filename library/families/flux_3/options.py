"""The options of FLUX 3."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from library import families
from library.config import sections
from library.config.names import RETIRED_BESIDE_REFERENCES
from library.config.run_config import ControlUse, Rule
from library.config.schema import define_section, opt
from library.families.shared.network_args import LayerPreset, TransformerArgs, usual_layers

MAX_REFERENCES = 10  # as many as the model is published for

# Options parsed for every family that mean nothing here.
INEFFECTIVE = {
    **sections.NO_GUIDANCE,
    "max_token_length": "captions of FLUX.3 may have any length up to 8184 tokens",
}

OTHER_FLUX_3_FILES = {
    "text_encoder": "the Qwen3-VL-4B text encoder (qwen3vl_4b_bf16.safetensors)",
    "vae": "the FLUX.2 VAE, which FLUX.3 shares (flux2-vae.safetensors)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux3Model(sections.Model):
    """The FLUX.3 transformer and the networks around it."""

    vae: str | None = opt(
        None, "The FLUX.2 VAE, which FLUX.3 shares (flux2-vae.safetensors).", kind="file", label="VAE"
    )
    text_encoder: str | None = sections.text_encoder_file("Qwen3-VL-4B", "qwen3vl_4b_bf16.safetensors")
    vae_dtype: Literal["float32", "bfloat16"] = opt(
        "float32", "The number format of the VAE.", label="Number format of the VAE", advanced=True
    )

    others: ClassVar[Mapping[str, str]] = OTHER_FLUX_3_FILES


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux3Flow(sections.TransformerFlow):
    """Noise, timesteps and the type of the prediction."""

    timestep_sampling: Literal["sigma", "uniform", "sigmoid", "shift"] = opt(
        "shift", "How noise levels (timesteps) are drawn. shift is usual."
    )
    discrete_flow_shift: float = sections.flow_shift(3.0)
    size_shift: ClassVar[str] = ""  # the model is sampled with one shift at every size


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux3Memory(sections.Memory):
    """Memory and speed of a training of FLUX.3."""

    blocks_to_swap: int | None = sections.blocks_to_swap(27)  # the 15 before the joint blocks stay


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux3Compile(sections.Compile):
    """How the blocks of FLUX.3 are compiled."""

    kinds: ClassVar[Mapping[str, str]] = {
        "image": "Flux3ImageBlock",
        "text": "Flux3TextBlock",
        "single": "MMSingleStreamBlock",
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux3Network(sections.TransformerNetwork):
    """The adapters that are trained for FLUX.3."""

    network_module: Literal["networks.lora_flux_3", "lycoris.kohya"] | str | None = sections.network_module()


@dataclass(frozen=True, kw_only=True)
class Flux3Run:
    """The common base of all FLUX.3 trainings."""

    family: ClassVar[str] = "flux_3"
    script_with = staticmethod(families.script_with)
    retired: ClassVar[Mapping[str, str]] = RETIRED_BESIDE_REFERENCES
    ineffective: ClassVar[Mapping[str, str]] = INEFFECTIVE
    ineffective_rules: ClassVar[tuple[Rule, ...]] = sections.flow_rules(Flux3Flow.size_shift)

    @property
    def control_images(self) -> ControlUse:
        return ControlUse(most=MAX_REFERENCES)

    model: Flux3Model = define_section(Flux3Model)
    noise: Flux3Flow = define_section(Flux3Flow)
    memory: Flux3Memory = define_section(Flux3Memory)
    compile: Flux3Compile = define_section(Flux3Compile)


@dataclass(frozen=True, kw_only=True)
class Flux3Lora(Flux3Run, sections.TransformerLora):
    """LoRA and other adapters for FLUX.3."""

    unfit: ClassVar[frozenset[str]] = sections.NO_ENCODER
    script: ClassVar[str] = "flux_3_train_network"
    title: ClassVar[str] = "FLUX.3 LoRA"

    data: sections.ReferenceAdapterData = define_section(sections.ReferenceAdapterData)
    network: Flux3Network = define_section(Flux3Network)


@dataclass(frozen=True, kw_only=True)
class Flux3Train(Flux3Run, sections.TransformerTrain):
    """Full fine-tuning and DreamBooth for FLUX.3."""

    script: ClassVar[str] = "flux_3_train"
    title: ClassVar[str] = "FLUX.3 fine-tune"

    data: sections.ReferenceData = define_section(sections.ReferenceData)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux3Args(TransformerArgs):
    """`networks.lora_flux_3`."""

    presets: ClassVar[tuple[LayerPreset, ...]] = (
        *usual_layers("_mlp_=0"),
        LayerPreset(
            "Without the text-only blocks",
            "The blocks that process only the text are not trained.",
            {"network_reg_dims": "_txt_mode_=0"},
        ),
    )
    block_arguments: ClassVar[tuple[str, ...]] = (
        "train_image_block_indices",
        "train_text_block_indices",
        "train_joint_block_indices",
    )

    block_lists: ClassVar[tuple[str, ...]] = ("content_mode_blocks.image", "txt_mode_blocks", "single_blocks")
    train_image_block_indices: str = opt("all", 'image blocks that carry adapters: "all", "none" or "0-3"')
    train_text_block_indices: str = opt("all", 'text blocks that carry adapters: "all", "none" or "0-3"')
    train_joint_block_indices: str = opt("all", 'joint blocks that carry adapters: "all", "none" or "0-3,5"')
    train_reference_blocks: bool = opt(
        False,
        "adapters on the blocks for reference images, for trainings that have such images",
        label="Train the reference blocks",
    )

    def is_chosen(self, path: str) -> bool:
        """Layers of the blocks for reference images learn nothing without such images."""
        if ".image_cond." in path:
            return self.train_reference_blocks or self.is_included(path)
        return self.in_chosen_block(path)
