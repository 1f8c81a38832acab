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
from library.config.sections.compiling import Compile
from library.config.sections.control import Control, ControlData, ControlOptim
from library.config.sections.embedding import Embedding, EmbeddingOptim
from library.config.sections.inputs import Cache, Captions, Data, Model
from library.config.sections.learning import FullOptim, Loss, Noise, Steps, Validation
from library.config.sections.machine import Distributed, Memory, Precision
from library.config.sections.outputs import AdapterSave, EmbeddingSave, FullSave, Hub, Log, Metadata, Sample
from library.config.sections.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRun(Run):
    """Adapters learn, the model does not."""

    kind: ClassVar[str] = "lora"
    told_by: ClassVar[str] = "network_"
    adapters: ClassVar[bool] = True
    can_be_left_out: ClassVar[bool] = True
    usual_rate: ClassVar[str] = "1e-4"
    file_kind: ClassVar[tuple[str, str]] = ("LoRA", "/lora")

    model: Model = section(Model)
    data: AdapterData = section(AdapterData)
    captions: Captions = section(Captions)
    cache: Cache = section(Cache)
    network: Network = section(Network)
    optim: AdapterOptim = section(AdapterOptim)
    steps: AdapterSteps = section(AdapterSteps)
    save: AdapterSave = section(AdapterSave)
    sample: Sample = section(Sample)
    noise: Noise = section(Noise)
    loss: Loss = section(Loss)
    precision: AdapterPrecision = section(AdapterPrecision)
    memory: Memory = section(Memory)
    compile: Compile = section(Compile)
    validation: Validation = section(Validation)
    metadata: Metadata = section(Metadata)
    hub: Hub = section(Hub)
    log: Log = section(Log)
    distributed: Distributed = section(Distributed)


@dataclass(frozen=True, kw_only=True, slots=True)
class FullRun(Run):
    """The model itself learns."""

    kind: ClassVar[str] = "finetune"
    adapters: ClassVar[bool] = False
    usual_rate: ClassVar[str] = "1e-5"
    file_kind: ClassVar[tuple[str, str]] = ("Checkpoint", "")

    model: Model = section(Model)
    data: Data = section(Data)
    captions: Captions = section(Captions)
    cache: Cache = section(Cache)
    optim: FullOptim = section(FullOptim)
    steps: Steps = section(Steps)
    save: FullSave = section(FullSave)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingRun(Run):
    """New words of the text encoders learn (textual inversion), the model does not."""

    kind: ClassVar[str] = "textual-inversion"
    told_by: ClassVar[str] = "token_string"
    adapters: ClassVar[bool] = True
    usual_rate: ClassVar[str] = "5e-4"
    file_kind: ClassVar[tuple[str, str]] = ("TextualInversion", "/textual-inversion")

    model: Model = section(Model)
    data: AdapterData = section(AdapterData)
    captions: Captions = section(Captions)
    cache: Cache = section(Cache)
    embedding: Embedding = section(Embedding)
    optim: EmbeddingOptim = section(EmbeddingOptim)
    steps: Steps = section(Steps)
    save: EmbeddingSave = section(EmbeddingSave)
    sample: Sample = section(Sample)
    noise: Noise = section(Noise)
    loss: Loss = section(Loss)
    precision: FrozenPrecision = section(FrozenPrecision)
    memory: Memory = section(Memory)
    compile: Compile = section(Compile)
    metadata: Metadata = section(Metadata)
    hub: Hub = section(Hub)
    log: Log = section(Log)
    distributed: Distributed = section(Distributed)

    @property
    def caption_change(self) -> CaptionChange:
        """All vectors of the word, and sentences instead of captions."""
        return self.embedding.caption_change


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlRun(Run):
    """Small networks learn to follow a control image (ControlNet-LLLite), the model does not learn."""

    kind: ClassVar[str] = "lllite"
    told_by: ClassVar[str] = "cond_emb_dim"
    adapters: ClassVar[bool] = True
    can_be_left_out: ClassVar[bool] = True
    usual_rate: ClassVar[str] = "2e-4"
    file_kind: ClassVar[tuple[str, str]] = ("LoRA", "/control-net-lllite")
    retired: ClassVar[Mapping[str, str]] = {k: v for k, v in RETIRED.items() if k != "conditioning_data_dir"}

    model: Model = section(Model)
    data: ControlData = section(ControlData)
    captions: Captions = section(Captions)
    cache: Cache = section(Cache)
    control: Control = section(Control)
    optim: ControlOptim = section(ControlOptim)
    steps: Steps = section(Steps)
    save: AdapterSave = section(AdapterSave)
    sample: Sample = section(Sample)
    noise: Noise = section(Noise)
    loss: Loss = section(Loss)
    precision: FrozenPrecision = section(FrozenPrecision)
    memory: Memory = section(Memory)
    compile: Compile = section(Compile)
    metadata: Metadata = section(Metadata)
    hub: Hub = section(Hub)
    log: Log = section(Log)
    distributed: Distributed = section(Distributed)

    @property
    def control_images(self) -> ControlUse:
        """One for each image, read as pixels."""
        return ControlUse(guided=True)
