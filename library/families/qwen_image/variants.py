"""Variants of Qwen-Image that `model_version` selects, and how they differ. Needs no torch."""

from dataclasses import dataclass
from pathlib import Path

from library.config.run_config import ControlUse
from library.families.facts import Variant

TRANSFORMER, EDIT_2511 = "a Qwen-Image transformer", "a Qwen-Image-Edit-2511 transformer"
CONDITION, WHOLE = 384 * 384, 1024 * 1024  # pixels of a reference image as the text encoder sees it


@dataclass(frozen=True, kw_only=True)
class QwenVariant(Variant):
    """One variant. All but one share a header, so only the option or a whole model's folder distinguishes them."""

    template: str = ""  # how images precede a caption; "" if the text encoder reads none
    numbered: bool = False  # each with its number
    condition_area: int = 0  # pixels of a reference image as the text encoder sees it
    still_references: bool = False  # whose tokens are modulated as at time 0
    short: str = "qi"  # in the names of musubi-tuner's caches
    base_model_version: str = "qwen_image"
    architecture: str = "Qwen-Image"


ONE, UP_TO_THREE = ControlUse(least=1, most=1, captioned=True), ControlUse(least=1, most=3, captioned=True)
QWEN_VARIANTS = {
    "original": QwenVariant(title="Qwen-Image"),
    "edit": QwenVariant(
        title="Qwen-Image-Edit",
        control_images=ONE,
        template="edit",
        condition_area=WHOLE,
        short="qie",
        base_model_version="qwen_image_edit",
        architecture="Qwen-Image-Edit",
    ),
    "edit-2509": QwenVariant(
        title="Qwen-Image-Edit-2509",
        control_images=UP_TO_THREE,
        template="edit-plus",
        numbered=True,
        condition_area=CONDITION,
        short="qie",
        base_model_version="qwen_image_edit",
        architecture="Qwen-Image-Edit-Plus",
    ),
    "edit-2511": QwenVariant(
        title="Qwen-Image-Edit-2511",
        control_images=UP_TO_THREE,
        template="edit-plus",
        numbered=True,
        condition_area=CONDITION,
        still_references=True,
        short="qie",
        base_model_version="qwen_image_edit",
        architecture="Qwen-Image-Edit-2511",
    ),
}
EDITS = tuple(name for name, variant in QWEN_VARIANTS.items() if variant.control_images.most)


def called(path: str | Path) -> str:
    """Return the model_version that a file's name suggests, "" if it names none of the Edit models."""
    name = Path(path).name.lower()
    if "edit" not in name:
        return ""
    return next((f"edit-{year}" for year in ("2509", "2511") if year in name), "edit")
