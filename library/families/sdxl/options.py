"""The options of SDXL."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from library import families
from library.config import sections
from library.config.problems import Problem
from library.config.reading import parse_numbers
from library.config.run_config import RunConfig
from library.config.schema import define_section, opt

# Options that sd-scripts parses for every family, but that mean nothing here.
INEFFECTIVE = {
    **sections.NO_GUIDANCE,
    "clip_skip": "SDXL always uses the last but one layer; it is only written into the metadata",
    "sample_shift": "the noise levels of SDXL have no shift",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SdxlModel(sections.Model):
    """The SDXL checkpoint."""

    no_half_vae: bool = opt(
        False,
        "Run the VAE in float32. The original SDXL VAE gives black images in fp16.",
        label="VAE in full precision",
    )

    @property
    def float32_vae(self) -> bool:
        return self.no_half_vae


def slow_products(precision: sections.Precision, run: RunConfig) -> Iterator[Problem]:
    """Warn that 8-bit products make this model slower, or give other remarks on them."""
    if precision.fp8_compute:
        template = "makes SDXL slower, whose matrix products are small (measured on an H200): leave it out"
        yield Problem("fp8_compute", template)
    else:
        yield from sections.Precision.notes(precision, run)


@dataclass(frozen=True, kw_only=True, slots=True)
class SdxlAdapterPrecision(sections.AdapterPrecision):
    """Number formats when adapters are trained."""

    def notes(self, run: RunConfig) -> Iterator[Problem]:
        yield from slow_products(self, run)


@dataclass(frozen=True, kw_only=True, slots=True)
class SdxlFrozenPrecision(sections.FrozenPrecision):
    """Precision options for a frozen model."""

    def notes(self, run: RunConfig) -> Iterator[Problem]:
        yield from slow_products(self, run)


@dataclass(frozen=True, kw_only=True, slots=True)
class SdxlFullOptim(sections.FullOptim):
    """Rates for the parts of the model."""

    learning_rate_te1: float | None = opt(
        None,
        "The learning rate of the first text encoder. 0 freezes it. Empty: the learning rate.",
        label="CLIP-L learning rate",
        min=0.0,
    )
    learning_rate_te2: float | None = opt(
        None,
        "The learning rate of the second text encoder. 0 freezes it. Empty: the learning rate.",
        label="CLIP-G learning rate",
        min=0.0,
    )
    block_lr: str | None = opt(
        None,
        "23 rates, by commas: embeddings, 9 input, 3 middle, 9 output blocks, last. 0 freezes.",
        label="Block learning rates",
        parse=parse_numbers,
        advanced=True,
    )

    @property
    def block_lrs(self) -> tuple[float, ...]:
        return tuple(float(rate) for rate in self.block_lr.split(",")) if self.block_lr else ()

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Check that the U-Net gets 23 rates."""
        yield from sections.FullOptim.check(self, run)
        if self.block_lrs and len(self.block_lrs) != 23:
            yield Problem("block_lr", "needs 23 rates separated by commas, got {count}", count=len(self.block_lrs))


@dataclass(frozen=True, kw_only=True, slots=True)
class SdxlMemory(sections.Memory):
    """Memory and speed of a training of SDXL."""

    blocks_to_swap: int | None = sections.blocks_to_swap(68)


@dataclass(frozen=True, kw_only=True)
class SdxlRun:
    """What all trainings of SDXL share."""

    family: ClassVar[str] = "sdxl"
    script_with = staticmethod(families.script_with)
    grid: ClassVar[int] = 32
    ineffective: ClassVar[Mapping[str, str]] = INEFFECTIVE

    model: SdxlModel = define_section(SdxlModel)
    memory: SdxlMemory = define_section(SdxlMemory)
    compile: sections.UnetCompile = define_section(sections.UnetCompile)


@dataclass(frozen=True, kw_only=True)
class SdxlLora(SdxlRun, sections.AdapterRun):
    """LoRA and other adapters for SDXL."""

    script: ClassVar[str] = "sdxl_train_network"
    title: ClassVar[str] = "SDXL LoRA"

    cache: sections.UnetAdapterCache = define_section(sections.UnetAdapterCache)
    network: sections.UnetNetwork = define_section(sections.UnetNetwork)
    precision: SdxlAdapterPrecision = define_section(SdxlAdapterPrecision)


@dataclass(frozen=True, kw_only=True)
class SdxlTrain(SdxlRun, sections.FullRun):
    """Full fine-tuning and DreamBooth for SDXL."""

    script: ClassVar[str] = "sdxl_train"
    title: ClassVar[str] = "SDXL fine-tune"
    encoder_rates: ClassVar[Mapping[str, str]] = {"clip_l": "learning_rate_te1", "clip_g": "learning_rate_te2"}

    cache: sections.UnetFullCache = define_section(sections.UnetFullCache)
    optim: SdxlFullOptim = define_section(SdxlFullOptim)
    steps: sections.UnetFullSteps = define_section(sections.UnetFullSteps)

    @property
    def trains_whole_encoders(self) -> bool:
        return self.steps.train_text_encoder


@dataclass(frozen=True, kw_only=True)
class SdxlTextualInversion(SdxlRun, sections.EmbeddingRun):
    """Textual inversion for SDXL: trains a new word."""

    script: ClassVar[str] = "sdxl_train_textual_inversion"
    title: ClassVar[str] = "SDXL textual inversion"

    cache: sections.UnetEmbeddingCache = define_section(sections.UnetEmbeddingCache)
    precision: SdxlFrozenPrecision = define_section(SdxlFrozenPrecision)


@dataclass(frozen=True, kw_only=True)
class SdxlControlLLLite(SdxlRun, sections.ControlRun):
    """ControlNet-LLLite for SDXL: a small network that follows a control image."""

    script: ClassVar[str] = "sdxl_train_control_net_lllite"
    title: ClassVar[str] = "SDXL ControlNet-LLLite"

    precision: SdxlFrozenPrecision = define_section(SdxlFrozenPrecision)
