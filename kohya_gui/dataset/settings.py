"""The settings of the room Data: its fields, and the config that results from them and a training tab's form."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kohya_gui.server import paths, picker
from kohya_gui.tools import commands
from library.captioning.forms import FORMS
from library.config.building import build_config
from library.config.json_types import JsonMapping, JsonObject, JsonValue
from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.config.schema import options_of
from library.config.values import Option
from library.curation import collection
from library.curation.collection import ImageCollection, Picture
from library.families import RUNS, config_class
from library.masking.forms import FORMS as MASKS

DATASET_FOLDER = Path(__file__).parent
IMAGE_FOLDER_LABEL, SOURCE_LABEL = "Image folder", "Folder to copy from"  # of the fields in images.html
SCRIPT = next(iter(RUNS))  # the config for counting until a training tab is chosen
CONFIG = config_class(SCRIPT)
# Options that determine how images are counted and cropped, with their initial values.
COUNTING_OPTIONS: JsonObject = {
    "resolution": "1024,1024",
    "train_batch_size": 1,
    "max_train_epochs": "",
    "max_train_steps": "",
    "gradient_accumulation_steps": 1,
    "caption_extension": ".txt",
    "caption_separator": ",",
    "enable_bucket": True,
    "bucket_no_upscale": False,
    "exif_rotation": True,
    "min_bucket_reso": 256,
    "max_bucket_reso": 1024,
    "bucket_reso_steps": 64,
    "reg_data_dir": "",
    "in_json": "",
    "dataset_repeats": 1,
    "dataset_config": "",
    "validation_split": 0,
}
# All other options about images that are taken from a training tab's form.
SECTIONS, BESIDES = ("data", "captions", "validation"), ("seed", "resume")


def config_of_tab(
    folder: str, values: JsonMapping, roots: Sequence[Path], script: str = "", taken: Mapping[str, Any] = {}
) -> Any:
    """Return the part of a training's config that concerns images: the tab's fields on top of the values taken from a
    form.

    Raises ConfigError in the trainer's own words.
    """
    config_class_of_tab = config_class(script or SCRIPT)
    options = options_of(config_class_of_tab)
    taken_values = {name: value for name, value in taken.items() if name in options and _decides(options[name])}
    combined = {
        **taken_values,
        **COUNTING_OPTIONS,
        **{name: value for name, value in values.items() if name in COUNTING_OPTIONS},
    }
    if combined["resolution"] in ("", None) and not combined["dataset_config"]:
        raise ConfigError("resolution: write the size of the images, such as 1024")
    if combined["dataset_config"]:
        combined["dataset_config"] = str(paths.allowed_path(combined["dataset_config"], roots, "dataset_config"))
    else:
        combined["train_data_dir"] = str(paths.existing_folder(folder, roots, IMAGE_FOLDER_LABEL))
    config = build_config(
        config_class_of_tab, {n: v for n, v in combined.items() if n in options and v not in ("", None)}, notes=[]
    )
    paths.allow(config, roots)
    collection.check_buckets(config)
    return config


def _decides(option: Option) -> bool:
    return option.section in SECTIONS or option.name in BESIDES


def settings_mark(config: RunConfig, world: int) -> str:
    settings_text = repr((config, world)).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(settings_text, digest_size=8).hexdigest()


def image_sources(collection: ImageCollection) -> Iterator[JsonObject]:
    """Yield each source of images with its share of an epoch."""
    inside: dict[str, list[Picture]] = {place.folder: [] for place in collection.places}
    for picture in collection.pictures:
        if picture.used:
            inside[picture.folder].append(picture)
    for place in collection.places:
        shown = [p for p in inside[place.folder] if p.role != "held"]
        repeats = [p.repeats for p in shown] or [place.repeats]
        yield {
            "folder": place.folder,
            "repeats": place.repeats,
            "words": place.words,
            "images": place.images,
            "unused": place.unused,
            "path": place.path,
            "role": place.role,
            "fixed": place.fixed,
            "used": len(shown),
            "held": len(inside[place.folder]) - len(shown),
            "seen": sum(p.repeats for p in shown),
            "span": sorted({min(repeats), max(repeats)}),
        }


# ---- the initial HTML


def dataset_tab_html() -> str:
    """Return the tab as HTML."""
    text = (DATASET_FOLDER / "images.html").read_text(encoding="utf-8")
    fields = "".join(setting(options_of(CONFIG)[name], value) for name, value in COUNTING_OPTIONS.items())
    browse = {
        "FOLDER_BUTTON": picker.browse_button("folder", IMAGE_FOLDER_LABEL, "folder"),
        "SOURCE_BUTTON": picker.browse_button("source", SOURCE_LABEL, "folder"),
        "SETTINGS": fields,
        "TAKES": " ".join(name for name, option in options_of(CONFIG).items() if _decides(option)),
        "CAPTION": commands.forms_html(FORMS, ("folder", "extension")),
        "MASKS": commands.forms_html(MASKS, ("folder",)),
    }
    for name, html in browse.items():
        text = text.replace(f"<!-- {name} -->", html)
    return text


def setting(option: Option, value: JsonValue) -> str:
    """Return a setting as a field, with the label and help of the training tabs."""
    about, element = escape(option.help), f"images-{option.name}"
    if option.type is bool:
        box = f'<input type="checkbox" id="{element}" data-setting="{option.name}"{" checked" if value else ""}>'
        return f'<div class="field check" title="{about}"><label>{box}<span>{escape(option.label)}</span></label></div>'
    shown = escape(str(value))
    hint = ' placeholder="not set"' if value == "" else ""
    browse = picker.browse_button(option.name, option.label, option.kind or "")
    return (
        f'<div class="field{" wide" if browse else ""}" title="{about}">'
        f'<label for="{element}">{escape(option.label)}</label>'
        f'<input id="{element}" data-setting="{option.name}" value="{shown}"{hint} spellcheck="false">{browse}</div>'
    )
