"""The data: sd-scripts' dataset TOML or JSON, or else the folders of the run's own options.

A file has [general], [[datasets]] and [[datasets.subsets]]. A subset's missing values come from its dataset, then
[general], then the run's options, then the defaults here. Both ways of describing data give the same structure.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from library.config.building import Layer, read_section
from library.config.dataset_rules import PRESERVES_BASE, dataset_problems, wrong
from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import load_json, load_toml
from library.config.places import real_place
from library.config.problems import ConfigError, Problem, raise_if_any
from library.config.reading import (
    MAX_SIDE,
    parse_extension,
    parse_resolution,
    positive_pair,
    range_of_sizes,
    seed_or_random,
    separator,
)
from library.config.run_config import RunConfig
from library.config.schema import changed, opt, options_of, section_options
from library.config.values import Option, closest, did_you_mean, quoted

Layers = tuple[JsonMapping, ...]
Interpolation = Literal["lanczos", "nearest", "bilinear", "linear", "bicubic", "cubic", "area", "box"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SubsetConfig:
    """One folder, or one metadata file, of images, with its options."""

    image_dir: str | None = opt(None, "folder of images", kind="folder")
    metadata_file: str | None = opt(None, "captions of all images in one file (.json, .jsonl, .csv, .tsv)", kind="file")
    conditioning_data_dir: str | None = opt(None, "folder of mask images of the same names", kind="folder")
    control_directory: str | None = opt(None, "folder of reference images of the same names", kind="folder")
    more_control_directories: tuple[str, ...] = opt(
        (), "folders of further reference images of the same names, for models that are shown several", kind="folder"
    )
    image_suffix: str | None = opt(None, "ending of the names to train on, such as _T in 0_T.png; others are left out")
    control_suffix: str | None = opt(
        None, "ending of the names of reference images in place of image_suffix, such as _R in 0_R.png"
    )
    is_reg: bool = opt(False, "these are regularisation images")
    alpha_mask: bool = opt(False, "use the transparency of images as mask")
    class_tokens: str | None = opt(None, "caption of images that have no caption file")
    num_repeats: int = opt(1, "how often each image is seen per epoch", min=0, ceiling=100_000)
    caption_extension: str = opt(
        ".caption",
        "the extension of caption files: usually .txt; sd-scripts' default is .caption",
        parse=parse_extension,
    )
    cache_info: bool = opt(False, "remember captions and sizes in metadata_cache.json")
    shuffle_caption: bool = opt(False, "shuffle the tags of a caption each time")
    caption_separator: str = opt(",", "what separates tags", parse=separator)
    keep_tokens: int = opt(0, "this many tags stay in front", min=0)
    keep_tokens_separator: str = opt("", "tags before this sign stay in front")
    secondary_separator: str | None = opt(None, "joins tags that are shuffled and dropped as one")
    enable_wildcard: bool = opt(False, "{a|b} in a caption picks one; of several lines one is used")
    caption_prefix: str | None = opt(None, "text in front of every caption")
    caption_suffix: str | None = opt(None, "text after every caption")
    caption_dropout_rate: float = opt(0.0, "share of images without caption", min=0.0, max=1.0)
    caption_dropout_every_n_epochs: int = opt(0, "leave all captions out in every n-th epoch", min=0)
    caption_tag_dropout_rate: float = opt(0.0, "share of tags that are left out", min=0.0, max=1.0)
    token_warmup_min: int = opt(1, "tags to start with", min=0)
    token_warmup_step: float = opt(0.0, "step at which all tags are there; below 1 a share", min=0.0)
    flip_aug: bool = opt(False, "mirror images at random")
    color_aug: bool = opt(False, "vary hue and gamma a little")
    random_crop: bool = opt(False, "crop at random")
    face_crop_aug_range: tuple[float, float] | None = opt(None, "face sizes to crop for", parse=range_of_sizes)
    resize_interpolation: Interpolation | None = opt(None, "how images are resized")
    control_resolution: tuple[int, int] | None = opt(
        None, "width and height whose area reference images get; else the target's size", parse=positive_pair
    )
    no_resize_control: bool = opt(False, "leave reference images as large as they are, up to control_resolution")
    custom_attributes: JsonObject | None = opt(None, "diff_output_preservation = true keeps the base model's answer")

    trigger_phrase: str = ""  # the run's metadata_trigger_phrase; replaces [trigger] in captions

    @property
    def control_directories(self) -> tuple[str, ...]:
        first = self.control_directory or (self.image_dir if self.control_suffix else None)
        return (first, *self.more_control_directories) if first else ()

    @property
    def preserves_base(self) -> bool:
        return bool((self.custom_attributes or {}).get(PRESERVES_BASE))

    @property
    def splits_tags(self) -> bool:
        return bool(self.shuffle_caption or self.caption_tag_dropout_rate or self.token_warmup_step)

    @property
    def kind(self) -> str:
        """The source of its captions and masks: "metadata", "masked" or "folder"."""
        if self.metadata_file:
            return "metadata"
        return "masked" if self.conditioning_data_dir else "folder"


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig:
    """Images trained at one resolution; several sizes give one data set each.

    Without a dataset file `subsets` is empty: they are the <repeats>_<words> folders in `train_data_dir` and
    `reg_data_dir`, or these folders themselves if they contain images and no such folders; each is a
    `replace(dataset.template, image_dir=..., num_repeats=..., class_tokens=..., is_reg=...)`.
    """

    resolution: tuple[int, int] | None = opt(
        None, "width and height to train at, or several sizes", parse=parse_resolution
    )
    batch_size: int = opt(1, "images per step and GPU", min=1, ceiling=10_000)
    enable_bucket: bool = opt(False, "keep each image's shape")
    min_bucket_reso: int = opt(256, "shortest side of a bucket", min=1, ceiling=MAX_SIDE)
    max_bucket_reso: int = opt(1024, "longest side of a bucket", min=1, ceiling=MAX_SIDE)
    bucket_reso_steps: int = opt(64, "sides of buckets are multiples of this", min=1, ceiling=MAX_SIDE)
    bucket_no_upscale: bool = opt(False, "never enlarge an image")
    network_multiplier: float = opt(1.0, "kept for old files; not used")
    validation_split: float = opt(0.0, "share of the images that is held out", min=0.0, max=1.0)
    validation_seed: int | None = opt(None, "chooses the images that are held out", parse=seed_or_random)
    resize_interpolation: Interpolation | None = opt(None, "how images are resized")

    sizes: tuple[tuple[int, int], ...] = ()  # all sizes of these images, including `resolution`
    table: int = 0  # the index of its [[datasets]] table in the file
    subsets: tuple[SubsetConfig, ...] = ()
    repeated: tuple[str, ...] = ()  # folders and metadata files of duplicate subsets, which are ignored
    template: SubsetConfig = SubsetConfig()  # a subset's values from the run's options alone
    train_data_dir: str | None = None
    reg_data_dir: str | None = None


SUBSET_ONLY = {
    "image_dir",
    "metadata_file",
    "conditioning_data_dir",
    "control_directory",
    "more_control_directories",
    "is_reg",
    "alpha_mask",
}
SUBSET_KEYS = section_options(SubsetConfig)
# [general] and [[datasets]] may contain their own values, and defaults for their subsets.
DATASET_KEYS = {k: o for k, o in SUBSET_KEYS.items() if k not in SUBSET_ONLY} | dict(section_options(DatasetConfig))
SUFFIXES = (".toml", ".json")
MUSUBI_DATASET_KEYS = {"image_directory", "image_jsonl_file", "cache_directory"}  # of another trainer's dataset files
# Names of the run's options that differ.
RUN_NAMES = {"batch_size": "train_batch_size", "num_repeats": "dataset_repeats"}


def load_datasets(config: RunConfig) -> tuple[DatasetConfig, ...]:
    """Return the data of a run. Raises ConfigError with every problem of its dataset file, a line each."""
    datasets, problems = drafted(config)
    raise_if_any(problems)
    return datasets


def drafted(config: RunConfig) -> tuple[tuple[DatasetConfig, ...], list[Problem]]:
    """Return the valid part of a run's data, and every problem of its dataset file."""
    if config.data.dataset_config:
        problems: list[Problem] = []
        try:
            return _datasets_of_file(config.data.dataset_config, config, problems), problems
        except ConfigError as error:  # about the whole file, so add the option's name
            file_problems = [Problem("dataset_config", ": {problem}", problem=problem) for problem in error.problems]
            return (), file_problems
    bases = _at_each_size(_options_of_run(config))
    template = _build_table(SubsetConfig, _options_of_run(config))
    folders = config.data.train_data_dir
    if config.data.in_json:
        single = replace(template, image_dir=folders, metadata_file=config.data.in_json)
        return tuple(replace(base, subsets=(single,)) for base in bases), []
    run_values = {"template": template, "train_data_dir": folders, "reg_data_dir": config.data.reg_data_dir}
    return tuple(replace(base, **run_values) for base in bases), []


def _datasets_of_file(path: str | Path, config: RunConfig, problems: list[Problem]) -> tuple[DatasetConfig, ...]:
    """Return the datasets of one file, with the run's options as defaults; append problems.

    Raises ConfigError only if it cannot continue.
    """
    tables, name = read_tables(Path(path)), Path(path).name
    if MUSUBI_DATASET_KEYS & {key for table in _tables_of_key(tables, "datasets", name, []) for key in table}:
        template = (
            "{name} is written for musubi-tuner: on the page, Load config rewrites it, and in a shell "
            "`kohya import {path}` does"
        )
        raise ConfigError(template, name=name, path=path)
    problems += [
        wrong(name, key, "is not known at the top level, which has only [general] and [[datasets]]")
        for key in tables
        if key not in ("general", "datasets")
    ]
    run_options = options_of(type(config))
    base_layers = (
        _options_of_run(config),
        _read_table(tables.get("general", {}), DATASET_KEYS, f"{name} [general]", run_options, problems),
    )
    datasets: list[DatasetConfig] = []
    for i, table in enumerate(_tables_of_key(tables, "datasets", name, problems), 1):
        before = len(problems)
        table_datasets = [
            replace(dataset, table=i - 1)
            for dataset in _read_datasets_of_table(table, f"{name} dataset {i}", base_layers, run_options, problems)
        ]
        datasets += table_datasets
        # A rule about an unreadable value would only repeat that it is wrong.
        reported_options = {option for problem in problems[before:] for option in problem.options}
        if not table.get("subsets") and "subsets" not in reported_options:  # a subset reports itself what it lacks
            problems.append(wrong(f"{name} dataset {i}:", "", "it has no [[datasets.subsets]] table with images"))
        place = f"{name} dataset {i}:"
        # The data sets of a table differ in their size only, so most problems are the same for each.
        violations = dict.fromkeys(
            problem for dataset in table_datasets for problem in dataset_problems(dataset, place, config)
        )
        problems += [problem for problem in violations if reported_options.isdisjoint(problem.options)]
    if not datasets and not problems:
        problems.append(wrong(name, "", "there is no [[datasets]] table"))
    return tuple(datasets)


def decided(config: RunConfig) -> list[str]:
    """Return options of the run that have no effect because the dataset file sets them for every image."""
    try:
        tables = read_tables(Path(config.data.dataset_config or ""))
    except ConfigError:  # reported elsewhere
        return []
    general, dataset_tables = tables.get("general"), _tables_of_key(tables, "datasets", "", [])
    shared = set(general if isinstance(general, Mapping) else ())
    keys_of_datasets = [
        {*table} | set.intersection(*map(set, _tables_of_key(table, "subsets", "", []) or [{}]))
        for table in dataset_tables
    ]
    decided_keys = shared | set.intersection(*keys_of_datasets or [set()])
    names = {RUN_NAMES.get(key, key) for key in decided_keys & {*DATASET_KEYS, *SUBSET_KEYS}}
    return [name for members in changed(config).values() for name in members if name in names]


def _options_of_run(config: RunConfig) -> JsonObject:
    """Return the run's options about datasets and subsets that are set, by the names used here."""
    values: JsonObject = {}
    parts = [getattr(config, name) for name in ("data", "captions", "validation") if hasattr(config, name)]
    for name in [*SUBSET_KEYS, *DATASET_KEYS]:
        for part in parts:
            if hasattr(part, RUN_NAMES.get(name, name)):
                values[name] = getattr(part, RUN_NAMES.get(name, name))
    values |= {
        "resolution": config.data.sizes or None,
        "face_crop_aug_range": config.data.face_crop,
        "trigger_phrase": config.metadata.metadata_trigger_phrase,
    }
    return {name: value for name, value in values.items() if value is not None}


def _build_table(cls: type, *layers: JsonMapping) -> Any:
    names = {f.name for f in fields(cls)}
    return cls(**{k: v for layer in layers for k, v in layer.items() if k in names})


def _at_each_size(*layers: JsonMapping) -> list[DatasetConfig]:
    """Return a data set per size of the resolution that wins in these layers, the largest first."""
    sizes = next((layer["resolution"] for layer in reversed(layers) if layer.get("resolution")), ())
    base = _build_table(DatasetConfig, *layers, {"sizes": sizes})
    # The largest first: in some families the first size gets the keys that sd-scripts reads in a latents file, and an
    # earlier training at one size mostly used the largest.
    return [replace(base, resolution=size) for size in sorted(sizes, key=math.prod, reverse=True) or (None,)]


def _read_datasets_of_table(
    table: JsonMapping, source: str, base_layers: Layers, run_options: Collection[str], problems: list[Problem]
) -> list[DatasetConfig]:
    dataset_values = {k: v for k, v in table.items() if k != "subsets"}
    for key in [k for k in dataset_values if closest(k, [*DATASET_KEYS, "subsets"]) == "subsets"]:
        hint = did_you_mean(key, ["subsets"])
        problems.append(wrong(source, key, "is not a known key{hint}", hint=hint, also="subsets"))
        del dataset_values[key]
    layers = (*base_layers, _read_table(dataset_values, DATASET_KEYS, source, run_options, problems))
    subsets: dict[str, SubsetConfig] = {}
    repeated: list[str] = []
    for i, inner in enumerate(_tables_of_key(table, "subsets", source, problems), 1):
        own = _read_table(inner, SUBSET_KEYS, f"{source} subset {i}", run_options, problems)
        subset = _build_table(SubsetConfig, *layers, own)
        if not {"image_dir", "metadata_file"} & {closest(key, SUBSET_KEYS) for key in inner}:
            problems.append(wrong(f"{source} subset {i}", "image_dir", "is not set; name the folder of its images"))
        if not (place := subset.metadata_file or subset.image_dir):
            continue
        # A folder listed twice in one dataset counts once, as in sd-scripts, however it is spelled.
        key = real_place(place)
        if key in subsets and subsets[key].num_repeats:
            repeated.append(place)
        else:  # one that is never trained does not count
            subsets[key] = subset
    members = {"subsets": tuple(subsets.values()), "repeated": tuple(repeated)}
    return [replace(dataset, **members) for dataset in _at_each_size(*layers)]


def _read_table(
    table: Any, options: Mapping[str, Option], source: str, run_options: Collection[str], problems: list[Problem]
) -> JsonObject:
    """Parse the values of one table, with advice about keys of other levels and options of the run. An empty text hides
    the value above it.
    """
    if not isinstance(table, Mapping):
        problems.append(wrong(source, "", "must be a table, got {table}", table=quoted(table)))
        return {}
    keys_by_table = {"[[datasets.subsets]]": SUBSET_KEYS, "[[datasets]] or [general]": DATASET_KEYS}
    accepted = {}
    for key, value in table.items():
        if elsewhere := [where for where, keys in keys_by_table.items() if key in keys and key not in options]:
            problems.append(wrong(source, key, "belongs in {table}", table=elsewhere[0]))
        elif key in run_options and key not in options and not closest(key, options):
            problems.append(wrong(source, key, "is not set for single data sets: set it in the run's options"))
        elif key == "caption_extension" and value == "":  # sd-scripts reads files without an ending then
            problems.append(wrong(source, key, "is empty; write the ending of the caption files, such as .txt"))
        elif value is not None:  # null of JSON, which says nothing
            accepted[key] = value
    return read_section(options, Layer(accepted, source), problems)


def _tables_of_key(table: JsonMapping, key: str, source: str, problems: list[Problem]) -> list[Any]:
    entries = table.get(key, [])
    if isinstance(entries, list) and all(isinstance(t, Mapping) for t in entries):
        return entries
    title = "[[datasets.subsets]]" if key == "subsets" else "[[datasets]]"
    problems.append(wrong(source, key, "must be written as tables, {title}", title=title))
    return []


def read_tables(path: Path) -> JsonObject:
    """Return the tables of a dataset file. Raises ConfigError if it cannot be parsed."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError("{path} must end in one of {suffixes}", path=path, suffixes=", ".join(SUFFIXES))
    if path.suffix.lower() == ".toml":
        return load_toml(path)
    json = load_json(path)
    if not isinstance(json, dict):
        raise ConfigError("{path} must hold one JSON object with general and datasets", path=path)
    return json
