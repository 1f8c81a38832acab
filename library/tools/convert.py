"""A LoRA under other names: kohya's, diffusers' (PEFT), or those of ComfyUI's own model tree."""

from collections.abc import Callable
from pathlib import Path

from library.adapter_files import adapters, storage, writing
from library.adapter_files.names import FORMATS
from library.adapter_files.storage import silent
from library.config.problems import ConfigError, Message, Report
from library.tools import for_comfyui


def convert(
    lora: str | Path,
    out: str | Path,
    *,
    to: str,
    dtype: str | None = None,
    report: Report = silent,
    note: Callable[[Message], object] = repr,
) -> Path:
    """Write a LoRA in the format `to` ("kohya", "diffusers", "comfy"), from whichever it is in.

    The products stay the same, and so do the tensors where the format allows. diffusers has no alphas: there the
    strength goes into `lora_B` and is noted in the metadata for the way back. FLUX.1's fused layers, apart in
    diffusers, are split and joined exactly; pieces of a file that was trained in diffusers become one adapter whose
    rank is their sum. For ComfyUI, OFT and BOFT are written so that its formulas give the same; `note` gets a sentence
    for each kind that it computes otherwise all the same. Raises ConfigError for kinds that have no names there.
    """
    if to not in FORMATS:
        raise ConfigError("to is {to}: use one of {formats}", to=repr(to), formats=", ".join(FORMATS))
    out = storage.fresh(out, lora)
    report(Message("reading"), 0, 1)
    found = adapters.read(lora)
    found.metadata.pop("lora_adapter_metadata", None)
    if to == "comfy":
        found = for_comfyui.prepared(found, lora)
        for sentence in for_comfyui.notes(found):
            note(sentence)
    return writing.save(found, out, style=to, dtype=dtype, report=report)
