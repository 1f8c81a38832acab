"""Which settings suit this machine: rules on what was found of it. No torch in here, the rules are tried on paper."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# From so many GB of GPU memory on, the preset for a LoRA that fits, largest first.
PRESETS: Mapping[str, tuple[tuple[float, str], ...]] = {
    "flux": ((46, "lora-fast-compile"), (22, "lora-24gb"), (11, "lora-12gb")),
    "sdxl": ((22, "lora-fast-compile"), (11, "lora-12gb")),
}
TITLES = {"flux": "FLUX.1", "sdxl": "SDXL"}
LEAST = 7.0  # GB; SDXL LoRA with everything that saves memory


@dataclass(frozen=True)
class Found:
    """What matters of a machine."""

    memory_gb: float = 0.0  # of the first GPU, 0 without one
    capability: tuple[int, int] = (0, 0)
    bf16: bool = False
    fp8: bool = False
    compiles: bool = False  # torch.compile works on the device that trains


def options(found: Found) -> dict[str, Any]:
    """The options that suit any training here."""
    made: dict[str, Any] = {"compile": found.compiles}
    if not found.memory_gb:
        return {**made, "mixed_precision": "no"}
    made["mixed_precision"] = "bf16" if found.bf16 else "fp16"
    if found.capability >= (8, 0):
        made["cuda_allow_tf32"] = True
    if found.memory_gb < 22:
        made |= {"gradient_checkpointing": True, "checkpoint_keep_attention": found.memory_gb >= 15}
    return made


def presets(found: Found) -> dict[str, str]:
    """By family, the preset for a LoRA that fits, as kohya_gui names it: flux/lora-24gb."""
    fitting = {
        family: next((name for least, name in choices if found.memory_gb >= least), "")
        for family, choices in PRESETS.items()
    }
    return {family: f"{family}/{name}" for family, name in fitting.items() if name}


def sentence(found: Found) -> str:
    """The same in words."""
    if not found.memory_gb:
        how = "with compile" if found.compiles else "without compile"
        return f"without a GPU only tiny models can be trained, {how}; rent or add an NVIDIA GPU of 12 GB or more"
    set_to = ", ".join(f"{name} = {str(value).lower()}" for name, value in options(found).items())
    ready = [f"{TITLES[family]} LoRA: preset {name}" for family, name in presets(found).items()]
    if "flux" not in presets(found):
        ready.append("FLUX.1 does not fit")
    if not presets(found):
        save = "gradient_checkpointing and blocks_to_swap" if found.memory_gb >= LEAST else "a GPU with more memory"
        ready.append(f"SDXL LoRA needs {save}")
    if found.fp8:
        ready.append("fp8 works, which speeds up a frozen base")
    return f"{set_to}; {'; '.join(ready)}"
