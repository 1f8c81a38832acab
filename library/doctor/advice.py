"""Recommended settings for this machine: rules on what was found. Loads no torch, so the rules can be tested alone."""

from dataclasses import dataclass
from pathlib import Path

from library import families
from library.config.json_types import JsonObject
from library.config.problems import Message, join_messages
from library.measuring.candidates import format_changes
from library.runs import machine

FIRST_WITH_FP8 = (8, 9)  # compute capability of Ada: RTX 40, L4, L40S
FIRST_WITH_FAST_INT8 = (8, 0)  # of Ampere: A100, RTX 30
HOPPER = (9, 0)
PRESETS_FOLDER = Path(__file__).resolve().parents[2] / "presets"


@dataclass(frozen=True)
class MachineFacts:
    """The relevant facts of a machine."""

    memory_gb: float = 0.0  # of the first GPU, 0 without one
    capability: tuple[int, int] = (0, 0)
    bf16: bool = False
    fp8: bool = False
    compiles: bool = False  # torch.compile works on the device that trains


def advised_for_machine(facts: MachineFacts) -> JsonObject:
    """Return options that suit any training here."""
    options: JsonObject = {"compile": facts.compiles}
    if not facts.memory_gb:
        return {**options, "mixed_precision": "no"}
    options["mixed_precision"] = "bf16" if facts.bf16 else "fp16"
    if facts.capability >= (8, 0):
        options["cuda_allow_tf32"] = True
    if facts.memory_gb < 22:
        options |= {"gradient_checkpointing": True, "checkpoint_keep_attention": facts.memory_gb >= 15}
    return options


def fitting_presets(facts: MachineFacts) -> dict[str, str]:
    """Return the fitting LoRA preset by family, as kohya_gui names it: flux/lora-24gb."""
    fitting: dict[str, str] = {}
    for gigabytes, path in _lora_presets():  # the largest that fits wins
        if machine.has_memory(facts.memory_gb, gigabytes):
            fitting[path.parent.name] = f"{path.parent.name}/{path.stem}"
    return fitting


def _lora_presets() -> list[tuple[int, Path]]:
    """Return the LoRA presets with their gigabytes, the smallest first."""
    return sorted(
        (int(path.stem.removeprefix("lora-").removesuffix("gb")), path)
        for path in PRESETS_FOLDER.glob("*/lora-[0-9]*gb.toml")
    )


def settings_for_images(facts: MachineFacts) -> list[tuple[JsonObject, Message]]:
    """Return options for generating images on this GPU, each with its reason; none without a GPU."""
    if not facts.memory_gb:
        return []
    settings: list[tuple[JsonObject, Message]] = []
    if facts.capability >= FIRST_WITH_FP8 and facts.fp8:
        why = Message("this GPU multiplies fp8 at twice the rate of bf16, and weights take half the memory")
        settings.append(({"fp8_base": True, "fp8_compute": True}, why))
    elif facts.capability >= FIRST_WITH_FAST_INT8:
        why = Message("this GPU has no fp8, but multiplies int8 at twice the rate of bf16")
        settings.append(({"int8_base": True, "int8_compute": True}, why))
    if facts.compiles:
        why = Message("compiles and records if that pays off for the remaining images")
        settings.append(({"sample_compile": "auto"}, why))
    if facts.capability == HOPPER:
        why = Message("cuDNN's attention comes first, the fastest on this GPU")
    else:
        why = Message("PyTorch's own order; kohya bench --part sample times all kernels and compares their images")
    settings.append(({"sample_attention": "auto"}, why))
    return settings


def images_sentence(facts: MachineFacts) -> Message | str:
    """Return the settings for images in words, "" without a GPU."""
    parts = [
        Message("{settings} ({why})", settings=format_changes(options), why=why)
        for options, why in settings_for_images(facts)
    ]
    return join_messages(parts, "; ") if parts else ""


def advice_sentence(facts: MachineFacts) -> Message:
    """Return the advice in words."""
    if not facts.memory_gb:
        how = Message("compiling works") if facts.compiles else Message("compiling does not work")
        template = (
            "no GPU was found, so only tiny models can be trained ({how}); use an NVIDIA GPU with {least} GB or more"
        )
        return Message(template, how=how, least=_lora_presets()[0][0])
    presets = fitting_presets(facts).items()
    sentences = [
        Message("{model} LoRA: preset {name}", model=families.facts_of(family).title, name=name)
        for family, name in presets
    ]
    if not sentences:
        least = _lora_presets()[0][0]
        sentences.append(Message("no preset fits into so little memory; {least} GB are the least", least=least))
    if facts.fp8:
        sentences.append(Message("fp8 works, which speeds up a frozen base"))
    return join_messages([format_changes(advised_for_machine(facts)), *sentences], "; ")
