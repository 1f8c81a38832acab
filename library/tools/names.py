"""Names of LoRA modules: kohya's, those of diffusers and PEFT, and those that ComfyUI takes from its own model tree.

Inside the tools a module is (part, path): the part of the model, and the path in the single file's tree (LDM for SDXL,
BFL for FLUX.1, transformers for the text encoders).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from library.config.schema import ConfigError
from library.families.flux import keys as flux
from library.families.sdxl import keys as sdxl
from library.families.shared.weights import inverse, renamed

FORMATS = ("kohya", "diffusers", "comfy")
DOWN, UP, ALPHA = "down", "up", "alpha"
ENDINGS = {
    ".lora_down.weight": DOWN,
    ".lora_up.weight": UP,
    ".lora_A.weight": DOWN,
    ".lora_B.weight": UP,
    ".lora_A.default.weight": DOWN,
    ".lora_B.default.weight": UP,
    ".lora.down.weight": DOWN,
    ".lora.up.weight": UP,
    ".lora_linear_layer.down.weight": DOWN,
    ".lora_linear_layer.up.weight": UP,
    ".alpha": ALPHA,
}
WRITTEN = {
    "kohya": {DOWN: ".lora_down.weight", UP: ".lora_up.weight", ALPHA: ".alpha"},
    "diffusers": {DOWN: ".lora_A.weight", UP: ".lora_B.weight"},
    "comfy": {DOWN: ".lora_down.weight", UP: ".lora_up.weight", ALPHA: ".alpha"},
}
# Part -> prefix, by family and format.
PREFIXES = {
    "sdxl": {
        "kohya": {"denoiser": "lora_unet_", "clip_l": "lora_te1_", "clip_g": "lora_te2_"},
        "diffusers": {"denoiser": "unet.", "clip_l": "text_encoder.", "clip_g": "text_encoder_2."},
        "comfy": {
            "denoiser": "diffusion_model.",
            "clip_l": "text_encoders.clip_l.transformer.",
            "clip_g": "text_encoders.clip_g.transformer.",
        },
    },
    "flux": {
        "kohya": {"denoiser": "lora_unet_", "clip_l": "lora_te1_", "t5xxl": "lora_te3_"},
        "diffusers": {"denoiser": "transformer.", "clip_l": "text_encoder.", "t5xxl": "text_encoder_2."},
        "comfy": {
            "denoiser": "diffusion_model.",
            "clip_l": "text_encoders.clip_l.transformer.",
            "t5xxl": "text_encoders.t5xxl.transformer.",
        },
    },
}
ALSO = {  # other prefixes in files that people have
    "sdxl": {"lora_te_": "clip_l", "base_model.model.": "denoiser"},
    "flux": {
        "lora_te_": "clip_l",
        "lora_te2_": "t5xxl",
        "lora_transformer_": "denoiser",
        "base_model.model.": "denoiser",
    },
}
SDXL_TREES = ("input_blocks.", "middle_block.", "output_blocks.", "down_blocks.", "mid_block.", "up_blocks.")
SDXL_DIFFUSERS = (
    "down_blocks.",
    "mid_block.",
    "up_blocks.",
    "conv_in",
    "conv_out",
    "time_embedding.",
    "add_embedding.",
)
FLUX_DIFFUSERS = ("transformer_blocks.", "single_transformer_blocks.")
FLUX_TREES = ("double_blocks.", "single_blocks.", *FLUX_DIFFUSERS)
# Words with underscores of their own, the longer of two before the shorter; every other underscore was a dot.
WORDS = re.compile(
    r"""(?:input|output|down|up|double|single|transformer|single_transformer)_blocks | (?:middle|mid)_block
    | proj_(?:in|out|mlp) | to_(?:q|k|v|out|add_out) | (?:in|out|emb)_layers | skip_connection | linear_[12]
    | conv_(?:in|out|shortcut|norm_out) | time_emb_proj | (?:time|add)_embedding | time_embed | label_emb
    | (?:img|txt)_(?:attn|mlp|mod|in) | (?:time|vector|guidance)_in | final_layer_norm | (?:in|out|final)_layer
    | adaLN_modulation | text_model | self_attn | add_[qkv]_proj | [qkv]_proj | out_proj | text_projection
    | layer_norm\d? | (?:token|position)_embedding | wi_[01] | time_text_embed | ff_context | norm1_context | norm_out
    | (?:timestep|text|guidance|x|context)_embedder | norm_(?:added_)?[qk] | (?:query|key)_norm | [^_]+""",
    re.VERBOSE,
)


@dataclass(frozen=True, order=True)
class Module:
    """A layer of a model."""

    part: str  # "denoiser", "clip_l", "clip_g", "t5xxl"
    path: str  # "input_blocks.4.1.proj_in", "double_blocks.0.img_attn.qkv", "text_model.encoder.layers.0.mlp.fc1"

    @property
    def kohya(self) -> str:
        """Its name in kohya's files, by which it is called in messages too."""
        prefixes = PREFIXES["sdxl"]["kohya"] | PREFIXES["flux"]["kohya"]
        return prefixes[self.part] + self.path.replace(".", "_")


def dotted(name: str) -> str:
    """ "input_blocks_4_1_proj_in" -> "input_blocks.4.1.proj_in"; a name with dots is left as it is."""
    return name if "." in name else ".".join(WORDS.findall(name))


def split(key: str) -> tuple[str, str] | None:
    """A file's key -> (module's name, "down", "up" or "alpha"); None for what is no part of a plain LoRA."""
    key = key.replace("_orig_mod_", "").replace("_orig_mod.", "")
    ending = next((ending for ending in ENDINGS if key.endswith(ending)), None)
    return (key.removesuffix(ending), ENDINGS[ending]) if ending else None


def family_of(names: Iterable[str], metadata: Mapping[str, str]) -> str:
    """Which family the modules of a file are of. Raises ConfigError when it cannot be told."""
    base = f"{metadata.get('ss_base_model_version', '')} {metadata.get('modelspec.architecture', '')}"
    names = list(names)
    for name in names:
        path = dotted(_bare(name))
        if path.startswith(FLUX_TREES):
            return "flux"
        if path.startswith(SDXL_TREES):
            return "sdxl"
    for family, word in (("flux", "flux"), ("sdxl", "xl")):
        if word in base:
            return family
    if any(name.startswith(("lora_te2_text_model", "text_encoder_2.text_model")) for name in names):
        return "sdxl"
    if any(name.startswith("lora_te3_") for name in names):
        return "flux"
    raise ConfigError("the LoRA has no module by which SDXL or FLUX.1 could be told: only those two are supported")


def _bare(name: str) -> str:
    for prefix in ("lora_unet_", "lora_transformer_", "unet.", "transformer.", "diffusion_model.", "base_model.model."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def parsed(name: str, family: str) -> tuple[str, str]:
    """A module's name in any format -> (part, path); FLUX's path may still be diffusers'. ConfigError if unknown."""
    known = {prefix: part for table in PREFIXES[family].values() for part, prefix in table.items()} | ALSO[family]
    for prefix in sorted(known, key=len, reverse=True):
        if name.startswith(prefix):
            part, path = known[prefix], dotted(name.removeprefix(prefix))
            break
    else:
        part, path = "denoiser", dotted(name)
        if not path.startswith((*SDXL_TREES, *FLUX_TREES)):
            raise ConfigError(f"{name} is no module of {'SDXL' if family == 'sdxl' else 'FLUX.1'} in any known naming")
    if part == "denoiser" and family == "sdxl" and path.startswith(SDXL_DIFFUSERS):
        path = renamed(path, sdxl.unet_table(sdxl.Layout()))
    return part, path


def spelled(module: Module, family: str, style: str) -> str:
    """A module's name in a format; FLUX modules in diffusers' names are made by `pieces` first."""
    path = module.path
    if style == "diffusers" and family == "sdxl" and module.part == "denoiser":
        path = renamed(path, inverse(sdxl.unet_table(sdxl.Layout())))
    name = PREFIXES[family][style][module.part]
    return name + (path.replace(".", "_") if style == "kohya" else path)


def pieces(module: Module) -> tuple[str, ...]:
    """A FLUX module (BFL) -> the diffusers modules that it is made of, in the order of its rows."""
    if module.path in flux.OUTSIDE:
        return flux.OUTSIDE[module.path]
    kind, number, inner = module.path.split(".", 2)
    table, blocks = {
        "double_blocks": (flux.DOUBLE, "transformer_blocks"),
        "single_blocks": (flux.SINGLE, "single_transformer_blocks"),
    }.get(kind, ({}, ""))
    if inner not in table:
        raise ConfigError(f"{module.kohya} has no name in diffusers: leave it out, or use another format")
    return tuple(f"{blocks}.{number}.{name}" for name in table[inner])


def whole(path: str) -> tuple[str, int, int]:
    """A diffusers FLUX path -> (BFL path, which of its pieces, of how many). A BFL path is the one piece of itself."""
    for bfl, made_of in flux.OUTSIDE.items():
        if path in made_of:
            return bfl, 0, 1
    if not path.startswith(FLUX_DIFFUSERS):
        return path, 0, 1
    kind, number, inner = path.split(".", 2)
    table, blocks = (flux.DOUBLE, "double_blocks") if kind == "transformer_blocks" else (flux.SINGLE, "single_blocks")
    for bfl, made_of in table.items():
        if inner in made_of:
            return f"{blocks}.{number}.{bfl}", made_of.index(inner), len(made_of)
    raise ConfigError(f"{path} is no layer of FLUX.1 that can carry a LoRA")
