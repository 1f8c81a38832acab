"""The options of SD 1.5."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from library import families
from library.config import sections
from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.config.schema import define_section, opt

# Options that sd-scripts parses for every family, but that mean nothing here.
INEFFECTIVE = {
    **sections.NO_GUIDANCE,
    "sample_shift": "the noise levels of this model have no shift",
}
NEVER = -1  # of stop_text_encoder_training


@dataclass(frozen=True, kw_only=True, slots=True)
class Sd15Model(sections.Model):
    """The SD 1.5 checkpoint."""

    clip_skip: int | None = opt(
        None,
        "The text encoder's layer to use, from the end. Empty: 1; anime models: 2.",
        label="CLIP skip",
        min=1,
        max=12,
    )
    no_half_vae: bool = opt(False, "Run the VAE in float32.", label="VAE in full precision")

    @property
    def float32_vae(self) -> bool:
        return self.no_half_vae


@dataclass(frozen=True, kw_only=True, slots=True)
class Sd15DreamBoothCache(sections.Cache):
    """What is encoded once, before a DreamBooth training."""

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Reject caching the outputs of a trained text encoder, which change in every step."""
        yield from sections.Cache.check(self, run)
        if self.text and run.trains_whole_encoders:
            yield Problem(
                "cache_text_encoder_outputs",
                "cannot be used while the text encoder is trained: switch it off, or set stop_text_encoder_training "
                "to -1",
                also="cache_text_encoder_outputs_to_disk stop_text_encoder_training",
                fix={"stop_text_encoder_training": NEVER},
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sd15FullOptim(sections.FullOptim):
    """Rates for the parts of the model."""

    learning_rate_te: float | None = opt(
        None,
        "The learning rate of the text encoder. 0 freezes it. Empty: the learning rate.",
        label="Text encoder learning rate",
        min=0.0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sd15DreamBoothSteps(sections.Steps):
    """Length of the training, and how long the text encoder is trained."""

    stop_text_encoder_training: int | None = opt(
        None,
        "The last step that trains the text encoder. Empty: to the end; -1: never.",
        label="Stop text encoder training",
        min=NEVER,
        usual=NEVER,
    )

    def check(self, run: Any) -> Iterator[Problem]:
        """Reject a later stop with an optimizer that steps within the backward pass."""
        yield from sections.Steps.check(self, run)
        if (self.stop_text_encoder_training or 0) > 0 and (early := run.optim.stepped_early):
            yield Problem(
                "stop_text_encoder_training",
                "cannot be used with {early}, which updates weights within the backward pass: switch one of them off",
                early=early,
                also=early,
                fix={"stop_text_encoder_training": None},
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sd15Memory(sections.Memory):
    """Memory and speed of a training of SD 1.5."""

    blocks_to_swap: int | None = sections.blocks_to_swap(14)


@dataclass(frozen=True, kw_only=True)
class Sd15Run:
    """What all trainings of SD 1.5 share."""

    family: ClassVar[str] = "sd15"
    script_with = staticmethod(families.script_with)
    grid: ClassVar[int] = 32
    usual_size: ClassVar[int] = 512
    ineffective: ClassVar[Mapping[str, str]] = INEFFECTIVE

    model: Sd15Model = define_section(Sd15Model)
    memory: Sd15Memory = define_section(Sd15Memory)
    compile: sections.UnetCompile = define_section(sections.UnetCompile)


@dataclass(frozen=True, kw_only=True)
class Sd15Lora(Sd15Run, sections.AdapterRun):
    """LoRA and other adapters for SD 1.5."""

    script: ClassVar[str] = "train_network"
    title: ClassVar[str] = "SD 1.5 LoRA"

    cache: sections.UnetAdapterCache = define_section(sections.UnetAdapterCache)
    network: sections.UnetNetwork = define_section(sections.UnetNetwork)


@dataclass(frozen=True, kw_only=True)
class Sd15FullRun(Sd15Run, sections.FullRun):
    """What trainings of the whole model share."""

    encoder_rates: ClassVar[Mapping[str, str]] = {"clip_l": "learning_rate_te"}
    foreign: ClassVar[Mapping[str, str]] = {"block_lr": "it is for the blocks of another model"}

    optim: Sd15FullOptim = define_section(Sd15FullOptim)


@dataclass(frozen=True, kw_only=True)
class Sd15Finetune(Sd15FullRun):
    """Full fine-tuning of SD 1.5."""

    script: ClassVar[str] = "fine_tune"
    title: ClassVar[str] = "SD 1.5 fine-tune"
    tabs: ClassVar[tuple[str, ...]] = ("finetune",)

    cache: sections.UnetFullCache = define_section(sections.UnetFullCache)
    steps: sections.UnetFullSteps = define_section(sections.UnetFullSteps)

    @property
    def trains_whole_encoders(self) -> bool:
        return self.steps.train_text_encoder


@dataclass(frozen=True, kw_only=True)
class Sd15DreamBooth(Sd15FullRun):
    """DreamBooth for SD 1.5: trains the text encoder as well, unless stop_text_encoder_training is -1."""

    script: ClassVar[str] = "train_db"
    title: ClassVar[str] = "SD 1.5 DreamBooth"
    tabs: ClassVar[tuple[str, ...]] = ("dreambooth",)
    foreign: ClassVar[Mapping[str, str]] = {
        "no_token_padding": "captions are always padded to 75 tokens, as in all other trainings",
        "train_text_encoder": "the text encoder is trained unless stop_text_encoder_training is -1",
    }

    cache: Sd15DreamBoothCache = define_section(Sd15DreamBoothCache)
    data: sections.AdapterData = define_section(sections.AdapterData)
    steps: Sd15DreamBoothSteps = define_section(Sd15DreamBoothSteps)

    @property
    def trains_whole_encoders(self) -> bool:
        return self.steps.stop_text_encoder_training is None or self.steps.stop_text_encoder_training > 0

    @property
    def encoder_steps(self) -> int | None:
        return self.steps.stop_text_encoder_training


@dataclass(frozen=True, kw_only=True)
class Sd15TextualInversion(Sd15Run, sections.EmbeddingRun):
    """Textual inversion for SD 1.5: trains a new word."""

    script: ClassVar[str] = "train_textual_inversion"
    title: ClassVar[str] = "SD 1.5 textual inversion"

    cache: sections.UnetEmbeddingCache = define_section(sections.UnetEmbeddingCache)
