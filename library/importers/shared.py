"""Shared parts of importers: tables of other programs' keys, dotted keys, dtypes, optimizers, dataset files."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import get_args

from library import families
from library.config.formats import toml_value
from library.config.json_types import JsonMapping, JsonObject, JsonValue
from library.config.problems import (
    ConfigError,
    Message,
    MessageLike,
    Problem,
    join_messages,
    ngettext,
    option_name,
    option_names,
)
from library.config.reading import parse_resolution
from library.config.sections.learning import OptimizerName
from library.config.values import quoted
from library.families.facts import ImportedModel
from library.importers.builder import ImportBuilder, is_empty, to_number

FULL_PRECISION_WORDS = {"fp32", "float32", "float_32", "float", "no"}
ONLY = Message("this trainer trains LoRA and whole models of {models}", models=families.titles())
NO_MODEL = "this file of {trainer} names no model in {key}; name the training with kohya import --script"
ENCODED_ONCE = "captions are encoded once, before the training (cache_text_encoder_outputs)"
QUANTIZED = {"fp8_base", "fp8_base_unet", "int8_base", "base_bits"}  # options that store frozen weights in few bits
HUB_NAME = re.compile(r"(?!\.)[\w-][\w.-]*(?:/(?!\.)[\w .()+-]+)+", re.ASCII)  # owner/name, and a file in it
DIFFUSERS_LORA = "pytorch_lora_weights.safetensors"
MAX_NAMED = 5  # invalid entries of a list to name
MIN_SIDE = 256  # default lower limit of bucket sides
EDIT = r"(?<![a-z])edit(?![a-z])(?:[ _-]?plus)?(?:[ _:-]*(2509|2511))?"
ALL_LAYERS_OF_KREA_2 = ("train_text_fusion=True", "train_embedders=True")  # network_args
PREPARED = "it is in the dataset file that the import writes"
NO_IMAGES = "this file was not found, or cannot be read; name the images with train_data_dir or dataset_config"
NO_FOLDERS = "none of its data sets is a folder of this computer; name the images with train_data_dir or dataset_config"
OWN_LAYERS = "the choice of layers is not carried over; make it in network_args ({names})"
NO_PROMPTS = "this file was not found, or cannot be read; name the prompts with sample_prompts"
# Parts of a path that do not identify the model: sub-folders and files of diffusers and of the Hugging Face cache.
NO_NAME = re.compile(r"transformer|snapshots|[0-9a-f]{40}|(diffusion_pytorch_)?model(-\d+-of-\d+)?\.safetensors|")


def takes_4_bits(number_format: str) -> bool:
    """Return whether a format such as uint3 or nf4 stores numbers in at most 4 bits: base_bits = 4 is the nearest."""
    bits = re.search(r"\d+", number_format)
    return bits is not None and int(bits.group()) <= 4


def transformer_of(builder: ImportBuilder) -> ImportedModel:
    return families.facts_of(builder.family).imported


@cache
def load_tables(program: str) -> JsonObject:
    """Return the tables of a program's keys, tables/PROGRAM.toml. `ignored`: key -> why it has no equivalent."""
    tables = tomllib.loads((Path(__file__).parent / "tables" / f"{program}.toml").read_text(encoding="utf-8"))
    reasons = {key: group["reason"] for group in tables.get("ignored", ()) for key in group["keys"]}
    return {**tables, "ignored": reasons}


def other_method_error(trainer: str, method: MessageLike) -> ConfigError:
    """Return the error for a file that trains neither adapters nor a whole model."""
    template = "this file of {trainer} trains {what}, which is not trained here: train it there; {advice}"
    return ConfigError(template, trainer=trainer, what=method, advice=ONLY)


def other_model_error(trainer: str, model: str) -> ConfigError:
    """Return the error for a file of a model that is not trained here."""
    template = "this file of {trainer} is for {model}, which is not trained here: use {trainer}; {advice}"
    return ConfigError(template, trainer=trainer, model=model, advice=ONLY)


def takes_precedence(name: str) -> Message:
    return Message("{option} is set and takes precedence", option=option_name(name))


def steps_of_kept(count: float, interval: float) -> int:
    """Return the age in steps up to which files are kept so that `count` of them are left.

    sd-scripts deletes what is older than `save_last_n_steps`, so the newest file itself is one more.
    """
    return max(1, (int(count) - 1) * int(interval))  # a product of floats may be infinite


def flatten_tables(settings: JsonMapping, before: str = "") -> JsonObject:
    """Convert nested tables to dotted keys. Lists are unchanged."""
    flat: JsonObject = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten_tables(value, f"{before}{key}.")
        else:
            flat[f"{before}{key}"] = value
    return flat


def chooses_chroma(builder: ImportBuilder, key: str) -> None:
    """Apply a key that selects Chroma, after all others, with the options that sd-scripts requires for it."""
    template = "chooses the script: {script} with model_type = chroma, which masks T5's padding and takes no guidance"
    text = Message(template, script=builder.script)
    values = {"model_type": "chroma", "apply_t5_attn_mask": True, "guidance_scale": 0.0}
    builder.change(key, text, values)


def other_networks(options: Iterable[str]) -> Message:
    """Return the text of a key that names a whole model of which a training takes only these networks."""
    return Message("the networks beside the transformer: {names}", names=option_names(options))


def compute_dtype(builder: ImportBuilder, half: str) -> JsonObject:
    """Return the options of computing in a dtype, in which a fine-tune's weights are then kept as well."""
    full_precision = {} if builder.adapters or half == "no" else {f"full_{half}": True}
    return {"mixed_precision": half, **full_precision}


def train_lycoris(builder: ImportBuilder, key: str, theirs: str, arguments: Iterable[str]) -> None:
    """Import a key that chooses an adapter of LyCORIS, which on quantised weights has to bypass them."""
    bypass = ["bypass_mode=True"] if QUANTIZED & builder.values.keys() else []
    values: JsonObject = {"network_module": "lycoris.kohya", "network_args": [*arguments, *bypass]}
    builder.change(key, equal(theirs, f"lycoris.kohya {' '.join(values['network_args'])}"), values)


def timestep_options(
    builder: ImportBuilder, uniform: bool, shift: float | None, by_size: bool, scale: float | None
) -> JsonObject:
    """Return the options of a draw of timesteps: uniform or sigmoid, shifted by a number or by the size of an image."""
    values: JsonObject = {"model_prediction_type": "raw"}
    if uniform and not by_size:
        values["timestep_sampling"] = "sigma" if shift else "uniform"
        values |= {"weighting_scheme": "none"} if shift else {}
    else:
        values["timestep_sampling"] = transformer_of(builder).size_shift if by_size else "shift" if shift else "sigmoid"
        values["sigmoid_scale"] = scale or 1.0
    return values | ({"discrete_flow_shift": shift} if shift else {})


def own_name(path: object) -> str:
    parts = [part for part in re.split(r"[/\\]", str(path or "").casefold()) if not NO_NAME.fullmatch(part)]
    return parts[-1] if parts else ""


def chooses_version(builder: ImportBuilder, key: str, words: str) -> None:
    """Select the model by its name if several have identical files. De-Turbo is trained like the base, and the original
    Qwen-Image is recognised by its files."""
    values: JsonObject = {}
    if version := transformer_of(builder).model_version:
        named = families.facts_of(builder.family).named_options
        values["model_version"] = version
        values |= next((options for pattern, options in named.items() if re.search(pattern, words)), {})
    elif builder.family == "flux_2" and "klein" in words:
        values["model_version"] = f"klein-{'base-' * ('base' in words)}{'9b' if '9b' in words else '4b'}"
    elif builder.family == "flux_2":
        values["model_version"] = "dev"
    elif builder.family == "qwen_image" and (match := re.search(EDIT, words)):
        values["model_version"] = f"edit-{match[1]}" if match[1] else "edit-2509" if "plus" in match[0] else "edit"
        values["cache_text_encoder_outputs"] = True
    if values:
        template = "chooses the script: {script}, and model_version = {version} by the model's name"
        if "cache_text_encoder_outputs" in values:
            template = (
                "chooses the script: {script}, and model_version = {version} by the model's name, with captions that "
                "are encoded once"
            )
        builder.change(key, Message(template, script=builder.script, version=values["model_version"]), values)


def guidance_flag(builder: ImportBuilder, chroma: bool) -> str:
    """Return the prompt flag for another trainer's only scale: distilled guidance, or else classifier-free guidance."""
    reads = {"flux": not chroma, "flux_2": builder.values.get("model_version") == "dev"}
    return "--g" if reads.get(builder.family) else "--l"


def guidance(builder: ImportBuilder, scale: JsonValue) -> JsonValue:
    """Convert another trainer's guidance scale to a prompt's. Without guidance, a scale is 1 there, and the family's
    `unguided_scale` here.
    """
    number, unguided = to_number(scale), families.facts_of(builder.family).unguided_scale
    return scale if unguided == 1.0 or number is None else f"{max(unguided, number - 1.0 + unguided):g}"


def tables_of_list(value: JsonValue, key: str = "", notes: list[MessageLike] | None = None) -> list[JsonMapping]:
    """Return the tables of a list; none for any other value. Other entries are reported in `notes`, by `key`."""
    listed = value if isinstance(value, list) else []
    invalid = [
        Message("{number} ({value})", number=number, value=quoted(entry))
        for number, entry in enumerate(listed, 1)
        if not isinstance(entry, Mapping)
    ]
    if notes is not None and invalid:
        template = "{key}: entries that are not tables of names and values are left out: {entries}"
        more = [Message("...")] if len(invalid) > MAX_NAMED else []
        notes.append(Message(template, key=key, entries=join_messages([*invalid[:MAX_NAMED], *more])))
    elif notes is not None and not isinstance(value, list) and not is_empty(value):
        notes.append(
            Message("{key} is left out: it is not a list of tables, but {value}", key=key, value=quoted(value))
        )
    return [table for table in listed if isinstance(table, Mapping)]


def texts_of_list(value: JsonValue, key: str, notes: list[MessageLike]) -> list[str]:
    """Return the texts and numbers of a list as texts; other entries are reported in `notes`."""
    listed = value if isinstance(value, list) else []
    invalid = [
        Message("{number} ({value})", number=number, value=quoted(entry))
        for number, entry in enumerate(listed, 1)
        if isinstance(entry, Mapping | list)
    ]
    if invalid:
        notes.append(
            Message(
                "{key}: entries that are not texts are left out: {entries}",
                key=key,
                entries=join_messages(invalid[:MAX_NAMED]),
            )
        )
    return [str(entry) for entry in listed if not is_empty(entry) and not isinstance(entry, Mapping | list)]


def table_in(outer: JsonMapping, key: str, place: MessageLike, notes: list[MessageLike]) -> JsonMapping:
    """Return a nested table, or an empty one; `notes` reports anything else in its place."""
    inner = outer.get(key)
    if isinstance(inner, Mapping):
        return inner
    if not is_empty(inner):
        template = "{place}: {key} is left out: it is not a table of names and values, but {value}"
        notes.append(Message(template, place=place, key=key, value=quoted(inner)))
    return {}


def precision(value: JsonValue, full: str = "no") -> str:
    """Convert the name of a dtype to ours; `full` for all but 16-bit dtypes."""
    word = str(value).casefold()
    half = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}.get(word.replace("_", ""))
    return half or (full if word in FULL_PRECISION_WORDS else str(value))


def simplify_name(name: object) -> str:
    # ADAMW_8BIT and adamw8bit become the same.
    return "".join(letter for letter in str(name).casefold() if letter.isalnum())


def equal(theirs: object, ours: MessageLike) -> Message:
    return Message("{theirs} is {ours} here", theirs=theirs, ours=ours)


def say_nearest(theirs: object, ours: MessageLike) -> Message:
    return Message("{theirs} is not offered here; the nearest is {ours}", theirs=theirs, ours=ours)


def is_hub_name(path: str) -> bool:
    """Return whether this is owner/name on the Hugging Face Hub, or a .safetensors file in it, and no local path."""
    parts = path.split("/")
    is_name = bool(HUB_NAME.fullmatch(path)) and (len(parts) == 2) != parts[-1].endswith(".safetensors")
    return is_name and not Path(parts[0]).exists()


def import_assistant(builder: ImportBuilder, key: str, path: str, strength: float = 1.0) -> None:
    """Import the adapter with which a distilled model is trained: a file here, or one of the Hugging Face Hub, which is
    downloaded if missing. An id alone stands for the file that diffusers looks for in such a repository."""
    added = "" if strength == 1 else f":{strength:g}"
    if is_hub_name(path):
        name = f"{path}/{DIFFUSERS_LORA}{added}" if path.count("/") == 1 else f"{path}{added}"
        text = Message("assistant_lora = {name}, which is downloaded if it is missing", name=name)
        builder.change(key, text, {"assistant_lora": name})
        return
    if path.endswith(".safetensors"):
        builder.rename(key, "assistant_lora", f"{path}{added}")
        return
    builder.ignore(key, Message("download {path} and name its file in assistant_lora", path=path))
    template = "needs {path}, with which the model is trained: download it, and name its file here"
    builder.problems.append(Problem("assistant_lora", template, path=path))


def optimizer_args(values: JsonMapping) -> list[str]:
    """Convert settings of an optimizer to optimizer_args, without empty ones."""
    arguments = []
    for key, value in values.items():
        text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value).replace(" ", "")
        arguments += [] if is_empty(value) else [f"{key}={text}"]
    return arguments


def equivalent_optimizer(name: object) -> tuple[str, MessageLike]:
    """Return the equivalent optimizer, and a sentence if it differs: ("AdamW8bit", "")."""
    tables, word = load_tables("optimizers"), simplify_name(name)
    equivalent = tables["same"].get(tables["nearest"].get(word, word))
    if equivalent is None:
        return str(name), ""
    our_name = next(choice for choice in equivalent if choice in get_args(OptimizerName) or choice == equivalent[-1])
    return our_name, say_nearest(name, our_name) if word in tables["nearest"] else ""


def split_path(path: str) -> tuple[str, str]:
    """Split a path of any system into its folder and the file's name without extension."""
    at = max(path.rfind("/"), path.rfind("\\"))
    name = path[at + 1 :]
    return path[: max(at, 0)] or ".", name.rpartition(".")[0] or name


def dataset_toml(general: JsonMapping, sets: Iterable[tuple[JsonMapping, list[JsonObject]]]) -> str:
    """Return the text of a dataset file from general options, and each dataset's options and subsets."""
    blocks = [_toml_table("[general]", general)] if general else []
    for options, subsets in sets:
        all_of_it = {**general, **options}
        limits = {} if all_of_it.get("bucket_no_upscale") else small_buckets(all_of_it.get("resolution"))
        blocks.append(_toml_table("[[datasets]]", limits | {**options}))
        blocks += [_toml_table("[[datasets.subsets]]", subset) for subset in subsets]
    return "\n\n".join(blocks) + "\n"


def joined_sizes(sizes: Sequence[Sequence[int]]) -> JsonValue:
    """Return sizes as the resolution of one data set: a number or [width, height], or for several "512;1024,768"."""
    if len(sizes) == 1:
        (size,) = sizes
        return size[0] if size[0] == size[-1] else list(size)
    return ";".join(",".join(map(str, dict.fromkeys(size))) for size in dict.fromkeys(map(tuple, sizes)))


def small_buckets(resolution: JsonValue) -> JsonObject:
    """Return a lower bucket limit for resolutions below our default limit, which the other trainers do not have."""
    try:
        sizes = parse_resolution(resolution)
    except ConfigError:
        return {}
    least = min(side for size in sizes for side in size)
    return {"min_bucket_reso": max(64, least // 64 * 64)} if least < MIN_SIDE else {}


def _toml_table(head: str, members: JsonMapping) -> str:
    return "\n".join([head, *(f"{key} = {toml_value(value)}" for key, value in members.items() if not is_empty(value))])


def describe_datasets(text: str) -> Message:
    count = text.count("[[datasets]]")
    return ngettext("one dataset: {place}", "{count} datasets: {place}", count, place=PREPARED)


def describe_prompts(count: int) -> Message:
    return ngettext("one prompt in a file of its own", "{count} prompts in a file of their own", count)
