"""Unsupported models whose adapters have names like those of a supported family."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ForeignModel:
    """How to recognise a model's adapters: metadata, layer paths, and layer inputs."""

    title: str
    version_pattern: str  # pattern of ss_base_model_version and modelspec.architecture
    paths: str = ""  # pattern of paths that no supported family has
    wide: tuple[str, int] = ("", 0)  # pattern of paths shared with a supported family, and their inputs


CROSS_ATTENTION = re.compile(r"\.attn2\.to_[kv]$")
CROSS = CROSS_ATTENTION.pattern
FOREIGN = (
    ForeignModel("Stable Diffusion 2", r"\bsd_v2|stable-diffusion-v2", wide=(CROSS, 1024)),
    ForeignModel("Stable Diffusion XL refiner", r"xl-v1-refiner", wide=(CROSS, 1280)),
    ForeignModel("Stable Diffusion 3", r"\bsd3|stable-diffusion-3", r"^joint_blocks\."),
    ForeignModel("Wan", r"\bwan", r"^blocks\.\d+\.((self|cross)_attn\.[qkvo]$|ffn\.\d)"),
    ForeignModel("HunyuanVideo", r"hunyuan", r"\.(img|txt)_mlp\.fc[12]$|individual_token_refiner"),
    ForeignModel("FramePack", r"framepack"),
    ForeignModel("Lumina Image 2", r"lumina", wide=(r"^layers\.\d+\.attention\.", 2304)),
    ForeignModel("HiDream", r"hidream", r"^(double|single)_stream_blocks\."),
    ForeignModel("LTX-Video", r"\bltx"),
    ForeignModel("Kandinsky 5", r"kandinsky", r"^(visual|text)_transformer_blocks\."),
    ForeignModel("Ideogram 4", r"ideogram"),
)


def foreign_model(base: str, paths: Iterable[str], sizes: Mapping[str, tuple[int, int]]) -> str:
    """Return the title of an unsupported model that an adapter is for; "" without evidence. `base` is from its
    metadata, `sizes` are inputs and outputs of layers by path.
    """
    paths = list(paths)
    for model in FOREIGN:
        if re.search(model.version_pattern, base, re.IGNORECASE) if base else False:
            return model.title
    for model in FOREIGN:
        pattern, inputs = model.wide
        if inputs and any(size[0] == inputs and re.search(pattern, path) for path, size in sizes.items()):
            return model.title
        if model.paths and any(re.search(model.paths, path) for path in paths):
            return model.title
    return ""
