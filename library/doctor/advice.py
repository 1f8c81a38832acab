"""Recommended settings for this machine: rules on what was found. Loads no torch, so the rules can be tested alone."""

from dataclasses import dataclass
from pathlib import Path

from library import families
from library.config.json_types import JsonObject
from library.config.problems import Message, join_messages
from library.measuring.candidates import format_changes
from library.runs import machine

PRESETS_FOLDER = Path(__file__).resolve().parents[2] / "presets"


@dataclass(frozen=True)
class MachineFacts:
    """The relevant facts of a machine."""

    memory_gb: float = 0.0  # of the first GPU, 0 without one
    capability: tuple[int, int] = (0, 0)
    bf16: bool = False
    fp8: bool = False
    compiles: bool = False  # torch.compile works on the device that trains


def advised_for_machine(found: MachineFacts) -> JsonObject:
    """Return options that suit any training here."""
    made: JsonObject = {"compile": found.compiles}
    if not found.memory_gb:
        return {**made, "mixed_precision": "no"}
    made["mixed_precision"] = "bf16" if found.bf16 else "fp16"
    if found.capability >= (8, 0):
        made["cuda_allow_tf32"] = True
    if found.memory_gb < 22:
        made |= {"gradient_checkpointing": True, "checkpoint_keep_attention": found.memory_gb >= 15}
    return made


def fitting_presets(found: MachineFacts) -> dict[str, str]:
    """Return the fitting LoRA preset by family, as kohya_gui names it: flux/lora-24gb."""
    fitting: dict[str, str] = {}
    sized = [
        (int(path.stem.removeprefix("lora-").removesuffix("gb")), path)
        for path in PRESETS_FOLDER.glob("*/lora-[0-9]*gb.toml")
    ]
    for gigabytes, path in sorted(sized):  # the largest that fits wins
        if machine.has_memory(found.memory_gb, gigabytes):
            fitting[path.parent.name] = f"{path.parent.name}/{path.stem}"
    return fitting


def advice_sentence(found: MachineFacts) -> Message:
    """Return the advice in words."""
    if not found.memory_gb:
        how = Message("with compile") if found.compiles else Message("without compile")
        template = "without a GPU only tiny models can be trained, {how}; rent or add an NVIDIA GPU of 8 GB or more"
        return Message(template, how=how)
    known = fitting_presets(found).items()
    ready = [
        Message("{model} LoRA: preset {name}", model=families.facts_of(one).title, name=name) for one, name in known
    ]
    if not ready:
        ready.append(Message("no preset fits into so little memory; 8 GB are the least"))
    if found.fp8:
        ready.append(Message("fp8 works, which speeds up a frozen base"))
    return join_messages([format_changes(advised_for_machine(found)), *ready], "; ")
