"""What importers share: tables of other programs' keys, dotted keys, number formats, optimizers, dataset files."""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

from library.config.formats import toml_value
from library.config.json_types import JsonMapping, JsonObject, JsonValue
from library.config.problems import Text
from library.config.sections.learning import OptimizerName
from library.importers.builder import NOT_HERE, ImportBuilder, KeyOutcome, is_empty, to_number

FULL = {"fp32", "float32", "float_32", "float", "no"}
ONLY = "this trainer trains LoRA and whole models of SDXL, FLUX.1, FLUX.2, Qwen-Image, Z-Image and Anima"
# Blocks that a share means (double blocks of FLUX, and pairs of single ones), and how many may wait in host memory.
BLOCKS = {"flux": (38, 35), "flux_2": (20, 19), "qwen_image": (60, 59), "zimage": (30, 29), "anima": (28, 26)}
ENCODED_ONCE = "captions are encoded once, before the training (cache_text_encoder_outputs)"
LEAST_SIDE = 256  # of buckets, where nothing is said
EDIT = r"(?<![a-z])edit(?![a-z])(?:[ _-]?plus)?(?:[ _:-]*(2509|2511))?"
# The options that name a model's networks beside its transformer.
PART_OPTIONS = {
    "flux": ("clip_l", "t5xxl", "ae"),
    "flux_2": ("text_encoder", "vae"),
    "qwen_image": ("text_encoder", "vae"),
    "zimage": ("text_encoder", "vae"),
    "anima": ("qwen3", "vae"),
}
PREPARED = "it is said in the dataset file that is written beside the config"
# Parts of a path that tell nothing of the model: sub-folders and files of diffusers and of the Hugging Face cache.
NO_NAME = re.compile(r"transformer|snapshots|[0-9a-f]{40}|(diffusion_pytorch_)?model(-\d+-of-\d+)?\.safetensors|")


@cache
def load_tables(program: str) -> JsonObject:
    """The tables of a program's keys, tables/PROGRAM.toml. `ignored` is key -> the reason why it means nothing here."""
    found = tomllib.loads((Path(__file__).parent / "tables" / f"{program}.toml").read_text(encoding="utf-8"))
    reasons = {key: group["reason"] for group in found.get("ignored", ()) for key in group["keys"]}
    return {**found, "ignored": reasons}


def dotted(found: JsonMapping, before: str = "") -> JsonObject:
    """Tables in tables -> keys with dots. Lists stay as they are."""
    flat: JsonObject = {}
    for key, value in found.items():
        if isinstance(value, Mapping) and value:
            flat |= dotted(value, f"{before}{key}.")
        else:
            flat[f"{before}{key}"] = value
    return flat


def chooses_chroma(builder: ImportBuilder, key: str) -> None:
    """A key that says that the model is Chroma, read after all others: what sd-scripts asks for with it."""
    template = "chooses the script: {script} with model_type = chroma, which masks T5's padding and takes no guidance"
    said = Text(template, script=builder.script)
    values = {"model_type": "chroma", "apply_t5_attn_mask": True, "guidance_scale": 0.0}
    builder.change(key, said, values)


def own_name(path: object) -> str:
    """What a model is called by its path or id, in small letters, without the folders that it lies in."""
    parts = [part for part in re.split(r"[/\\]", str(path or "").casefold()) if not NO_NAME.fullmatch(part)]
    return parts[-1] if parts else ""


def chooses_version(builder: ImportBuilder, key: str, words: str) -> None:
    """Which model of several whose files look alike is meant, by its words. De-Turbo is trained like the base."""
    if builder.family in ("zimage", "flux_2"):
        if builder.family == "zimage":
            version = "turbo" if "turbo" in words and not re.search("de-?_?turbo", words) else "base"
        elif "klein" in words:
            version = f"klein-{'base-' * ('base' in words)}{'9b' if '9b' in words else '4b'}"
        else:
            version = "dev"
        template = "chooses the script: {script}, and model_version = {version} by the model's name"
        said = Text(template, script=builder.script, version=version)
        builder.change(key, said, {"model_version": version})


def chooses_edit(builder: ImportBuilder, key: str, words: str) -> None:
    """Which Qwen-Image-Edit a model is, by the words for it; the original is left to its files."""
    if builder.family == "qwen_image" and (found := re.search(EDIT, words)):
        version = f"edit-{found[1]}" if found[1] else "edit-2509" if "plus" in found[0] else "edit"
        template = (
            "chooses the script: {script}, and model_version = {version} by the model's name, with captions that are "
            "encoded once"
        )
        said = Text(template, script=builder.script, version=version)
        builder.change(key, said, {"model_version": version, "cache_text_encoder_outputs": True})


def varied(builder: ImportBuilder) -> tuple[str, ...]:
    """Options that change captions from step to step, and cannot be with captions that are encoded once."""
    names = ("shuffle_caption", "caption_tag_dropout_rate", "caption_dropout_rate")
    return names[:2] if builder.family == "anima" else names


def guidance_flag(builder: ImportBuilder, chroma: bool) -> str:
    """The flag in prompts for another trainer's one scale: of the guidance that a model reads, or else of the negative
    prompt."""
    reads = {"flux": not chroma, "flux_2": builder.values.get("model_version") == "dev"}
    return "--g" if reads.get(builder.family) else "--l"


def guidance(builder: ImportBuilder, scale: JsonValue) -> JsonValue:
    """Another trainer's scale as a prompt has it here. Of Z-Image, whose own scale is 0 without a negative prompt, the
    others count from 1, too."""
    number = to_number(scale)
    return scale if builder.family != "zimage" or number is None else f"{max(0.0, number - 1.0):g}"


def tables(value: JsonValue) -> list[JsonMapping]:
    """The tables of a list; none where it is no list of tables."""
    return [table for table in value if isinstance(table, Mapping)] if isinstance(value, list) else []


def take(builder: ImportBuilder, names: Mapping[str, str], read: Callable[[Any], Any] = lambda value: value) -> None:
    """Keys that are options, of the same or another name."""
    for key, option in names.items():
        if (value := builder.get(key)) is not None:
            if key == option:
                builder.keep(key, read(value))
            else:
                builder.rename(key, option, read(value))


def rest(builder: ImportBuilder, reasons: Mapping[str, str], otherwise: str = NOT_HERE) -> None:
    """Ignore all remaining keys; reasons by key, or by a prefix of keys that ends with a dot."""
    for key in builder.left():
        starts = (why for start, why in reasons.items() if start.endswith(".") and key.startswith(start))
        builder.ignore(key, reasons.get(key) or next(starts, otherwise))


def set_by(builder: ImportBuilder, key: str, text: str, values: JsonMapping) -> None:
    """Values that follow from the trainer itself, or from a key that is not in the file."""
    if key in builder.source:
        builder.change(key, text, values)
    else:
        for option, value in values.items():
            builder.values[option], builder.keys[option] = value, key
        builder.outcomes.setdefault(key, KeyOutcome(key, "changed", text))


def precision(value: JsonValue, full: str = "no") -> str:
    """A name of a number format -> ours; what is no 16-bit format is `full`."""
    word = str(value).casefold()
    half = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}.get(word.replace("_", ""))
    return half or (full if word in FULL else str(value))


def plain(name: object) -> str:
    """The name in small letters, without signs: ADAMW_8BIT and adamw8bit are the same."""
    return "".join(letter for letter in str(name).casefold() if letter.isalnum())


def equal(theirs: object, ours: str) -> Text:
    """What something of another trainer is here."""
    return Text("{theirs} is {ours} here", theirs=theirs, ours=ours)


def nearest(theirs: object, ours: str) -> Text:
    """What is taken for something of another trainer that is not offered here."""
    return Text("{theirs} is not offered here; the nearest is {ours}", theirs=theirs, ours=ours)


def optimizer(name: object) -> tuple[str, str]:
    """The optimizer here, and a sentence where it is not the same: ("AdamW8bit", "")."""
    tables, word = load_tables("optimizers"), plain(name)
    known = tables["same"].get(tables["nearest"].get(word, word))
    if known is None:
        return str(name), ""
    here = next(choice for choice in known if choice in get_args(OptimizerName) or choice == known[-1])
    return here, nearest(name, here) if word in tables["nearest"] else ""


def split_path(path: str) -> tuple[str, str]:
    """A path of any system -> its folder and the file's name without an ending."""
    at = max(path.rfind("/"), path.rfind("\\"))
    name = path[at + 1 :]
    return path[: max(at, 0)] or ".", name.rpartition(".")[0] or name


def dataset_toml(general: JsonMapping, sets: Iterable[tuple[JsonMapping, list[JsonObject]]]) -> str:
    """A dataset file: what all share, and each dataset with its subsets."""
    blocks = [_table("[general]", general)] if general else []
    for own, subsets in sets:
        all_of_it = {**general, **own}
        limits = {} if all_of_it.get("bucket_no_upscale") else small_buckets(all_of_it.get("resolution"))
        blocks.append(_table("[[datasets]]", limits | {**own}))
        blocks += [_table("[[datasets.subsets]]", subset) for subset in subsets]
    return "\n\n".join(blocks) + "\n"


def small_buckets(resolution: JsonValue) -> JsonObject:
    """The limit of buckets for images that are smaller than the usual limit, which the other trainers do not have."""
    sides = resolution if isinstance(resolution, list | tuple) else [resolution]
    least = min((int(side) for side in map(to_number, sides) if side), default=LEAST_SIDE)
    return {"min_bucket_reso": max(64, least // 64 * 64)} if least < LEAST_SIDE else {}


def _table(head: str, members: JsonMapping) -> str:
    return "\n".join([head, *(f"{key} = {toml_value(value)}" for key, value in members.items() if not is_empty(value))])
