"""The settings of the data set tab: its fields, and the config that results from them and a training tab's form."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kohya_gui.server import paths, picker
from kohya_gui.tools import commands
from library.captioning.forms import FORMS
from library.config.building import build
from library.config.json_types import JsonMapping, JsonObject, JsonValue
from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.config.schema import options
from library.config.values import Option
from library.curation import collection
from library.curation.collection import ImageCollection, Picture
from library.families import RUNS, config_class
from library.masking.forms import FORMS as MASKS

HERE = Path(__file__).parent
SCRIPT = next(iter(RUNS))  # what a folder is counted for until a training tab is chosen
CONFIG = config_class(SCRIPT)
# Options that determine how images are counted and cropped, with their initial values.
SETTINGS: JsonObject = {
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


def config_of(
    folder: str, values: JsonMapping, roots: Sequence[Path], script: str = "", taken: Mapping[str, Any] = {}
) -> Any:
    """The part of a training's config that concerns images: the tab's fields on top of the values taken from a form.

    Raises ConfigError in the trainer's own words.
    """
    kind = config_class(script or SCRIPT)
    known = options(kind)
    held = {name: value for name, value in taken.items() if name in known and _decides(known[name])}
    given = {**held, **SETTINGS, **{name: value for name, value in values.items() if name in SETTINGS}}
    if given["resolution"] in ("", None) and not given["dataset_config"]:
        raise ConfigError("resolution: write the size of the images, such as 1024")
    if given["dataset_config"]:
        given["dataset_config"] = str(paths.inside(given["dataset_config"], roots, "dataset_config"))
    else:
        given["train_data_dir"] = str(paths.folder(folder, roots, "folder"))
    made = build(kind, {n: v for n, v in given.items() if n in known and v not in ("", None)}, notes=[])
    paths.allow(made, roots)
    collection.check(made)
    return made


def _decides(option: Option) -> bool:
    return option.section in SECTIONS or option.name in BESIDES


def mark(config: RunConfig, world: int = 1) -> str:
    """A mark that distinguishes scans of a folder with different settings, such as those of a second browser."""
    said = repr((config, world)).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(said, digest_size=8).hexdigest()


def places(collection: ImageCollection) -> Iterator[JsonObject]:
    """Each source of images with its share of an epoch."""
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


def markup() -> str:
    """The tab as HTML."""
    text = (HERE / "images.html").read_text(encoding="utf-8")
    fields = "".join(setting(options(CONFIG)[name], value) for name, value in SETTINGS.items())
    browse = {
        "FOLDER_BUTTON": picker.button("folder", "Image folder", "folder"),
        "SOURCE_BUTTON": picker.button("source", "Folder to copy from", "folder"),
        "SETTINGS": fields,
        "TAKES": " ".join(name for name, option in options(CONFIG).items() if _decides(option)),
        "CAPTION": commands.markup(FORMS, ("folder", "extension"), keeps=True),
        "MASKS": commands.markup(MASKS, ("folder",), keeps=True),
    }
    for name, made in browse.items():
        text = text.replace(f"<!-- {name} -->", made)
    return text


def setting(option: Option, value: JsonValue) -> str:
    """A setting as a field, with the label and help of the training tabs."""
    about, element = escape(option.help), f"images-{option.name}"
    if option.type is bool:
        box = f'<input type="checkbox" id="{element}" data-setting="{option.name}"{" checked" if value else ""}>'
        return f'<div class="field check" title="{about}"><label>{box}<span>{escape(option.label)}</span></label></div>'
    shown = escape(str(value))
    hint = ' placeholder="not set"' if value == "" else ""
    browse = picker.button(option.name, option.label, option.kind or "")
    return (
        f'<div class="field{" wide" if browse else ""}" title="{about}">'
        f'<label for="{element}">{escape(option.label)}</label>'
        f'<input id="{element}" data-setting="{option.name}" value="{shown}"{hint} spellcheck="false">{browse}</div>'
    )
