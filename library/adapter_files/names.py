"""Names of LoRA modules: kohya's, those of diffusers and PEFT, and those from ComfyUI's own model tree.

Differences between families are in their lora_names.
"""

import contextlib
import functools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from library import families
from library.adapter_files.foreign import CROSS_ATTENTION, foreign_model
from library.config.problems import ConfigError, either
from library.families.shared.lora_names import LoraNames

FORMATS = ("kohya", "diffusers", "comfy")
DOWN, UP, ALPHA = "down", "up", "alpha"
ROLE_ENDINGS = {
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
# Suffixes of tensors beyond plain LoRA -> their names in a module.
OTHER_ENDINGS = {
    **{
        f".{part}": part
        for part in (
            "lora_mid.weight",
            "dora_scale",
            "hada_w1_a",
            "hada_w1_b",
            "hada_w2_a",
            "hada_w2_b",
            "hada_t1",
            "hada_t2",
            "lokr_w1",
            "lokr_w1_a",
            "lokr_w1_b",
            "lokr_w2",
            "lokr_w2_a",
            "lokr_w2_b",
            "lokr_t2",
            "oft_blocks",
            "rescale",
            "a1.weight",
            "a2.weight",
            "b1.weight",
            "b2.weight",
            "bm.weight",
            "diff",
            "diff_b",
            "w_norm",
            "b_norm",
            "on_input",
        )
    },
    ".lora_magnitude_vector": "dora_scale",
    ".lora_magnitude_vector.weight": "dora_scale",
    ".lora_magnitude_vector.default.weight": "dora_scale",
}
# Suffix after a module's name in kohya's files -> the tensor's name in the module.
TENSOR_ROLES = {
    "lora_down.weight": DOWN,
    "lora_up.weight": UP,
    **{part: part for part in (ALPHA, *OTHER_ENDINGS.values())},
    "weight": "weight",
}
SCALES = ".weight"  # of iA3, recognised by `on_input` in the same module
WRITTEN = {
    "kohya": {DOWN: ".lora_down.weight", UP: ".lora_up.weight", ALPHA: ".alpha"},
    "diffusers": {DOWN: ".lora_A.weight", UP: ".lora_B.weight"},
}
# Tensors of LyCORIS whose sizes multiply to the layer's.
PRODUCT = re.compile(r"(?P<module>.+)\.(?:hada_w1|lokr_w[12]|diff)(?P<half>_[ab])?")
# Prefixes of text encoder names, and the part of such layers in families that adapt none.
TEXT, TEXT_PART = ("lora_te", "text_encoder"), "text encoder"
# Words that contain underscores, longer ones first; every other underscore replaces a dot.
LAYER_WORDS = r"""(?:input|output|down|up|double|single|transformer|single_transformer)_blocks | (?:middle|mid)_block
    | proj_(?:in|out|mlp) | to_(?:q|k|v|out|add_out) | (?:in|out|emb)_layers | skip_connection | linear_[12]
    | conv_(?:in|out|shortcut|norm_out) | time_emb_proj | (?:time|add)_embedding | time_embed | label_emb
    | (?:img|txt)_(?:attn|mlp|mod|in) | (?:time|vector|guidance)_in | final_layer_norm | (?:in|out|final)_layer
    | adaLN_modulation | text_model | self_attn | add_[qkv]_proj | [qkv]_proj | out_proj | text_projection
    | layer_norm\d? | (?:token|position)_embedding | wi_[01] | time_text_embed | ff_context | norm1_context | norm_out
    | (?:timestep|text|guidance|x|context)_embedder | norm_(?:added_)?[qk] | (?:query|key)_norm | [^_]+"""


class ForeignModelError(ConfigError):
    """An adapter of an unsupported model."""


@dataclass(frozen=True, order=True)
class Module:
    """A layer of a model."""

    part: str  # "denoiser", "clip_l", "clip_g", "t5xxl"; or TEXT_PART, whose path is the whole name
    path: str  # "input_blocks.4.1.proj_in", "double_blocks.0.img_attn.qkv", "text_model.encoder.layers.0.mlp.fc1"

    @property
    def kohya(self) -> str:
        """Its name in kohya's files, also used in messages."""
        if self.part == TEXT_PART:
            return self.path
        prefixes = (name.prefixes["kohya"].get(self.part) for name in all_lora_names())
        return next(filter(None, prefixes), f"{self.part}_") + self.path.replace(".", "_")


@functools.cache
def all_lora_names() -> tuple[LoraNames, ...]:
    return tuple(map(lora_names_of, families.FAMILIES))


@functools.cache
def lora_names_of(family: str) -> LoraNames:
    return families.load_object(families.facts_of(family).lora_names)


@functools.cache
def _name_pattern() -> re.Pattern[str]:
    all_words = {word for name in all_lora_names() for word in name.words}
    words = map(re.escape, sorted(all_words, key=lambda word: (-len(word), word)))  # of two, one may begin the other
    alternatives = "".join(f"{word} | " for word in words) + LAYER_WORDS
    return re.compile(f"(?: {alternatives} ) (?=_|$)", re.VERBOSE)  # in_layer is no part of in_layers


def dotted_path(name: str) -> str:
    # Such as "input_blocks_4_1_proj_in" -> "input_blocks.4.1.proj_in".
    return name if "." in name else ".".join(_name_pattern().findall(name))


def split_key(key: str) -> tuple[str, str] | None:
    """A file's key -> (module's name, "down", "up" or "alpha"); None if it is not of a plain LoRA."""
    key = cleaned(key)
    ending = next((ending for ending in ROLE_ENDINGS if key.endswith(ending)), None)
    return (key.removesuffix(ending), ROLE_ENDINGS[ending]) if ending else None


def split_any(key: str, keys: Collection[str] = ()) -> tuple[str, str] | None:
    """A file's key -> (module's name, tensor's name in it), for any kind of adapter; None for other keys. `keys` are
    all keys of the file, by which iA3 is recognised.
    """
    if plain := split_key(key):
        return plain
    clean = cleaned(key)
    ending = max((ending for ending in OTHER_ENDINGS if clean.endswith(ending)), key=len, default="")
    if ending:
        return clean.removesuffix(ending), OTHER_ENDINGS[ending]
    if key.endswith(SCALES) and f"{key.removesuffix(SCALES)}.on_input" in keys:
        return clean.removesuffix(SCALES), "weight"
    return None


def cleaned(key: str) -> str:
    return key.replace("_orig_mod_", "").replace("_orig_mod.", "")


def find_lora_family(
    names: Iterable[str],
    metadata: Mapping[str, str],
    sizes: Mapping[str, tuple[int, int]] | None = None,
    preferred: str = "",
) -> str:
    """Return the family of a file's modules; `preferred` if they and the metadata allow it. Raises ConfigError if it
    is unclear.
    """
    names = list(names)
    possible = possible_families(names, metadata, sizes)
    if preferred in possible and not _names_other(metadata, possible, preferred):
        return preferred
    # Kohya's names follow one tree.
    possible = [family for family in possible if not of_other_tree(names, family)] or possible
    readings = {family: reading for family in possible if (reading := _parse_names(names, family))}
    if len(possible) > 1 and not any(lora_names_of(family).version_word in _base(metadata) for family in possible):
        readings = {
            family: reading for family, reading in readings.items() if not lora_names_of(family).needs_evidence
        } or readings
        if len({*readings.values()}) > 1:
            titles = either([families.facts_of(family).title for family in readings])
            raise ConfigError(
                "its layers may be those of {titles}, and its metadata does not say: add it with "
                "kohya tools metadata FILE --set ss_base_model_version={example} --out NEW",
                titles=titles,
                example=lora_names_of(possible[-1]).version_word,
            )
        return next(iter(readings), possible[0])
    return possible[0]


def _base(metadata: Mapping[str, str]) -> str:
    return f"{metadata.get('ss_base_model_version', '')} {metadata.get('modelspec.architecture', '')}"


def _parse_names(names: Iterable[str], family: str) -> "tuple[Parsed, ...]":
    """Return what names refer to in a family; empty if one is no layer of it."""
    with contextlib.suppress(ConfigError):
        return tuple(parse_name(name, family) for name in names)
    return ()


def possible_families(
    names: Iterable[str], metadata: Mapping[str, str], sizes: Mapping[str, tuple[int, int]] | None = None
) -> list[str]:
    """Return the possible families of a file's modules, most likely first; `sizes` are known inputs and outputs. Raises
    ConfigError if there is none.
    """
    base = _base(metadata)
    names, names_by_family = list(names), dict[str, LoraNames](zip(families.FAMILIES, all_lora_names(), strict=True))
    paths = list(map(_path, names))
    # The longer the word of a version in the metadata, the surer the family.
    version_scores = {family: _version_score(lora_names, base) for family, lora_names in names_by_family.items()}
    if title := foreign_model(
        "" if any(version_scores.values()) else base, paths, {_path(n): s for n, s in (sizes or {}).items()}
    ):
        template = "this is a LoRA for {title}, which is not trained here: LoRAs for {titles} are"
        raise ForeignModelError(template, title=title, titles=families.titles())
    for family, lora_names in names_by_family.items():
        if _is_marked(lora_names, paths):
            return [family]
    for path in paths:
        candidates = [family for family, lora_names in names_by_family.items() if path.startswith(lora_names.trees)]
        candidates = [f for f in candidates if _names_encoder(names_by_family[f], names)] or candidates
        if candidates:  # sizes and metadata decide between families with the same tree
            fitting = [family for family in candidates if _has_sizes(names_by_family[family], sizes or {})]
            return sorted(fitting or candidates, key=lambda family: -version_scores[family])
    for family, lora_names in names_by_family.items():
        if version_scores[family] or _names_encoder(lora_names, names):
            return [family]
    raise ConfigError(
        "the LoRA has no module that tells its model: only those of {titles} are known", titles=families.titles()
    )


def _version_score(lora_names: LoraNames, base: str) -> int:
    """Return how surely the metadata names a family; 0 if it does not."""
    is_other = bool(lora_names.other_version) and lora_names.other_version in base
    return len(lora_names.version_word) if lora_names.version_word in base and not is_other else 0


def _names_other(metadata: Mapping[str, str], possible: Iterable[str], preferred: str) -> bool:
    """Return whether the metadata names another of the possible families."""
    scores = {family: _version_score(lora_names_of(family), _base(metadata)) for family in possible}
    return scores[preferred] < max(scores.values())


def _names_encoder(lora_names: LoraNames, names: Iterable[str]) -> bool:
    """Return whether some modules are of a text encoder that only this family has."""
    return bool(lora_names.encoder_names) and any(name.startswith(lora_names.encoder_names) for name in names)


def _path(name: str) -> str:
    denoisers = (
        prefix for lora_names in all_lora_names() for prefix, part in lora_names.part_of.items() if part == "denoiser"
    )
    return dotted_path(name.removeprefix(next((p for p in denoisers if name.startswith(p)), "")))


def _is_marked(lora_names: LoraNames, paths: Collection[str]) -> bool:
    """Return whether some paths are those of this family alone."""
    marks, absent = (
        bool(pattern) and any(re.search(pattern, path) for path in paths)
        for pattern in (lora_names.marks, lora_names.absent)
    )
    return marks and not absent


def _has_sizes(lora_names: LoraNames, sizes: Mapping[str, tuple[int, int]]) -> bool:
    """Return whether every layer's ratio of outputs to inputs, and the width of text, match this family."""
    for name, (inputs, outputs) in sizes.items():
        path = _path(name)
        if any(path.endswith(end) and outputs != ratio * inputs for end, ratio in lora_names.ratios.items()):
            return False
        if lora_names.cross_attention and CROSS_ATTENTION.search(path) and inputs != lora_names.cross_attention:
            return False
    return True


def module_sizes(shapes: Mapping[str, Iterable[int]]) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the modules of a LoRA, LoHa, LoKr or difference by name, from tensor
    shapes by key.
    """
    sides_by_module: dict[str, dict[str, int]] = {}
    for key, shape in shapes.items():
        parts, sides = split_key(key), list(shape)
        if parts and len(sides) > 1:
            sides_by_module.setdefault(parts[0], {})[parts[1]] = sides[0] if parts[1] == UP else sides[1]
        elif (product := PRODUCT.fullmatch(key)) and len(sides) > 1:
            # One of two matrices, or one that is itself a product.
            module_sides = sides_by_module.setdefault(product["module"], {UP: 1, DOWN: 1})
            module_sides[UP] *= 1 if product["half"] == "_b" else sides[0]
            module_sides[DOWN] *= 1 if product["half"] == "_a" else sides[1]
    return {
        name: (module_sides[DOWN], module_sides[UP])
        for name, module_sides in sides_by_module.items()
        if {DOWN, UP} <= module_sides.keys()
    }


def of_other_tree(keys: Iterable[str], family: str) -> bool:
    """Return whether names like kohya's belong to another tree than ours, or to another trainer."""
    elsewhere = lora_names_of(family).elsewhere
    prefixes = {
        prefix
        for lora_names in all_lora_names()
        for prefix, part in lora_names.other_prefixes.items()
        if part == "denoiser"
    }
    kohya_prefixes = tuple(prefix for prefix in prefixes if prefix.startswith("lora_"))
    return any(key.startswith(kohya_prefixes) or (elsewhere and re.search(elsewhere, key)) for key in keys)


def kohya_key(key: str) -> str:
    """Convert a key of any adapter kind, under a dotted path of ComfyUI, diffusers or LyCORIS, to kohya's name."""
    if key.startswith("lycoris_"):
        return f"lora_unet_{key.removeprefix('lycoris_')}"
    match = re.fullmatch(r"(?:diffusion_model\.|(?=transformer_blocks\.))(.+?)\.(\w+\.weight|[a-z]\w*)", key)
    return f"lora_unet_{match[1].replace('.', '_')}.{match[2]}" if match else key


class Parsed(NamedTuple):
    """What a name in a file refers to."""

    module: Module
    piece: int  # index of the row slice
    pieces: int  # number of row slices
    is_swapped: bool  # whether the halves of its rows are swapped


def parse_name(name: str, family: str) -> Parsed:
    """Return what a name in any format refers to. Raises ConfigError for an unknown one."""
    lora_names = lora_names_of(family)
    part_by_prefix = lora_names.part_of
    prefix = max((prefix for prefix in part_by_prefix if name.startswith(prefix)), key=len, default="")
    part, path_in_file = part_by_prefix.get(prefix, "denoiser"), dotted_path(name.removeprefix(prefix))
    if not prefix and name.startswith(TEXT):
        return Parsed(Module(TEXT_PART, name), 0, 1, False)
    if not prefix and not path_in_file.startswith(tuple(tree for other in all_lora_names() for tree in other.trees)):
        raise ConfigError(
            "{name} is not a module of {title} in any known naming", name=name, title=families.facts_of(family).title
        )
    path, piece, pieces = lora_names.canonical(path_in_file) if part == "denoiser" else (path_in_file, 0, 1)
    swapped = part == "denoiser" and path != path_in_file and lora_names.has_swapped_halves(path)
    return Parsed(Module(part, path), piece, pieces, swapped)


def endings(family: str, style: str) -> dict[str, str]:
    """Return the suffixes of a plain LoRA's keys in a format."""
    if style != "comfy":
        return dict(WRITTEN[style])
    shared = lora_names_of(family).shared
    suffixes = WRITTEN["diffusers" if shared.is_peft else "kohya"] | {ALPHA: ".alpha"}
    return suffixes if shared.has_alphas else {part: suffixes[part] for part in (DOWN, UP)}


def spelled(module: Module, family: str, style: str) -> tuple[str, ...]:
    """Return the names of a plain LoRA's module in a format: its slices there, in the order of rows."""
    if module.part == TEXT_PART:
        return (module.path,)
    lora_names = lora_names_of(family)
    tree = lora_names.shared.names if style == "comfy" else style
    prefix = lora_names.shared_prefix(module.part) if style == "comfy" else lora_names.prefixes[style][module.part]
    if tree == "kohya":
        return (prefix + module.path.replace(".", "_"),)
    paths = lora_names.pieces(module.path) if tree == "diffusers" and module.part == "denoiser" else (module.path,)
    if not paths:
        raise ConfigError("{module} has no name in diffusers: leave it out, or use another format", module=module.kohya)
    return tuple(prefix + path for path in paths)


def whole_name(module: Module, family: str, style: str) -> str:
    """Return the name of an unsplittable module, in kohya's or ComfyUI's own tree."""
    if module.part == TEXT_PART:
        return module.path
    lora_names = lora_names_of(family)
    if style == "kohya" or lora_names.shared.names == "kohya":
        return lora_names.prefixes["kohya"][module.part] + module.path.replace(".", "_")
    return lora_names.prefixes["comfy"][module.part] + module.path
