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
    """torch.compile, for the blocks that the model repeats."""

    kinds: ClassVar[Mapping[str, str]] = MappingProxyType({"block": "ToyBlock"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyLora(sections.AdapterRun):
    """LoRA for the toy."""

    family: ClassVar[str] = "toy"
    script: ClassVar[str] = "toy_train_network"
    title: ClassVar[str] = "Toy LoRA"
    script_with = staticmethod(families.script_with)
    grid: ClassVar[int] = 16

    compile: ToyCompile = section(ToyCompile)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyTrain(sections.FullRun):
    """Full fine-tuning of the toy."""

    family: ClassVar[str] = "toy"
    script: ClassVar[str] = "toy_train"
    title: ClassVar[str] = "Toy fine-tune"
    script_with = staticmethod(families.script_with)
    grid: ClassVar[int] = 16

    compile: ToyCompile = section(ToyCompile)
