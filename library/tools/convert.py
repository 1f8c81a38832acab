"""Convert the names of a LoRA: kohya's, diffusers' (PEFT), or those of ComfyUI's own model tree."""

from collections.abc import Callable
from pathlib import Path

from library.adapter_files import adapters, storage, writing
from library.adapter_files.names import FORMATS
from library.adapter_files.storage import silent
from library.config.problems import ConfigError, Message, Problem, Report, attempted, option_name, require_choice
from library.tools import for_comfyui


def convert_lora(
    lora: str | Path,
    out: str | Path,
    *,
    to: str,
    dtype: str | None = None,
    report: Report = silent,
    note: Callable[[Message], object] = repr,
) -> Path:
    """Write a LoRA in the format `to` ("kohya", "diffusers", "comfy") from any format.

    Products stay the same, and tensors if the format allows. diffusers has no alphas: the strength goes into `lora_B`
    and is stored in the metadata for converting back, for "comfy" too where diffusers would read alphas wrongly.
    FLUX.1's fused layers, separate in diffusers, are split and joined exactly; slices of a file trained in diffusers
    become one adapter whose rank is their sum. For ComfyUI, OFT and BOFT are rewritten so that its formulas give the
    same result; `note` gets a sentence for each kind that it still computes differently. Raises ConfigError for kinds
    without names there.
    """
    require_choice(option_name("to"), to, FORMATS)
    problems: list[Problem] = []
    place = attempted(problems, lambda: storage.fresh(out, lora))
    if place is not None:
        report(Message("reading"), 0, 1)
    source = attempted(problems, lambda: adapters.read_lora(lora))
    if place is None or source is None:
        raise ConfigError(*problems)
    source.metadata.pop("lora_adapter_metadata", None)
    if to == "comfy":
        source = for_comfyui.prepare_for_comfyui(source, lora)
        for sentence in for_comfyui.comfyui_notes(source):
            note(sentence)
    return writing.save_lora(source, place, style=to, dtype=dtype, report=report)
