"""What can be set when the toy is trained: the shared sections, and the kinds of its blocks."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from library import families
from library.config import sections
from library.config.schema import section


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyCompile(sections.Compile):
    """How the blocks of the toy are compiled."""

    kinds: ClassVar[Mapping[str, str]] = MappingProxyType({"block": "ToyBlock"})


@dataclass(frozen=True, kw_only=True)
class ToyRun:
    """What all trainings of the toy share."""

    family: ClassVar[str] = "toy"
    script_with = staticmethod(families.script_with)
    grid: ClassVar[int] = 16

    compile: ToyCompile = section(ToyCompile)


@dataclass(frozen=True, kw_only=True)
class ToyLora(ToyRun, sections.AdapterRun):
    """LoRA for the toy."""

    script: ClassVar[str] = "toy_train_network"
    title: ClassVar[str] = "Toy LoRA"


@dataclass(frozen=True, kw_only=True)
class ToyTrain(ToyRun, sections.FullRun):
    """Full fine-tuning of the toy."""

    script: ClassVar[str] = "toy_train"
    title: ClassVar[str] = "Toy fine-tune"
