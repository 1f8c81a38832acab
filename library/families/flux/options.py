"""The options of FLUX.1."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from library import families
from library.config import sections
from library.config.converted import OLD_BLOCKS
from library.config.names import RETIRED_BESIDE_REFERENCES
from library.config.problems import Problem
from library.config.reading import parse_count
from library.config.run_config import ControlUse, Rule, RunConfig
from library.config.schema import defaults, define_section, opt
from library.config.values import Option
from library.families.flux.variants import FLUX_VARIANTS, FluxVariant, options_naming

# Options that sd-scripts parses for every family, but that mean nothing here.
INEFFECTIVE = {
    **sections.FLOW_INEFFECTIVE,
    "vae": "FLUX.1 has its autoencoder in ae; vae is only written into the metadata",
    "max_token_length": "captions of FLUX.1 are as long as t5xxl_max_token_length",
}

INEFFECTIVE_RULES: tuple[Rule, ...] = (
    ("clip_l", lambda c: "clip_l" in c.model.variant.encoders, "there is no CLIP-L in Chroma"),
    (
        "guidance_scale",
        lambda c: c.model.variant.guided or not c.model.guidance_scale,
        "there is no guidance in Chroma",
    ),
    ("sample_guidance_scale", lambda c: c.model.variant.guided, "there is no guidance in Chroma"),
    ("bypass_guidance_embedding", lambda c: c.model.variant.guided, "there is no guidance in Chroma"),
    (
        "offload_modulation",
        lambda c: c.model.has_modulation,
        "the blocks of Chroma have no modulation layers",
    ),
    ("guidance_scale", lambda c: not c.model.bypass_guidance_embedding, "bypass_guidance_embedding leaves it out"),
    ("random_masks", lambda c: c.control_images.inpaints, "only FLUX.1 Fill reads masks"),
)

OTHER_FLUX_FILES = {
    "clip_l": "the CLIP-L text encoder (clip_l.safetensors)",
    "t5xxl": "the T5-XXL text encoder (t5xxl_fp16.safetensors)",
    "ae": "the FLUX.1 autoencoder (ae.safetensors)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxModel(sections.Model):
    """The FLUX.1 transformer and the networks around it."""

    clip_l: str | None = opt(
        None,
        "The CLIP-L text encoder (clip_l.safetensors).",
        kind="file",
        label="CLIP-L",
        shown_with=options_naming(lambda variant: "clip_l" in variant.encoders),
    )
    t5xxl: str | None = opt(
        None, "The T5-XXL text encoder (t5xxl_fp16.safetensors, or in bf16 or fp8).", kind="file", label="T5-XXL"
    )
    ae: str | None = opt(None, "The FLUX.1 autoencoder (ae.safetensors).", kind="file", label="Autoencoder")
    t5xxl_max_token_length: int | None = opt(
        None,
        "The maximum number of T5 tokens. Empty: 512 for FLUX.1 dev, 256 for schnell.",
        parse=parse_count,
        ceiling=8192,
        label="T5 caption length",
    )
    t5xxl_train_length: Literal["max", "256", "longest"] = opt(
        "max",
        "T5 tokens read in a step: all, 256, or as many as the longest caption. Fewer are faster.",
        label="T5 length in training",
        words={"max": "All tokens", "256": "256 tokens", "longest": "As the longest caption"},
        advanced=True,
    )
    apply_t5_attn_mask: bool = opt(
        False,
        "Mask the padding after a caption, in the attention of T5 and the transformer.",
        label="T5 attention mask",
    )
    guidance_scale: float = opt(
        3.5,
        "The guidance value given to the model in training. 1 is usual for FLUX.1 dev.",
        min=0.0,
        shown_with=options_naming(lambda variant: variant.guided),
    )
    bypass_guidance_embedding: bool = opt(
        False,
        "Train without the guidance embedding, as Flex.1 needs. Samples keep theirs.",
        advanced=True,
        shown_with=options_naming(lambda variant: variant.guided),
    )
    model_type: Literal["flux", "krea", "kontext", "fill", "chroma"] = opt(
        "flux",
        "The kind of the base model. Models made from FLUX.1 dev or schnell count as these.",
        words={name: variant.title for name, variant in FLUX_VARIANTS.items()} | {"flux": "FLUX.1 dev, schnell"},
    )

    @property
    def variant(self) -> FluxVariant:
        return FLUX_VARIANTS[self.model_type]

    @property
    def has_modulation(self) -> bool:
        return self.variant.guided  # Chroma computes it outside of its blocks

    @property
    def needed(self) -> Mapping[str, str]:
        return {name: what for name, what in OTHER_FLUX_FILES.items() if name in (*self.variant.encoders, "ae")}

    @property
    def text_tokens(self) -> int | None:
        length, train_length = self.t5xxl_max_token_length, 256 if self.t5xxl_train_length == "256" else None
        return min(length, train_length) if length and train_length else length or train_length

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Reject varying lengths of captions that are encoded in each step; Chroma masks their padding."""
        yield from sections.Model.check(self, run)
        if getattr(run.data, "control_directory", None) and not self.variant.control_images.most:
            yield Problem(
                "control_directory",
                "is for model_type = kontext: {title} takes masks, whose folder is conditioning_data_dir of the images"
                if self.variant.control_images.inpaints
                else "is for model_type = kontext: {title} takes no reference images",
                title=self.variant.title,
                also="model_type",
                # Files of dev and Kontext look the same; the others are what the model type says.
                fix={"model_type": "kontext"} if self.model_type == "flux" else defaults(run, "control_directory"),
            )
        if self.variant.padding_seen and not self.apply_t5_attn_mask:
            yield Problem(
                "apply_t5_attn_mask",
                "must be on with model_type = chroma: the model was trained without seeing the padding",
                also="model_type",
                fix={"apply_t5_attn_mask": True},
            )
        if self.t5xxl_train_length == "longest" and not run.cache.text:
            yield Problem(
                "t5xxl_train_length",
                "= longest needs cache_text_encoder_outputs: switch that on, or use 256",
                also="cache_text_encoder_outputs",
                fix={"t5xxl_train_length": "256"},
            )

    def notes(self, run: RunConfig) -> Iterator[Problem]:
        """Warn of a length that cuts nothing."""
        if self.t5xxl_train_length == "256" and (self.t5xxl_max_token_length or 512) <= 256:
            yield Problem(
                "t5xxl_train_length",
                "has no effect: t5xxl_max_token_length is {length}",
                length=self.t5xxl_max_token_length,
                fix={"t5xxl_train_length": "max"},
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxLoraModel(FluxModel):
    """The same for training adapters."""

    no_half_vae: bool = opt(
        False, "Run the autoencoder in float32.", label="Autoencoder in full precision", advanced=True
    )

    @property
    def float32_vae(self) -> bool:
        return self.no_half_vae


REFERENCE_FOLDER = sections.reference_folder(options_naming(lambda variant: variant.control_images.most > 0))

RANDOM_MASKS = opt(
    0,
    "Masks drawn for each image without one, for Fill; each step takes one. 0: none.",
    min=0,
    ceiling=256,
    advanced=True,
    shown_with=options_naming(lambda variant: variant.control_images.inpaints),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxData(sections.Data):
    """The images, and the control images of Kontext and Fill."""

    control_directory: str | None = REFERENCE_FOLDER
    random_masks: int = RANDOM_MASKS


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxAdapterData(sections.AdapterData):
    """The same for training adapters."""

    control_directory: str | None = REFERENCE_FOLDER
    random_masks: int = RANDOM_MASKS


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxAdapterCache(sections.TextBatchCache):
    """What is encoded once when adapters are trained."""

    def check(self, run: Any) -> Iterator[Problem]:
        """Reject caching a trained T5; CLIP-L can be trained while T5 is cached."""
        yield from sections.TextBatchCache.check(self, run)
        if self.text and "train_t5xxl=True" in run.network.network_args:
            yield Problem(
                "cache_text_encoder_outputs",
                "cannot be used with train_t5xxl=True: switch one of them off",
                also="cache_text_encoder_outputs_to_disk network_args",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxFlow(sections.Flow):
    """The noise of a step, and the parametrization of the prediction."""

    timestep_sampling: Literal["sigma", "uniform", "sigmoid", "shift", "flux_shift"] = opt(
        "sigma",
        "How noise levels (timesteps) are drawn. shift, flux_shift and sigmoid are usual.",
        words={"flux_shift": "FLUX shift"},
    )
    sigmoid_scale: float = opt(1.0, "Above 1 trains very low and very high timesteps more often. 1 is usual.", min=0.0)
    size_shift: ClassVar[str] = "flux_shift"


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxFullOptim(sections.FullOptim):
    """Learning rates, and options that save memory when the whole transformer is trained."""

    blockwise_fused_optimizers: bool = opt(
        False, "One optimizer per block, stepped during the backward pass. Saves memory.", advanced=True
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxFullSave(sections.SafetensorsSave):
    """Where the result goes."""

    mem_eff_save: bool = opt(
        False,
        "No effect: files are always written tensor by tensor. Accepted for old configs.",
        label="Save with little memory",
        advanced=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxMemory(sections.ModulatedMemory):
    """Memory and speed of a training of FLUX.1."""

    # 19 double and 38 single blocks; a double one is as large as two single ones.
    blocks_to_swap: int | None = sections.blocks_to_swap(35)


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxCompile(sections.Compile):
    """How the blocks of FLUX.1 are compiled."""

    kinds: ClassVar[Mapping[str, str]] = {"double": "DoubleStreamBlock", "single": "SingleStreamBlock"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxNetwork(sections.Network):
    """The adapters that are trained for FLUX.1."""

    network_module: Literal["networks.lora_flux", "lycoris.kohya"] | str | None = sections.network_module()


@dataclass(frozen=True, kw_only=True)
class FluxRun:
    """The common base of all FLUX.1 trainings."""

    family: ClassVar[str] = "flux"
    script_with = staticmethod(families.script_with)
    retired: ClassVar[Mapping[str, str]] = RETIRED_BESIDE_REFERENCES
    grid: ClassVar[int] = 16
    shifts_samples: ClassVar[bool] = True
    ineffective: ClassVar[Mapping[str, str]] = INEFFECTIVE
    ineffective_rules: ClassVar[tuple[Rule, ...]] = (*INEFFECTIVE_RULES, *sections.flow_rules(FluxFlow.size_shift))
    old: ClassVar[Mapping[str, Option]] = OLD_BLOCKS

    model: FluxModel = define_section(FluxModel)
    noise: FluxFlow = define_section(FluxFlow)
    loss: sections.FlowLoss = define_section(sections.FlowLoss)
    memory: FluxMemory = define_section(FluxMemory)
    compile: FluxCompile = define_section(FluxCompile)


@dataclass(frozen=True, kw_only=True)
class FluxLora(FluxRun, sections.AdapterRun):
    """LoRA and other adapters for FLUX.1."""

    script: ClassVar[str] = "flux_train_network"
    title: ClassVar[str] = "FLUX.1 LoRA"
    # The kohya_ss GUI writes these into configs of this script, too.
    foreign: ClassVar[Mapping[str, str]] = {"mem_eff_save": "adapter files are small"}

    model: FluxLoraModel = define_section(FluxLoraModel)
    data: FluxAdapterData = define_section(FluxAdapterData)
    cache: FluxAdapterCache = define_section(FluxAdapterCache)
    network: FluxNetwork = define_section(FluxNetwork)

    @property
    def control_images(self) -> ControlUse:
        return dataclasses.replace(self.model.variant.control_images, random_masks=self.data.random_masks)


@dataclass(frozen=True, kw_only=True)
class FluxTrain(FluxRun, sections.FullRun):
    """Full fine-tuning and DreamBooth for FLUX.1."""

    script: ClassVar[str] = "flux_train"
    title: ClassVar[str] = "FLUX.1 fine-tune"
    foreign: ClassVar[Mapping[str, str]] = {
        "train_text_encoder": "the text encoders of FLUX.1 are not trained",
        "block_lr": "it is for the blocks of SDXL",
    }

    data: FluxData = define_section(FluxData)
    cache: sections.TextBatchCache = define_section(sections.TextBatchCache)
    optim: FluxFullOptim = define_section(FluxFullOptim)
    save: FluxFullSave = define_section(FluxFullSave)

    @property
    def control_images(self) -> ControlUse:
        return dataclasses.replace(self.model.variant.control_images, random_masks=self.data.random_masks)
