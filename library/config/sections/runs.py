"""The sections that trainings of a kind have in every family, which puts its own in the place of some."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from library.config.names import RETIRED
from library.config.run_config import CaptionChange, ControlUse
from library.config.schema import section
from library.config.sections.adapters import (
    AdapterData,
    AdapterOptim,
    AdapterPrecision,
    AdapterSteps,
    FrozenPrecision,
    Network,
)
from library.config.sections.caching import Cache
from library.config.sections.captions import Captions
from library.config.sections.compiling import Compile
from library.config.sections.control import Control, ControlData, ControlOptim
from library.config.sections.embedding import Embedding, EmbeddingOptim
from library.config.sections.inputs import Data, Model
from library.config.sections.learning import FullOptim, Optim, Steps, Validation
from library.config.sections.machine import Distributed, Memory, Precision
from library.config.sections.noise import Loss, Noise
from library.config.sections.outputs import AdapterSave, EmbeddingSave, FullSave, Hub, Log, Metadata, Sample, Save
from library.config.sections.run import Run


@dataclass(frozen=True, kw_only=True)
class BaseRun(Run):
    """The sections of every training."""

    model: Model = section(Model)
    data: Data = section(Data)
    captions: Captions = section(Captions)
    cache: Cache = section(Cache)
    optim: Optim = section(Optim)
    steps: Steps = section(Steps)
    save: Save = section(Save)
    sample: Sample = section(Sample)
    noise: Noise = section(Noise)
    loss: Loss = section(Loss)
    precision: Precision = section(Precision)
    memory: Memory = section(Memory)
    compile: Compile = section(Compile)
    metadata: Metadata = section(Metadata)
    hub: Hub = section(Hub)
    log: Log = section(Log)
    distributed: Distributed = section(Distributed)


@dataclass(frozen=True, kw_only=True)
class AdapterRun(BaseRun):
    """A training of adapters beside a frozen model."""

    kind: ClassVar[str] = "lora"
    told_by: ClassVar[str] = "network_"
    adapters: ClassVar[bool] = True
    can_be_left_out: ClassVar[bool] = True
    usual_rate: ClassVar[str] = "1e-4"
    file_kind: ClassVar[tuple[str, str]] = ("LoRA", "/lora")

    data: AdapterData = section(AdapterData)
    network: Network = section(Network)
    optim: AdapterOptim = section(AdapterOptim)
    steps: AdapterSteps = section(AdapterSteps)
    save: AdapterSave = section(AdapterSave)
    precision: AdapterPrecision = section(AdapterPrecision)
    validation: Validation = section(Validation)


@dataclass(frozen=True, kw_only=True)
class FullRun(BaseRun):
    """A training of the model itself."""

    kind: ClassVar[str] = "finetune"
    adapters: ClassVar[bool] = False
    usual_rate: ClassVar[str] = "1e-5"
    file_kind: ClassVar[tuple[str, str]] = ("Checkpoint", "")
    foreign: ClassVar[Mapping[str, str]] = {
        "prior_loss_weight": "a fine-tune counts regularisation images like all others",
    }

    optim: FullOptim = section(FullOptim)
    save: FullSave = section(FullSave)


@dataclass(frozen=True, kw_only=True)
class EmbeddingRun(BaseRun):
    """A training of vectors of new words (textual inversion) beside a frozen model."""

    kind: ClassVar[str] = "textual-inversion"
    told_by: ClassVar[str] = "token_string"
    adapters: ClassVar[bool] = True
    usual_rate: ClassVar[str] = "5e-4"
    file_kind: ClassVar[tuple[str, str]] = ("TextualInversion", "/textual-inversion")

    data: AdapterData = section(AdapterData)
    embedding: Embedding = section(Embedding)
    optim: EmbeddingOptim = section(EmbeddingOptim)
    save: EmbeddingSave = section(EmbeddingSave)
    precision: FrozenPrecision = section(FrozenPrecision)

    @property
    def caption_change(self) -> CaptionChange:
        """All vectors of the word, and sentences instead of captions."""
        return self.embedding.caption_change


@dataclass(frozen=True, kw_only=True)
class ControlRun(BaseRun):
    """A training of small networks that follow a control image (ControlNet-LLLite) beside a frozen model."""

    kind: ClassVar[str] = "lllite"
    told_by: ClassVar[str] = "cond_emb_dim"
    adapters: ClassVar[bool] = True
    can_be_left_out: ClassVar[bool] = True
    usual_rate: ClassVar[str] = "2e-4"
    file_kind: ClassVar[tuple[str, str]] = ("LoRA", "/control-net-lllite")
    retired: ClassVar[Mapping[str, str]] = {k: v for k, v in RETIRED.items() if k != "conditioning_data_dir"}

    data: ControlData = section(ControlData)
    control: Control = section(Control)
    optim: ControlOptim = section(ControlOptim)
    save: AdapterSave = section(AdapterSave)
    precision: FrozenPrecision = section(FrozenPrecision)

    @property
    def control_images(self) -> ControlUse:
        """One for each image, read as pixels."""
        return ControlUse(guided=True)
