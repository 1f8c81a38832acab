"""The images of a training as rows of its form, one for each folder: found by name, or listed in a dataset file.

A folder with images, one with folders named <repeats>_<words>, and a dataset file are shown in the same way. Settings
that a folder's name cannot express go to a dataset file, which the form names from then on.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from kohya_gui.form import kept_file
from kohya_gui.form.form import SettingsForm, Submission, sentence
from kohya_gui.server import paths, picker
from kohya_gui.server.json_api import NOT_OF_THE_PAGE, ApiRequest
from library.config.dataset import DatasetConfig, drafted
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, Problem
from library.config.run_config import RunConfig
from library.config.schema import options
from library.curation import dataset_file, image_folders, shares, sources
from library.curation.dataset_file import KNOWN, DatasetTable, FolderTable
from library.files import clear_errors, write_atomic

OPTION = "dataset_config"
READ = (".toml", ".json")
MAX_FOLDERS = 500  # folders
PATHS = ("image_dir", "conditioning_data_dir", "control_directory", "metadata_file")
SECTIONS = ("data", "captions", "validation", "steps")  # sections that affect images and steps
LABELS = {
    "resolution": "Resolution",
    "batch_size": "Batch size",
    "enable_bucket": "Buckets",
    "bucket_no_upscale": "Do not upscale",
    "min_bucket_reso": "Shortest bucket side",
    "max_bucket_reso": "Longest bucket side",
    "bucket_reso_steps": "Bucket steps",
    "validation_split": "Validation share",
    "image_dir": "Folder",
    "num_repeats": "Repeats",
    "is_reg": "Regularisation",
    "class_tokens": "Default caption",
    "caption_extension": "Caption extension",
    "caption_prefix": "Caption prefix",
    "caption_suffix": "Caption suffix",
    "shuffle_caption": "Shuffle captions",
    "keep_tokens": "Keep tokens",
    "caption_dropout_rate": "Caption dropout",
    "caption_tag_dropout_rate": "Tag dropout",
    "flip_aug": "Random flip",
    "color_aug": "Color augmentation",
    "random_crop": "Random crop",
    "alpha_mask": "Alpha mask",
    "conditioning_data_dir": "Mask folder",
    "control_directory": "Reference folder",
    "metadata_file": "Metadata file",
}
PLACES = ("image_dir", "conditioning_data_dir", "control_directory")  # folders that images can be uploaded to


def datasets_section(configs: Mapping[str, type]) -> str:
    """The part of the form that shows the images of a training; datasets.js fills it."""
    watched = sorted(
        {name for config in configs.values() for name, option in options(config).items() if option.section in SECTIONS}
    )
    image_dir, repeats, *others = (_field(name) for name in dataset_file.OF_FOLDER)
    settings = "".join(_field(name) for name in dataset_file.OF_DATASET)
    endings = ",".join(("image/jpeg", "image/png", "image/webp", ".bmp", ".avif", ".txt", ".caption"))
    return (
        f'<div class="card datasets" data-options="{" ".join(watched)}"><div class="head"><h4>Image folders</h4>'
        '<p class="sum" role="status"></p></div><div class="groups"></div>'
        '<template class="group"><div class="group"><details class="of-set"><summary><b></b> <span></span></summary>'
        f'<div class="grid">{settings}</div></details><ol></ol></div></template>'
        f'<template class="row"><li><div class="main">{image_dir}{repeats}<p class="numbers"></p>'
        '<div class="share" hidden><i></i></div></div>'
        f'<details><summary>Captions, masks and more</summary><div class="grid">{"".join(others)}</div></details>'
        '<button type="button" data-row="remove">Remove</button></li></template>'
        '<div class="drop"><p>Drop images and their captions here.</p><div class="send-acts">'
        '<label class="choose-images">Choose images<input type="file" multiple'
        f' accept="{endings}"></label><button type="button" data-row="add">Add a folder</button>'
        '<button type="button" data-row="add-set" title="Folders that are trained at another size" hidden>'
        "Add a data set</button></div></div>"
        '<div class="sending" hidden><span></span><div class="track"><i></i></div>'
        '<button type="button" data-row="stop">Stop</button></div>'
        '<p class="file" role="status"></p><ul class="notes"></ul></div>'
    )


def _field(name: str) -> str:
    option, about = KNOWN[name], escape(sentence(KNOWN[name].help))
    if option.type is bool:
        field = (
            f'<select data-set="{name}"><option value="">inherited</option><option value="true">yes</option>'
            '<option value="false">no</option></select>'
        )
    else:
        mode = ' inputmode="decimal"' if option.type in (int, float) else ""
        field = f'<input data-set="{name}"{mode} spellcheck="false" autocapitalize="off" autocomplete="off">'
    send = '<button type="button" class="send" data-row="send">Send images</button>' if name in PLACES[1:] else ""
    wide = " wide" if option.kind else ""
    browse = picker.button(f"set-{name}", LABELS[name], option.kind)
    return (
        f'<div class="of{wide}" title="{about}"><label><span>{LABELS[name]}</span>{field}</label>{browse}{send}</div>'
    )


# ---- showing


def look(form: SettingsForm, given: Submission, roots: Sequence[Path]) -> JsonObject:
    """The data sets of a form with their folders, as far as the page may read them. No image is opened."""
    config = form.lenient_config(given)
    data = config.data
    if not (data.dataset_config or data.train_data_dir or data.reg_data_dir):
        return {"groups": [], "file": "", "known": "", "problems": []}
    if not data.dataset_config:
        return _of_folders(config, roots)
    path = paths.present(str(data.dataset_config), roots, READ, OPTION)
    kept_file.check_size(path, OPTION)
    known, tables = kept_file.state(path), dataset_file.read(path)
    datasets, problems = drafted(config)
    first = {dataset.table: dataset for dataset in reversed(datasets)}  # of a table with several sizes
    groups = [_group(table, first.get(at), roots) for at, table in enumerate(tables)]
    return {"groups": groups, "file": str(path), "known": known, "problems": problems}


def _of_folders(config: RunConfig, roots: Sequence[Path]) -> JsonObject:
    _check_places(config, roots)
    dataset, problems = image_folders.found(config)
    groups = [_group(table, dataset, roots) for table in dataset_file.described([dataset])]
    flat = len(dataset.subsets) == 1 and image_folders.is_flat(config.data.train_data_dir)
    return {"groups": groups, "file": "", "known": "", "flat": flat, "problems": problems}


def _group(table: DatasetTable, dataset: DatasetConfig | None, roots: Sequence[Path]) -> JsonObject:
    """A data set for the page: its own values, and the defaults of its empty fields."""
    known = {sources.source(subset): subset for subset in dataset.subsets} if dataset else {}
    rows = []
    for one in table.folders:
        source = one.texts.get("metadata_file") or one.texts.get("image_dir") or ""
        subset = known.get(source)
        shown = dataset_file.inherited(subset, one.texts) if subset else {}
        rows.append(
            {
                "at": one.at,
                "texts": one.texts,
                "shown": shown,
                "source": source,
                "images": _images(one.texts.get("image_dir", ""), roots),
            }
        )
    shown = dataset_file.inherited(dataset, table.texts) if dataset else {}
    return {"at": table.at, "texts": table.texts, "shown": shown, "rows": rows}


def _images(folder: str, roots: Sequence[Path]) -> int | None:
    """The number of images in a folder; None if the page may not read it, or it does not exist."""
    try:
        return image_folders.count(paths.folder(folder, roots))
    except (ConfigError, OSError):
        return None


def count_images(form: SettingsForm, given: Submission, roots: Sequence[Path]) -> JsonObject:
    """How a training counts the images of each folder, and the number of steps."""
    config = form.lenient_config(given)
    _check_places(config, roots)
    outside: list[Problem] = []
    processes = str(given.launch.get("num_processes", ""))
    world = int(processes) if re.fullmatch("[1-9][0-9]{0,3}", processes) else 1
    try:
        return shares.counted(config, lambda path: _may(path, roots, outside), world)
    except ConfigError as error:
        raise ConfigError(*(outside or error.problems)) from None


def _check_places(config: RunConfig, roots: Sequence[Path]) -> None:
    """Raise ConfigError for images in folders that the page may not read."""
    for name in ("train_data_dir", "reg_data_dir", "in_json", OPTION):
        if text := getattr(config.data, name):
            paths.inside(str(text), roots, name)


def _may(path: str, roots: Sequence[Path], outside: list[Problem]) -> bool:
    try:
        paths.inside(path, roots, "image_dir")
    except ConfigError as error:
        outside += error.problems
        return False
    return True


# ---- saving


def save_datasets(form: SettingsForm, given: Submission, sent: ApiRequest, roots: Sequence[Path]) -> JsonObject:
    """Save data sets to the dataset file that the form names, or to a new one.

    A file that was changed since it was loaded is not overwritten. Raises ConfigError, also for folders outside of the
    roots that the file did not name before.
    """
    named = sent.text("file").strip()
    new = form.lenient_config(given)
    path = paths.file(named, roots, READ, OPTION) if named else kept_file.free(place_of(new, roots))
    before: list[DatasetTable] = []
    if named:
        kept_file.check_size(path, OPTION)
        kept_file.check_unchanged(path, sent.text("known"), OPTION)
        before = dataset_file.read(path)
    wanted = _tables(sent.fields.get("groups"))
    if not any(one.folders for one in wanted):
        raise ConfigError(Problem(OPTION, ": name a folder of images"))
    there = {(one.at, inner.at): inner.texts for one in before for inner in one.folders}
    for one in wanted:
        for inner in one.folders:
            known = there.get((one.at, inner.at), {})
            for name in PATHS:
                if (text := inner.texts.get(name, "")) and text != known.get(name):
                    paths.inside(text, roots, name)
        one.folders = [made for inner in one.folders for made in image_folders.named(inner)]
    text = dataset_file.written(path, [one for one in wanted if one.folders])
    with clear_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    return {"file": str(path), "known": kept_file.state(path), "said": Message("Saved in {path}.", path=path)}


def _tables(sent: object) -> list[DatasetTable]:
    """The tables that the page sent, without anything of another shape."""
    if not isinstance(sent, list) or len(sent) > MAX_FOLDERS:
        raise ConfigError(NOT_OF_THE_PAGE)
    made = []
    for one in sent:
        rows = one.get("rows") if isinstance(one, dict) else None
        if not isinstance(rows, list) or len(rows) > MAX_FOLDERS or not all(isinstance(row, dict) for row in rows):
            raise ConfigError(NOT_OF_THE_PAGE)
        inner = [FolderTable(_texts(row, dataset_file.OF_FOLDER), _place(row)) for row in rows]
        made.append(DatasetTable(_texts(one, dataset_file.OF_DATASET), inner, _place(one)))
    return made


def _texts(sent: JsonObject, names: Sequence[str]) -> dict[str, str]:
    found = sent.get("texts")
    if not isinstance(found, dict) or not all(
        name in names and isinstance(text, str) and text.isprintable() and len(text) <= paths.MAX_PATH_LENGTH
        for name, text in found.items()
    ):
        raise ConfigError(NOT_OF_THE_PAGE)
    return found


def _place(sent: JsonObject) -> int | None:
    at = sent.get("at")
    if at is not None and (not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < MAX_FOLDERS):
        raise ConfigError(NOT_OF_THE_PAGE)
    return at


def place_of(config: RunConfig, roots: Sequence[Path], is_at_home: bool = False) -> Path:
    """The default place of a training's dataset file: beside its result, or in a folder of the user's home."""
    folder = kept_file.at_home(roots) if is_at_home else kept_file.beside_result(config, roots)
    name = f"{config.save.output_name or 'images'}-dataset.toml"
    return paths.file(str(folder / name), roots, READ, "output_dir")
