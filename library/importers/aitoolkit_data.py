"""Import ai-toolkit's data sets to a dataset file, and its prompts to a prompt file."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from library import families
from library.config.json_types import JsonMapping, JsonObject, JsonValue
from library.config.problems import ConfigError, Message, MessageLike
from library.config.sections.captions import VARIED
from library.importers.builder import NOT_HERE, ImportBuilder, describe, is_empty, is_on, to_number
from library.importers.shared import (
    ENCODED_ONCE,
    dataset_toml,
    describe_datasets,
    describe_prompts,
    guidance,
    guidance_flag,
    joined_sizes,
    load_tables,
    tables_of_list,
    texts_of_list,
)

DATASET_TABLES = load_tables("aitoolkit")["datasets"]
VIDEOS = "videos are not trained; images are"
DEFAULTS = {"width": 512, "height": 512, "seed": 0, "sample_steps": 20, "guidance_scale": 7}
# Options within a prompt: "a cat --w 512 --ctrl_img cat.png".
IN_PROMPTS = {"w": "width", "h": "height", "d": "seed", "s": "sample_steps", "n": "neg", "l": "guidance_scale"}
REFERENCE_KEYS = ("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3")


def is_dataset(settings: JsonMapping) -> bool:
    """Return whether these are data sets of ai-toolkit without a training."""
    return "config" not in settings and any(
        "folder_path" in table for table in tables_of_list(settings.get("datasets"))
    )


def convert_dataset(settings: JsonMapping) -> tuple[str, list[MessageLike]]:
    """Convert data sets of ai-toolkit to the text of a dataset file, and a sentence for each key that was left out."""
    left_out: list[MessageLike] = []
    listed = _with_folders(settings.get("datasets"), left_out)
    if not listed:
        raise ConfigError("no data set in this file has a folder_path")
    text, notes = _aitoolkit_dataset_file(listed, WholeTraining(settings.get("trigger_word")))
    return text, [*left_out, *notes]


def _with_folders(value: JsonValue, notes: list[MessageLike]) -> list[JsonMapping]:
    """Return the data sets that name a folder; the others are reported."""
    listed = tables_of_list(value, "datasets", notes)
    for number, table in enumerate(listed, 1):
        if is_empty(table.get("folder_path") or table.get("dataset_path")):
            reason = Message("it names no folder ({key})", key="folder_path")
            notes.append(Message("data set {name} is left out: {reason}", name=number, reason=reason))
    return [table for table in listed if not is_empty(table.get("folder_path") or table.get("dataset_path"))]


@dataclass(frozen=True)
class WholeTraining:
    """The context of data sets: settings of their training."""

    word: JsonValue = None
    step: int = 0  # sides of images are multiples of this many pixels; 0: as the data sets state
    without: tuple[str, ...] = ()  # options of subsets that it does not support
    references: JsonMapping = field(default_factory=dict)  # options of a subset that has reference images


def _aitoolkit_dataset_file(tables: list[JsonMapping], whole: WholeTraining) -> tuple[str, list[MessageLike]]:
    """Return the text of a dataset file, and a sentence for each key that was left out."""
    sets, notes = [], []
    for table in tables:
        options: JsonObject = {"resolution": _convert_resolution(table.get("resolution") or 512)}
        step = whole.step or table.get("bucket_tolerance")
        for option, value in (("batch_size", table.get("batch_size")), ("bucket_reso_steps", step)):
            if (count := to_number(value)) and count >= 1:
                options[option] = int(count)
        if not is_on(table.get("buckets", True)):
            options["enable_bucket"] = False
        subset = {
            option: value for option, value in _aitoolkit_subset(table, whole).items() if option not in whole.without
        }
        sets.append((options, [subset]))
        ignored_keys = sorted(table.keys() - set(DATASET_TABLES["known"]))
        ignored_keys += ["mask_min_value"] if "mask_min_value" in table and not is_empty(table.get("mask_path")) else []
        reasons = dict.fromkeys(ignored_keys, NOT_HERE) | ({"num_frames": VIDEOS} if "num_frames" in table else {})
        unsupported_keys = (key for option, key in DATASET_TABLES["subset"].items() if option in whole.without)
        reasons |= {key: ENCODED_ONCE for key in unsupported_keys if key in table}
        for key, reason in reasons.items():
            if table[key] is True or (not is_empty(table[key]) and table[key] not in (False, 0, 1)):
                place = Message("datasets of {folder}", folder=table.get("folder_path") or table.get("dataset_path"))
                notes.append(Message("{place}: {key} is ignored: {reason}", place=place, key=key, reason=reason))
    general = {"enable_bucket": True, "max_bucket_reso": 2048, "bucket_no_upscale": True}
    return dataset_toml(general, sets), notes


def _convert_resolution(value: JsonValue) -> JsonValue:
    sides = [int(side) for side in map(to_number, value if isinstance(value, list) else [value]) if side and side > 0]
    return joined_sizes([(side, side) for side in sides]) if sides else value


def _import_aitoolkit_datasets(builder: ImportBuilder) -> None:
    listed = _with_folders(builder.get("datasets"), builder.notes)
    if not listed:
        return
    word = builder.get("trigger_word")
    settings = _aitoolkit_run_options(listed)
    cached = builder.values.get("cache_text_encoder_outputs") or settings.get("cache_text_encoder_outputs")
    without = VARIED if cached else ()  # ai-toolkit does not vary captions that it encodes once
    for option in builder.values.keys() & set(without):
        builder.ignore(builder.keys.pop(option), ENCODED_ONCE)
        del builder.values[option]
    step = DATASET_TABLES["steps"].get(builder.family, 0)
    text, notes = _aitoolkit_dataset_file(listed, WholeTraining(word, step, without, _reference_sizes(builder)))
    builder.texts["dataset_config"] = text
    builder.notes += notes
    builder.change("datasets", describe_datasets(text), settings)
    if word:
        explanation = (
            "is added to the beginning of every caption and to the metadata; ai-toolkit adds it only to captions "
            "without it"
        )
        builder.change("trigger_word", explanation, {"metadata_trigger_phrase": word})


def _reference_sizes(builder: ImportBuilder) -> JsonObject:
    """Return options for the size of reference images, unless ai-toolkit scales them to the image's size."""
    key = "model.model_kwargs.match_target_res"
    kind = str(builder.get("model.arch")).casefold().partition(":")[0]
    options: JsonObject = DATASET_TABLES["references"].get(kind, {})
    if is_on(builder.source.get(key)):
        builder.change(key, "reference images get the size of the image that they belong to")
        return {}
    return options


def _aitoolkit_run_options(tables: list[JsonMapping]) -> JsonObject:
    """Return options of the whole training that are keys of data sets there."""
    on_disk = any(is_on(d.get("cache_latents_to_disk")) for d in tables)
    values: JsonObject = {
        "cache_latents": on_disk or any(is_on(d.get("cache_latents")) for d in tables),
        "cache_latents_to_disk": on_disk,
    }
    if any(is_on(d.get("cache_text_embeddings")) for d in tables):
        values["cache_text_encoder_outputs"] = True
    if any(not is_empty(d.get("mask_path")) for d in tables):
        values["masked_loss"] = True
    return values


def _caption_extension(table: JsonMapping) -> str:
    ending = str(table.get("caption_type") or table.get("caption_ext") or "txt")
    return ending if ending.startswith(".") else f".{ending}"


def _aitoolkit_subset(table: JsonMapping, whole: WholeTraining) -> JsonObject:
    word = table.get("trigger_word") or whole.word
    subset = {
        "image_dir": table.get("folder_path") or table.get("dataset_path"),
        **{option: table.get(key) for option, key in DATASET_TABLES["subset"].items()},
        "caption_extension": _caption_extension(table),
        "caption_prefix": f"{word}, " if word else None,
    }
    if folders := _reference_folders(table):
        subset |= {"control_directory": folders[0], "more_control_directories": folders[1:], **whole.references}
    return {key: value for key, value in subset.items() if not is_empty(value) and value is not False}


def _reference_folders(table: JsonMapping) -> list[JsonValue]:
    """Return the folders of a data set's reference images."""
    first = table.get("control_path")
    listed = [*(first if isinstance(first, list) else [first]), *(table.get(f"control_path_{i}") for i in (1, 2, 3))]
    return [folder for folder in listed if not is_empty(folder)]


def _import_aitoolkit_samples(builder: ImportBuilder) -> None:
    listed = builder.get("sample.samples")
    prompts = [s for s in tables_of_list(listed, "sample.samples", builder.notes) if not is_empty(s.get("prompt"))]
    if not prompts:
        prompts = [
            {"prompt": prompt}
            for prompt in texts_of_list(builder.get("sample.prompts"), "sample.prompts", builder.notes)
        ]
    if not prompts or is_on(builder.get("train.disable_sampling")):
        builder.empty("train.skip_first_sample")
        if builder.given("sample.sample_every"):
            builder.change("sample.sample_every", "there are no prompts to sample")
        return
    lines = _prompt_lines(builder, prompts)
    builder.texts["sample_prompts"] = "\n".join(lines) + "\n"
    builder.explain(describe_prompts(len(lines)), "sample.prompts", "sample.samples")
    interval = int(builder.number("sample.sample_every") or 100)
    builder.assume("sample.sample_every", interval)
    builder.rename("sample.sample_every", "sample_every_n_steps", interval)
    at_start = not is_on(builder.get("train.skip_first_sample"))
    builder.change(
        "train.skip_first_sample", describe({"sample_at_first": str(at_start).lower()}), {"sample_at_first": at_start}
    )
    if "sample.walk_seed" in builder.source:
        builder.ignore("sample.walk_seed", "each prompt of the file has a seed of its own: change --d there")


def _prompt_lines(builder: ImportBuilder, prompts: Sequence[JsonMapping]) -> list[str]:
    """Return the lines of a prompt file, in which options that all prompts share become flags of each."""
    word = str(builder.get("trigger_word") or "")
    flags = {"width": "--w", "height": "--h", "seed": "--d", "sample_steps": "--s", "neg": "--n"}
    flags["guidance_scale"] = guidance_flag(builder, chroma=builder.values.get("model_type") == "chroma")
    shared = {name: builder.source.get(f"sample.{name}") for name in flags}
    shared = {name: DEFAULTS.get(name) if value is None else value for name, value in shared.items()}
    for name, flag in flags.items():
        if builder.get(f"sample.{name}") is not None:
            builder.change(f"sample.{name}", Message("is {flag} in the prompt file", flag=flag))
    if families.facts_of(builder.family).unguided_scale == 0.0:
        text = "is --l in the prompt file, less 1: the scale of this model is 0 without a negative prompt"
        builder.explain(text, "sample.guidance_scale")
    lines = []
    for sample in map(_split_prompt_options, prompts):
        options = {name: sample[name] if not is_empty(sample.get(name)) else shared[name] for name in flags}
        options["guidance_scale"] = guidance(builder, options["guidance_scale"])
        words = [f"{flag} {options[name]}" for name, flag in flags.items() if options[name] not in (None, False, "")]
        references = (sample.get(key) for key in REFERENCE_KEYS)
        words += [f"--ci {path}" for path in references if not is_empty(path)]
        lines.append(" ".join([*str(sample["prompt"]).replace("[trigger]", word).split(), *words]))
    return lines


def _split_prompt_options(sample: JsonMapping) -> JsonObject:
    """Return a sample with the options inside of its prompt as keys."""
    words, *flags = re.split(r"\s--(?=[A-Za-z])", f" {sample['prompt']}")
    options: JsonObject = {}
    for flag in flags:
        name, _, value = flag.partition(" ")
        if name in IN_PROMPTS or name in REFERENCE_KEYS:
            options[IN_PROMPTS.get(name, name)] = value.strip()
        else:
            words += f" --{flag}"
    return {**sample, **options, "prompt": words}


DATA_IMPORTS = (_import_aitoolkit_datasets, _import_aitoolkit_samples)
