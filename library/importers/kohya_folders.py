"""The folders and metadata files of kohya_ss's Finetune tab, which it can write before a training."""

import re

from library.config.problems import Message, option_values
from library.importers.builder import ImportBuilder, describe, is_on
from library.importers.shared import dataset_toml, describe_datasets

# Keys of the metadata files -> their usual names: of captions, and of latents, which are made from those.
METADATA_FILES = {"caption_metadata_filename": "meta_cap.json", "latent_metadata_filename": "meta_lat.json"}
# The switches with which a training of kohya_ss writes these files first, by their two names.
METADATA_SWITCHES = (("create_caption", "generate_caption_database"), ("create_buckets", "generate_image_buckets"))
CONCEPT = re.compile(r"\d+_.")  # how a folder's name begins that says its repeats, which this tab does not read


def read_folders(builder: ImportBuilder, tab: str) -> None:
    """Import the folders and files of a fine-tune."""
    if tab != "finetune":
        return
    builder.set_by("enable_bucket", "on, as in every fine-tune of kohya_ss", {"enable_bucket": True})
    _import_metadata(builder)
    folder = str(builder.get("image_folder") or "")
    name = re.split(r"[/\\]", folder.rstrip("/\\"))[-1]
    if CONCEPT.match(name) and not builder.get("dataset_config"):
        # As train_data_dir it would be refused, since it is what should be inside of that.
        repeats = int(builder.number("dataset_repeats") or 1)
        subset = {"image_dir": folder, "num_repeats": repeats, "metadata_file": builder.values.pop("in_json", None)}
        builder.texts["dataset_config"] = dataset_toml({}, [({}, [subset])])
        text = describe_datasets(builder.texts["dataset_config"])
        builder.explain(text, "image_folder", "dataset_repeats")
    elif folder:
        builder.rename("image_folder", "train_data_dir")


def _import_metadata(builder: ImportBuilder) -> None:
    """Import the metadata file, unless the training would write it from captions, which are read directly here."""
    latents = str(builder.get("use_latent_files") or "Yes").casefold() == "yes"
    writes_captions, writes_latents = (any(is_on(builder.get(key)) for key in keys) for keys in METADATA_SWITCHES)
    if builder.get("train_dir") and writes_captions:
        text = "kohya_ss writes its metadata from the captions beside the images, which are read directly here"
        builder.explain(text, "train_dir", *METADATA_FILES, "use_latent_files")
        return
    used_key, other_key = [*METADATA_FILES][:: -1 if latents and not writes_latents else 1]
    if folder := str(builder.get("train_dir") or ""):
        name = str(builder.get(used_key) or METADATA_FILES[used_key])
        line = "\\" if "\\" in folder and "/" not in folder else "/"
        path = folder.rstrip("/\\") + line + name
        builder.change(
            "train_dir",
            Message("with {key}: {option}", key=used_key, option=option_values({"in_json": str(path)})),
            {"in_json": path},
        )
        builder.explain("is the file name of in_json", used_key)
    builder.explain(Message("chooses {key} for in_json", key=used_key), "use_latent_files")
    for key in (used_key, other_key):
        if key in builder.left():
            builder.ignore(key, describe({"in_json": used_key}) if key == other_key else "there is no train_dir")
