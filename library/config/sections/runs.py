"""The sections that trainings of a kind have in every family, which puts its own in the place of some."""

from dataclasses import dataclass
from typing import ClassVar

from library.config.schema import section
from library.config.sections.adapters import AdapterData, AdapterOptim, AdapterPrecision, AdapterSteps, Network
from library.config.sections.compiling import Compile
from library.config.sections.inputs import Cache, Captions, Data, Model
from library.config.sections.learning import FullOptim, Loss, Noise, Steps, Validation
from library.config.sections.machine import Distributed, Memory, Precision
from library.config.sections.outputs import AdapterSave, FullSave, Hub, Log, Metadata, Sample
from library.config.sections.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRun(Run):
    """Adapters learn, the model does not."""

    adapters: ClassVar[bool] = True

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

    adapters: ClassVar[bool] = False

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
