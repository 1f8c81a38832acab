"""Names of LoRA modules: kohya's, those of diffusers and PEFT, and those that ComfyUI takes from its own model tree.

What differs between families stands in their lora_names.
"""

import contextlib
import functools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from library import families
from library.adapter_files.foreign import foreign_model
from library.config.problems import ConfigError, either
from library.families.shared.lora_names import LoraNames

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
# Endings of tensors that a plain LoRA has not -> what they are called in a module.
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
PARTS = {
    "lora_down.weight": DOWN,
    "lora_up.weight": UP,
    **{part: part for part in (ALPHA, *OTHER_ENDINGS.values())},
    "weight": "weight",
}  # what follows a module's name in kohya's files -> what the tensor is called in it
SCALES = ".weight"  # of iA3, where the module has `on_input` besides
WRITTEN = {
    "kohya": {DOWN: ".lora_down.weight", UP: ".lora_up.weight", ALPHA: ".alpha"},
    "diffusers": {DOWN: ".lora_A.weight", UP: ".lora_B.weight"},
}
# Tensors of LyCORIS whose sides, multiplied, are those of the layer.
PRODUCT = re.compile(r"(?P<module>.+)\.(?:hada_w1|lokr_w[12]|diff)(?P<half>_[ab])?")
# Beginnings of names of text encoders, and the part that such layers are of where their family adapts none.
TEXT, TEXT_PART = ("lora_te", "text_encoder"), "text encoder"
# Words with underscores of their own, the longer of two before the shorter; every other underscore was a dot.
WORDS = r"""(?:input|output|down|up|double|single|transformer|single_transformer)_blocks | (?:middle|mid)_block
    | proj_(?:in|out|mlp) | to_(?:q|k|v|out|add_out) | (?:in|out|emb)_layers | skip_connection | linear_[12]
    | conv_(?:in|out|shortcut|norm_out) | time_emb_proj | (?:time|add)_embedding | time_embed | label_emb
    | (?:img|txt)_(?:attn|mlp|mod|in) | (?:time|vector|guidance)_in | final_layer_norm | (?:in|out|final)_layer
    | adaLN_modulation | text_model | self_attn | add_[qkv]_proj | [qkv]_proj | out_proj | text_projection
    | layer_norm\d? | (?:token|position)_embedding | wi_[01] | time_text_embed | ff_context | norm1_context | norm_out
    | (?:timestep|text|guidance|x|context)_embedder | norm_(?:added_)?[qk] | (?:query|key)_norm | [^_]+"""


class ForeignModelError(ConfigError):
    """An adapter of a model that is not trained here."""


@dataclass(frozen=True, order=True)
class Module:
    """A layer of a model."""

    part: str  # "denoiser", "clip_l", "clip_g", "t5xxl"; or TEXT_PART, whose path is the whole name
    path: str  # "input_blocks.4.1.proj_in", "double_blocks.0.img_attn.qkv", "text_model.encoder.layers.0.mlp.fc1"

    @property
    def kohya(self) -> str:
        """Its name in kohya's files, by which it is called in messages too."""
        if self.part == TEXT_PART:
            return self.path
        prefixes = (known.prefixes["kohya"].get(self.part) for known in every())
        return next(filter(None, prefixes), f"{self.part}_") + self.path.replace(".", "_")


@functools.cache
def every() -> tuple[LoraNames, ...]:
    """The names of all families, in the order of the registry."""
    return tuple(map(names_of, families.FAMILIES))


@functools.cache
def names_of(family: str) -> LoraNames:
    """The names of one family."""
    return families.load(families.facts(family).lora_names)


@functools.cache
def _words() -> re.Pattern[str]:
    own = [re.escape(word) for known in every() for word in known.words]
    return re.compile("".join(f"{word} | " for word in own) + WORDS, re.VERBOSE)


def dotted(name: str) -> str:
    """ "input_blocks_4_1_proj_in" -> "input_blocks.4.1.proj_in"; a name with dots is left as it is."""
    return name if "." in name else ".".join(_words().findall(name))


def split(key: str) -> tuple[str, str] | None:
    """A file's key -> (module's name, "down", "up" or "alpha"); None for what is no part of a plain LoRA."""
    key = cleaned(key)
    ending = next((ending for ending in ENDINGS if key.endswith(ending)), None)
    return (key.removesuffix(ending), ENDINGS[ending]) if ending else None


def split_any(key: str, keys: Collection[str] = ()) -> tuple[str, str] | None:
    """A file's key -> (module's name, what the tensor is in it), of any kind of adapter; None for what is no part of
    one. `keys` are all of the file, by which iA3 is recognised."""
    if found := split(key):
        return found
    clean = cleaned(key)
    ending = max((ending for ending in OTHER_ENDINGS if clean.endswith(ending)), key=len, default="")
    if ending:
        return clean.removesuffix(ending), OTHER_ENDINGS[ending]
    if key.endswith(SCALES) and f"{key.removesuffix(SCALES)}.on_input" in keys:
        return clean.removesuffix(SCALES), "weight"
    return None


def cleaned(key: str) -> str:
    """A key without what compiled models leave in names."""
    return key.replace("_orig_mod_", "").replace("_orig_mod.", "")


def family_of(
    names: Iterable[str],
    metadata: Mapping[str, str],
    sizes: Mapping[str, tuple[int, int]] | None = None,
    wanted: str = "",
) -> str:
    """The family that the modules of a file are of; `wanted` where they may be of that one. Raises ConfigError when it
    cannot be told."""
    names = list(names)
    found = possible_families(names, metadata, sizes)
    if wanted in found:
        return wanted
    found = [family for family in found if not of_other_tree(names, family)] or found  # kohya's names are of one tree
    readings = {family: reading for family in found if (reading := _reading(names, family))}
    if len(found) > 1 and not any(names_of(family).version_word in _base(metadata) for family in found):
        if len({*readings.values()}) > 1:
            titles = either([families.facts(family).title for family in readings])
            raise ConfigError(
                "its layers may be those of {titles}, and its metadata does not say: add it with "
                "kohya tools metadata FILE --set ss_base_model_version={example} --out NEW",
                titles=titles,
                example=names_of(found[-1]).version_word,
            )
        return next(iter(readings), found[0])
    return found[0]


def _base(metadata: Mapping[str, str]) -> str:
    return f"{metadata.get('ss_base_model_version', '')} {metadata.get('modelspec.architecture', '')}"


def _reading(names: Iterable[str], family: str) -> "tuple[Parsed, ...]":
    """What names stand for in a family; nothing where one is no layer of it."""
    with contextlib.suppress(ConfigError):
        return tuple(parsed(name, family) for name in names)
    return ()


def possible_families(
    names: Iterable[str], metadata: Mapping[str, str], sizes: Mapping[str, tuple[int, int]] | None = None
) -> list[str]:
    """The families that the modules of a file may be of, the likeliest first; `sizes` are inputs and outputs of those
    that are known. Raises ConfigError when none can be told."""
    base = _base(metadata)
    names, known = list(names), dict[str, LoraNames](zip(families.FAMILIES, every(), strict=True))
    paths = list(map(_path, names))
    said = {family: len(own.version_word) if own.version_word in base else 0 for family, own in known.items()}
    if title := foreign_model(
        "" if any(said.values()) else base, paths, {_path(n): s for n, s in (sizes or {}).items()}
    ):
        template = "this is a LoRA for {title}, which is no model that is trained here: those of {titles} are"
        raise ForeignModelError(template, title=title, titles=families.titles())
    for family, own in known.items():
        if own.marks and any(re.search(own.marks, path) for path in paths):
            return [family]
    for path in paths:
        found = [family for family, own in known.items() if path.startswith(own.trees)]
        if found:  # of several that share a tree, sizes and the metadata decide
            fitting = [family for family in found if _has_sizes(known[family], sizes or {})]
            return sorted(fitting or found, key=lambda family: -said[family])
    for family, own in known.items():
        if said[family] or any(name.startswith(own.encoder_names) for name in names if own.encoder_names):
            return [family]
    raise ConfigError(
        "the LoRA has no module that tells its model: only those of {titles} are known", titles=families.titles()
    )


def _path(name: str) -> str:
    denoisers = (prefix for own in every() for prefix, part in own.part_of.items() if part == "denoiser")
    return dotted(name.removeprefix(next((p for p in denoisers if name.startswith(p)), "")))


def _has_sizes(own: LoraNames, sizes: Mapping[str, tuple[int, int]]) -> bool:
    """Whether no layer has another number of outputs for each of its inputs than in this family."""
    for name, (inputs, outputs) in sizes.items():
        path = _path(name)
        if any(path.endswith(end) and outputs != ratio * inputs for end, ratio in own.ratios.items()):
            return False
    return True


def sizes_of(shapes: Mapping[str, Iterable[int]]) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the modules of a LoRA, LoHa, LoKr or difference, by name, from the shapes of its tensors by
    key."""
    found: dict[str, dict[str, int]] = {}
    for key, shape in shapes.items():
        parts, sides = split(key), list(shape)
        if parts and len(sides) > 1:
            found.setdefault(parts[0], {})[parts[1]] = sides[0] if parts[1] == UP else sides[1]
        elif (product := PRODUCT.fullmatch(key)) and len(sides) > 1:  # of two matrices, or of one made of two
            one = found.setdefault(product["module"], {UP: 1, DOWN: 1})
            one[UP] *= 1 if product["half"] == "_b" else sides[0]
            one[DOWN] *= 1 if product["half"] == "_a" else sides[1]
    return {name: (one[DOWN], one[UP]) for name, one in found.items() if {DOWN, UP} <= one.keys()}


def of_other_tree(keys: Iterable[str], family: str) -> bool:
    """Whether names in a file that look like kohya's are those of another tree than the one that is trained here, or of
    another trainer."""
    patterns = [own.elsewhere for own in (names_of(family),) if own.elsewhere]
    known = {prefix for own in every() for prefix, part in own.other_prefixes.items() if part == "denoiser"}
    others = tuple(prefix for prefix in known if prefix.startswith("lora_"))
    return any(key.startswith(others) or any(re.search(pattern, key) for pattern in patterns) for key in keys)


def kohya_key(key: str) -> str:
    """A key of an adapter of any kind, under a dotted path of ComfyUI's or LyCORIS' own name -> kohya's name of it."""
    if key.startswith("lycoris_"):
        return f"lora_unet_{key.removeprefix('lycoris_')}"
    found = re.fullmatch(r"diffusion_model\.(.+?)\.(\w+\.weight|[a-z]\w*)", key)
    return f"lora_unet_{found[1].replace('.', '_')}.{found[2]}" if found else key


class Parsed(NamedTuple):
    """What a name in a file stands for."""

    module: Module
    piece: int  # which of the pieces of its rows
    pieces: int  # of how many
    is_swapped: bool  # whether the halves of its rows are the other way round


def parsed(name: str, family: str) -> Parsed:
    """What a name in any format stands for. Raises ConfigError for one that is not known."""
    own = names_of(family)
    known = own.part_of
    prefix = max((prefix for prefix in known if name.startswith(prefix)), key=len, default="")
    part, written = known.get(prefix, "denoiser"), dotted(name.removeprefix(prefix))
    if not prefix and name.startswith(TEXT):
        return Parsed(Module(TEXT_PART, name), 0, 1, False)
    if not prefix and not written.startswith(tuple(tree for other in every() for tree in other.trees)):
        raise ConfigError(
            "{name} is no module of {title} in any known naming", name=name, title=families.facts(family).title
        )
    path, piece, pieces = own.canonical(written) if part == "denoiser" else (written, 0, 1)
    swapped = part == "denoiser" and path != written and own.has_swapped_halves(path)
    return Parsed(Module(part, path), piece, pieces, swapped)


def endings(family: str, style: str) -> dict[str, str]:
    """The endings of a plain LoRA's keys in a format."""
    if style != "comfy":
        return WRITTEN[style]
    shared = names_of(family).shared
    made = WRITTEN["diffusers" if shared.is_peft else "kohya"] | {ALPHA: ".alpha"}
    return made if shared.has_alphas else {part: made[part] for part in (DOWN, UP)}


def spelled(module: Module, family: str, style: str) -> tuple[str, ...]:
    """The names of a plain LoRA's module in a format: of the pieces that it is made of there, in the order of its
    rows."""
    if module.part == TEXT_PART:
        return (module.path,)
    own = names_of(family)
    tree = own.shared.names if style == "comfy" else style
    prefix = own.shared_prefix(module.part) if style == "comfy" else own.prefixes[style][module.part]
    if tree == "kohya":
        return (prefix + module.path.replace(".", "_"),)
    paths = own.pieces(module.path) if tree == "diffusers" and module.part == "denoiser" else (module.path,)
    if not paths:
        raise ConfigError("{module} has no name in diffusers: leave it out, or use another format", module=module.kohya)
    return tuple(prefix + path for path in paths)


def whole_name(module: Module, family: str, style: str) -> str:
    """The name of a module that cannot be taken apart, in kohya's or ComfyUI's own tree."""
    if module.part == TEXT_PART:
        return module.path
    own = names_of(family)
    if style == "kohya" or own.shared.names == "kohya":
        return own.prefixes["kohya"][module.part] + module.path.replace(".", "_")
    return own.prefixes["comfy"][module.part] + module.path
