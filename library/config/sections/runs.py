"""The sections that trainings of one kind share in all families; a family replaces some by its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from library.config.names import RETIRED
from library.config.run_config import CaptionChange, ControlUse, Preservation, RunConfig
from library.config.schema import define_section
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
from library.config.sections.learning import FullOptim, Optim
from library.config.sections.length import Steps, Validation
from library.config.sections.machine import Distributed, Memory, Precision
from library.config.sections.noise import Loss, Noise
from library.config.sections.outputs import AdapterSave, EmbeddingSave, FullSave, Hub, Log, Metadata, Save
from library.config.sections.sampling import Sampling

# A network beside the model is what a pass can leave out, to ask the base model.
_ONLY_ADAPTERS = (
    "only a LoRA or LyCORIS network can be switched off to get the base model's prediction; leave it "
    "empty, or train a LoRA"
)
ADAPTERS_ONLY = dict.fromkeys(("preserve_prompt", "preserve_weight"), _ONLY_ADAPTERS) | {
    "assistant_lora": "it works only beside a LoRA of a distilled model: leave it empty, or train a LoRA",
    "base_bits": "4 bits work only for the frozen model of a LoRA: leave it empty, or train a LoRA",
}


@dataclass(frozen=True, kw_only=True)
class BaseRun(RunConfig):
    """The sections of every training."""

    unfit: ClassVar[frozenset[str]] = frozenset({"v2"})

    model: Model = define_section(Model)
    data: Data = define_section(Data)
    captions: Captions = define_section(Captions)
    cache: Cache = define_section(Cache)
    optim: Optim = define_section(Optim)
    steps: Steps = define_section(Steps)
    save: Save = define_section(Save)
    sample: Sampling = define_section(Sampling)
    noise: Noise = define_section(Noise)
    loss: Loss = define_section(Loss)
    precision: Precision = define_section(Precision)
    memory: Memory = define_section(Memory)
    compile: Compile = define_section(Compile)
    metadata: Metadata = define_section(Metadata)
    hub: Hub = define_section(Hub)
    log: Log = define_section(Log)
    distributed: Distributed = define_section(Distributed)


@dataclass(frozen=True, kw_only=True)
class AdapterRun(BaseRun):
    """A training of adapters beside a frozen model."""

    unfit: ClassVar[frozenset[str]] = frozenset({"fsdp"})
    kind: ClassVar[str] = "lora"
    recognised_by_option: ClassVar[str] = "network_"
    adapters: ClassVar[bool] = True
    can_be_left_out: ClassVar[bool] = True
    usual_rate: ClassVar[str] = "1e-4"
    file_kind: ClassVar[tuple[str, str]] = ("LoRA", "/lora")

    data: AdapterData = define_section(AdapterData)
    network: Network = define_section(Network)
    optim: AdapterOptim = define_section(AdapterOptim)
    steps: AdapterSteps = define_section(AdapterSteps)
    save: AdapterSave = define_section(AdapterSave)
    precision: AdapterPrecision = define_section(AdapterPrecision)
    validation: Validation = define_section(Validation)

    @property
    def preservation(self) -> Preservation | None:
        prompt, weight = (self.network.preserve_prompt or "").strip(), self.network.preserve_weight
        return Preservation(prompt, weight) if weight else None


@dataclass(frozen=True, kw_only=True)
class FullRun(BaseRun):
    """A training of the model itself."""

    unfit: ClassVar[frozenset[str]] = frozenset({"offload_modulation"})
    kind: ClassVar[str] = "finetune"
    adapters: ClassVar[bool] = False
    usual_rate: ClassVar[str] = "1e-5"
    file_kind: ClassVar[tuple[str, str]] = ("Checkpoint", "")
    refused: ClassVar[Mapping[str, str]] = ADAPTERS_ONLY
    foreign: ClassVar[Mapping[str, str]] = {
        "prior_loss_weight": "a fine-tune counts regularisation images like all others",
    }

    optim: FullOptim = define_section(FullOptim)
    save: FullSave = define_section(FullSave)


@dataclass(frozen=True, kw_only=True)
class EmbeddingRun(BaseRun):
    """A training of vectors of new words (textual inversion) beside a frozen model."""

    unfit: ClassVar[frozenset[str]] = frozenset(
        {"fsdp", "cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"}
    )
    kind: ClassVar[str] = "textual-inversion"
    recognised_by_option: ClassVar[str] = "token_string"
    adapters: ClassVar[bool] = True
    usual_rate: ClassVar[str] = "5e-4"
    file_kind: ClassVar[tuple[str, str]] = ("TextualInversion", "/textual-inversion")
    refused: ClassVar[Mapping[str, str]] = ADAPTERS_ONLY

    data: AdapterData = define_section(AdapterData)
    embedding: Embedding = define_section(Embedding)
    optim: EmbeddingOptim = define_section(EmbeddingOptim)
    save: EmbeddingSave = define_section(EmbeddingSave)
    precision: FrozenPrecision = define_section(FrozenPrecision)

    @property
    def caption_change(self) -> CaptionChange:
        return self.embedding.caption_change


@dataclass(frozen=True, kw_only=True)
class ControlRun(BaseRun):
    """A training of small networks that follow a control image (ControlNet-LLLite) beside a frozen model."""

    unfit: ClassVar[frozenset[str]] = frozenset({"fsdp", "masked_loss"})
    kind: ClassVar[str] = "lllite"
    recognised_by_option: ClassVar[str] = "cond_emb_dim"
    adapters: ClassVar[bool] = True
    can_be_left_out: ClassVar[bool] = True
    usual_rate: ClassVar[str] = "2e-4"
    file_kind: ClassVar[tuple[str, str]] = ("LoRA", "/control-net-lllite")
    refused: ClassVar[Mapping[str, str]] = ADAPTERS_ONLY | {
        "control_directory": "name the folder of control images in conditioning_data_dir"
    }
    retired: ClassVar[Mapping[str, str]] = {k: v for k, v in RETIRED.items() if k != "conditioning_data_dir"}

    data: ControlData = define_section(ControlData)
    control: Control = define_section(Control)
    optim: ControlOptim = define_section(ControlOptim)
    save: AdapterSave = define_section(AdapterSave)
    precision: FrozenPrecision = define_section(FrozenPrecision)

    @property
    def control_images(self) -> ControlUse:
        return ControlUse(guided=True)
