"""What can be set when the toy is trained: the shared sections, and the kinds of its blocks."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from library.config import sections
from library.config.schema import section


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyCompile(sections.Compile):
    """torch.compile, for the blocks that the model repeats."""

    kinds: ClassVar[Mapping[str, str]] = MappingProxyType({"block": "ToyBlock"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyLora(sections.Run):
    """LoRA for the toy."""

    family: ClassVar[str] = "toy"
    script: ClassVar[str] = "toy_train_network"
    title: ClassVar[str] = "Toy LoRA"
    adapters: ClassVar[bool] = True
    grid: ClassVar[int] = 16

    model: sections.Model = section(sections.Model)
    data: sections.AdapterData = section(sections.AdapterData)
    captions: sections.Captions = section(sections.Captions)
    cache: sections.Cache = section(sections.Cache)
    network: sections.Network = section(sections.Network)
    optim: sections.AdapterOptim = section(sections.AdapterOptim)
    steps: sections.AdapterSteps = section(sections.AdapterSteps)
    save: sections.AdapterSave = section(sections.AdapterSave)
    sample: sections.Sample = section(sections.Sample)
    noise: sections.Noise = section(sections.Noise)
    loss: sections.Loss = section(sections.Loss)
    precision: sections.AdapterPrecision = section(sections.AdapterPrecision)
    memory: sections.Memory = section(sections.Memory)
    compile: ToyCompile = section(ToyCompile)
    validation: sections.Validation = section(sections.Validation)
    metadata: sections.Metadata = section(sections.Metadata)
    hub: sections.Hub = section(sections.Hub)
    log: sections.Log = section(sections.Log)
    distributed: sections.Distributed = section(sections.Distributed)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyTrain(sections.Run):
    """Full fine-tuning of the toy."""

    family: ClassVar[str] = "toy"
    script: ClassVar[str] = "toy_train"
    title: ClassVar[str] = "Toy fine-tune"
    adapters: ClassVar[bool] = False
    grid: ClassVar[int] = 16

    model: sections.Model = section(sections.Model)
    data: sections.Data = section(sections.Data)
    captions: sections.Captions = section(sections.Captions)
    cache: sections.Cache = section(sections.Cache)
    optim: sections.FullOptim = section(sections.FullOptim)
    steps: sections.Steps = section(sections.Steps)
    save: sections.FullSave = section(sections.FullSave)
    sample: sections.Sample = section(sections.Sample)
    noise: sections.Noise = section(sections.Noise)
    loss: sections.Loss = section(sections.Loss)
    precision: sections.Precision = section(sections.Precision)
    memory: sections.Memory = section(sections.Memory)
    compile: ToyCompile = section(ToyCompile)
    metadata: sections.Metadata = section(sections.Metadata)
    hub: sections.Hub = section(sections.Hub)
    log: sections.Log = section(sections.Log)
    distributed: sections.Distributed = section(sections.Distributed)
