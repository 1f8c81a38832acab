"""The images of a training as rows of its form, one for each folder: found by name, or listed in a dataset file.

A folder with images, one with folders named <repeats>_<words>, and a dataset file are shown in the same way. Settings
that a folder's name cannot express go to a dataset file, which the form names from then on.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from kohya_gui.form import kept_file
from kohya_gui.form.form import SettingsForm, Submission, as_sentence
from kohya_gui.server import paths, picker
from kohya_gui.server.json_api import NOT_OF_THE_PAGE, ApiRequest
from library.config.dataset import DatasetConfig, drafted
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, Problem
from library.config.run_config import RunConfig
from library.config.schema import options_of
from library.curation import dataset_file, image_folders, sources
from library.curation.dataset_file import KNOWN, DatasetTable, FolderTable

DATASET_OPTION = "dataset_config"
DATASET_SUFFIXES = (".toml", ".json")
MAX_FOLDERS = 500  # in a data set, and data sets in a file
PATHS = ("image_dir", "conditioning_data_dir", "control_directory", "metadata_file")
WATCHED_SECTIONS = ("data", "captions", "validation", "steps")  # sections that affect images and steps
FIELD_LABELS = {
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
    "color_aug": "Colour augmentation",
    "random_crop": "Random crop",
    "alpha_mask": "Alpha mask",
    "conditioning_data_dir": "Mask folder",
    "control_directory": "Reference folder",
    "metadata_file": "Metadata file",
}
# Options that rows replace once they are saved: a visitor may have filled in rows, and never named a dataset file.
REPLACED_BY_ROWS = ("train_data_dir", "reg_data_dir", "in_json")
PLACES = ("image_dir", "conditioning_data_dir", "control_directory")  # folders that images can be uploaded to


def reasons_of_rows(config: RunConfig) -> dict[str, Message]:
    """Return the options that the rows of a saved data set replace -> the reason, in the words of the page."""
    if not config.data.dataset_config:
        return {}
    file = Path(str(config.data.dataset_config)).name
    reason = Message("the images are those of the list below, which {file} holds", file=file)
    return dict.fromkeys(REPLACED_BY_ROWS, reason)


def datasets_section(configs: Mapping[str, type]) -> str:
    """Return the part of the form that shows the images of a training; datasets.js fills it."""
    watched = sorted(
        {
            name
            for config in configs.values()
            for name, option in options_of(config).items()
            if option.section in WATCHED_SECTIONS
        }
    )
    image_dir, repeats, *other_fields = (_folder_field_html(name) for name in dataset_file.OF_FOLDER)
    settings = "".join(_folder_field_html(name) for name in dataset_file.OF_DATASET)
    endings = ",".join(("image/jpeg", "image/png", "image/webp", ".bmp", ".avif", ".txt", ".caption"))
    return (
        f'<div class="card datasets" data-options="{" ".join(watched)}"><div class="head"><h2>All image folders</h2>'
        '<p class="sum" role="status"></p></div><div class="groups"></div>'
        '<template class="group"><div class="group"><details class="of-set"><summary><b></b> <span></span></summary>'
        f'<div class="grid">{settings}</div></details><ol></ol></div></template>'
        f'<template class="row"><li><div class="main">{image_dir}{repeats}<p class="numbers"></p>'
        '<div class="share" hidden><i></i></div></div>'
        f'<details><summary>Captions, masks and more</summary><div class="grid">{"".join(other_fields)}</div></details>'
        '<div class="row-acts"><button type="button" data-row="captions" title="Open this folder in Data, where you or '
        'a model can write captions">Images and captions</button>'
        '<button type="button" data-row="remove">Remove</button></div></li></template>'
        '<div class="drop"><p>Drop images and their captions here.</p><div class="send-acts">'
        '<label class="choose-images">Choose images<input type="file" multiple'
        f' accept="{endings}"></label><button type="button" data-row="add">Add a folder</button>'
        '<button type="button" data-row="add-set" title="Folders that are trained at another size" hidden>'
        "Add a data set</button></div></div>"
        '<div class="sending" hidden><span></span><div class="track"><i></i></div>'
        '<button type="button" data-row="stop">Stop</button></div>'
        '<p class="file" role="status"></p><ul class="notes"></ul></div>'
    )


def _folder_field_html(name: str) -> str:
    option, about = KNOWN[name], escape(as_sentence(KNOWN[name].help))
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
    browse = picker.browse_button(f"set-{name}", FIELD_LABELS[name], option.kind)
    label = f"<label><span>{FIELD_LABELS[name]}</span>{field}</label>"
    return f'<div class="of{wide}" title="{about}">{label}{browse}{send}</div>'


# ---- showing


def scan_form_datasets(form: SettingsForm, submission: Submission, roots: Sequence[Path]) -> JsonObject:
    """Return the data sets of a form with their folders, as far as the page may read them. No image is opened."""
    config = form.lenient_config(submission)
    data = config.data
    if not (data.dataset_config or data.train_data_dir or data.reg_data_dir):
        return {"groups": [], "file": "", "known": "", "problems": []}
    if not data.dataset_config:
        return _describe_folders(config, roots)
    path = paths.existing_file(str(data.dataset_config), roots, DATASET_SUFFIXES, DATASET_OPTION)
    kept_file.check_editable(path, DATASET_OPTION)
    state, tables = kept_file.file_state(path), dataset_file.read_dataset_tables(path)
    datasets, problems = drafted(config)
    first = {dataset.table: dataset for dataset in reversed(datasets)}  # of a table with several sizes
    groups = [_group(table, first.get(at), roots) for at, table in enumerate(tables)]
    return {"groups": groups, "file": str(path), "known": state, "problems": problems}


def _describe_folders(config: RunConfig, roots: Sequence[Path]) -> JsonObject:
    _check_places(config, roots)
    dataset, problems = image_folders.found(config)
    groups = [_group(table, dataset, roots) for table in dataset_file.tables_of_datasets([dataset])]
    flat = len(dataset.subsets) == 1 and image_folders.is_flat_folder(config.data.train_data_dir)
    return {"groups": groups, "file": "", "known": "", "flat": flat, "problems": problems}


def _group(table: DatasetTable, dataset: DatasetConfig | None, roots: Sequence[Path]) -> JsonObject:
    """Return a data set for the page: its own values, and the defaults of its empty fields."""
    subsets = {sources.source_of_subset(subset): subset for subset in dataset.subsets} if dataset else {}
    rows = []
    for folder in table.folders:
        source = folder.texts.get("metadata_file") or folder.texts.get("image_dir") or ""
        subset = subsets.get(source)
        shown = dataset_file.inherited(subset, folder.texts) if subset else {}
        rows.append(
            {
                "at": folder.at,
                "texts": folder.texts,
                "shown": shown,
                "source": source,
                "images": _count_folder_images(folder.texts.get("image_dir", ""), roots),
            }
        )
    shown = dataset_file.inherited(dataset, table.texts) if dataset else {}
    return {"at": table.at, "texts": table.texts, "shown": shown, "rows": rows}


def _count_folder_images(folder: str, roots: Sequence[Path]) -> int | None:
    """Return the number of images in a folder; None if the page may not read it, or it does not exist."""
    try:
        return image_folders.count_images(paths.existing_folder(folder, roots))
    except (ConfigError, OSError):
        return None


def count_images(form: SettingsForm, submission: Submission, roots: Sequence[Path]) -> JsonObject:
    """Return how a training counts the images of each folder, and the number of steps."""
    config = form.lenient_config(submission)
    _check_places(config, roots)
    outside: list[Problem] = []
    processes = str(submission.launch.get("num_processes", ""))
    world = int(processes) if re.fullmatch("[1-9][0-9]{0,3}", processes) else 1
    try:
        return image_folders.count_by_folder(config, lambda path: _is_readable(path, roots, outside), world)
    except ConfigError as error:
        raise ConfigError(*(outside or error.problems)) from None


def _check_places(config: RunConfig, roots: Sequence[Path]) -> None:
    """Raise ConfigError for images in folders that the page may not read."""
    for name in ("train_data_dir", "reg_data_dir", "in_json", DATASET_OPTION):
        if text := getattr(config.data, name):
            paths.allowed_path(str(text), roots, name)


def _is_readable(path: str, roots: Sequence[Path], outside: list[Problem]) -> bool:
    try:
        paths.allowed_path(path, roots, "image_dir")
    except ConfigError as error:
        outside += error.problems
        return False
    return True


# ---- saving


def save_datasets(form: SettingsForm, submission: Submission, request: ApiRequest, roots: Sequence[Path]) -> JsonObject:
    """Save data sets to the dataset file that the form names, or to a new one.

    A file that was changed since it was loaded is not overwritten. Raises ConfigError, also for folders outside of the
    roots that the file did not name before.
    """
    named = request.text("file").strip()
    new = form.lenient_config(submission)
    tables_before: list[DatasetTable] = []
    if not named:
        path = kept_file.free_path(dataset_file_place(new, roots))
    else:
        path = paths.file(named, roots, DATASET_SUFFIXES, DATASET_OPTION)
        kept_file.check_editable(path, DATASET_OPTION)
        kept_file.check_unchanged(path, request.text("known"), DATASET_OPTION)
        tables_before = dataset_file.read_dataset_tables(path)
    tables = _sent_tables(request.fields.get("groups"))
    if not any(table.folders for table in tables):
        raise ConfigError(Problem(DATASET_OPTION, ": name a folder of images"))
    texts_before = {(table.at, folder.at): folder.texts for table in tables_before for folder in table.folders}
    for table in tables:
        for folder in table.folders:
            folder_texts_before = texts_before.get((table.at, folder.at), {})
            for name in PATHS:
                if (text := folder.texts.get(name, "")) and text != folder_texts_before.get(name):
                    paths.allowed_path(text, roots, name)
        table.folders = [named for folder in table.folders for named in image_folders.read_folder_name(folder)]
    text = dataset_file.written(path, [table for table in tables if table.folders])
    return kept_file.save(path, text)


def _sent_tables(sent: object) -> list[DatasetTable]:
    """Return the tables that the page sent, without anything of another shape."""
    if not isinstance(sent, list) or len(sent) > MAX_FOLDERS:
        raise ConfigError(NOT_OF_THE_PAGE)
    tables = []
    for group in sent:
        rows = group.get("rows") if isinstance(group, dict) else None
        if not isinstance(rows, list) or len(rows) > MAX_FOLDERS or not all(isinstance(row, dict) for row in rows):
            raise ConfigError(NOT_OF_THE_PAGE)
        folders = [FolderTable(_sent_texts(row, dataset_file.OF_FOLDER), _table_position(row)) for row in rows]
        tables.append(DatasetTable(_sent_texts(group, dataset_file.OF_DATASET), folders, _table_position(group)))
    return tables


def _sent_texts(sent: JsonObject, names: Sequence[str]) -> dict[str, str]:
    texts = sent.get("texts")
    if not isinstance(texts, dict) or not all(
        name in names and isinstance(text, str) and text.isprintable() and len(text) <= paths.MAX_PATH_LENGTH
        for name, text in texts.items()
    ):
        raise ConfigError(NOT_OF_THE_PAGE)
    return texts


def _table_position(sent: JsonObject) -> int | None:
    at = sent.get("at")
    if at is not None and (not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < MAX_FOLDERS):
        raise ConfigError(NOT_OF_THE_PAGE)
    return at


def dataset_file_place(config: RunConfig, roots: Sequence[Path], is_at_home: bool = False) -> Path:
    """Return the default place of a training's dataset file: beside its result, or in a folder of the user's home."""
    folder = kept_file.at_home(roots) if is_at_home else kept_file.beside_result(config, roots)
    name = f"{config.save.output_name or 'images'}-dataset.toml"
    return paths.file(str(folder / name), roots, DATASET_SUFFIXES, "output_dir")
