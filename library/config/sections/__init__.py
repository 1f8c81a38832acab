"""The options that families share, by theme. A family's own are in families/<name>/options.py."""

from library.config.sections.inputs import Cache, Captions, Data, Model
from library.config.sections.learning import (
    AdapterData,
    AdapterOptim,
    AdapterSteps,
    FullOptim,
    Loss,
    Network,
    Noise,
    Optim,
    Steps,
    Validation,
)
from library.config.sections.machine import (
    AdapterPrecision,
    Compile,
    Distributed,
    Memory,
    OffloadMemory,
    Precision,
)
from library.config.sections.outputs import AdapterSave, FullSave, Hub, Log, Metadata, Sample, Save
from library.config.sections.run import Run

__all__ = [
    "AdapterData",
    "AdapterOptim",
    "AdapterPrecision",
    "AdapterSave",
    "AdapterSteps",
    "Cache",
    "Captions",
    "Compile",
    "Data",
    "Distributed",
    "FullOptim",
    "FullSave",
    "Hub",
    "Log",
    "Loss",
    "Memory",
    "Metadata",
    "Model",
    "Network",
    "Noise",
    "OffloadMemory",
    "Optim",
    "Precision",
    "Run",
    "Sample",
    "Save",
    "Steps",
    "Validation",
]
