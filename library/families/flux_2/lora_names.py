"""Names of the layers that a LoRA of FLUX.2 changes."""

from collections.abc import Callable, Mapping
from typing import ClassVar

from library.families.flux_2 import keys
from library.families.flux_2.facts import FLUX_2_TRANSFORMER
from library.families.shared.double_stream_keys import DoubleStreamKeys
from library.families.shared.double_stream_lora import DoubleStreamLoraNames
from library.families.shared.lora_names import Shapes, SharedForm


class Flux2LoraNames(DoubleStreamLoraNames):
    """BFL's tree and diffusers'; files of kohya's names are what ComfyUI and diffusers both load whole."""

    title: ClassVar[str] = "FLUX.2"
    version_word: ClassVar[str] = "flux_2"
    words: ClassVar[tuple[str, ...]] = (
        "to_qkv_mlp_proj",
        "linear_in",
        "linear_out",
        "time_guidance_embed",
        "double_stream_modulation_img",
        "double_stream_modulation_txt",
        "single_stream_modulation",
    )
    # In diffusers' tree names differ from those of FLUX.1, in BFL's sizes alone.
    marks: ClassVar[str] = r"\.(to_qkv_mlp_proj|ff(_context)?\.linear_(in|out)|attn\.to_out(?!\.\d))(\.|$)"
    ratios: ClassVar[Mapping[str, int]] = {"linear1": 9, "img_mlp.0": 6, "txt_mlp.0": 6}
    shared: ClassVar[SharedForm] = SharedForm(has_alphas=False, has_lokr=True)  # alphas diffusers refuses
    mergeable: ClassVar[tuple[str, ...]] = (FLUX_2_TRANSFORMER,)
    layouts: ClassVar[DoubleStreamKeys] = keys.TREES
    sources: ClassVar[Callable[[Shapes], Mapping[str, tuple[str, ...]]]] = staticmethod(keys.flux_2_sources)


NAMES = Flux2LoraNames()
